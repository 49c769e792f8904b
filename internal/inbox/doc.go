// Package inbox turns deliveries into transactions, once each. It owns inbox_messages.
//
// A Lane is one consumer, one goroutine and one transaction at a time. It takes the first
// delivery and what is already there, records all message ids, lets the Handler work, adds
// what follows to the outbox, commits, and acknowledges with one cumulative ack.
//
// Promised: a message's database effects are applied once per queue, however often it is
// delivered within the retention; an older one is parked, not processed. An inbox record
// commits only together with the delivery's consequence. A failing message harms no
// neighbour, and no handler ends its lane or holds it for ever: one that does not heed its
// context is left behind without effect. Time in which the database is away spends nothing and
// parks nothing. The answer of a call counts in the session that its delivery came in: if that is
// gone, the redelivered message calls again.
//
//	delivery ──► recorded ──► handled ──► committed ──► acked
//	                │            │
//	                │            ├── parked:   no record; a copy goes to <queue>.parked; acked
//	                │            ├── deferred: no record; the same id comes back later; acked
//	                │            ├── retry:    recorded; a new id comes back later; acked
//	                │            └── outside:  no record, no ack; the lane makes its call and goes on with
//	                │                          others; it comes back in a later batch with the answer
//	                └── duplicate: acked
package inbox
