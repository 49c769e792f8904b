// Package outbox makes a message part of the transaction that caused it, and later
// publishes it. It owns outbox_events, outbox_shards, relay_members, scheduled_messages and
// outbox_actions.
//
// Promised: once the caller's transaction commits, every message it added reaches its queue
// or is parked with a reason. First deliveries with one ordering key are in commit order when
// their writers hold a lock on the key before they add. A message may be published more than
// once, always with the same id, properties, headers and body.
//
// Not promised: exactly once on the wire (the inbox removes duplicates), and any order between
// different keys.
//
// A row's life:
//
//	Add ──► PENDING ──► PUBLISHED   acked and not returned
//	           │  ▲
//	           │  └── nack, return: its destination is held and tried again
//	           ├────► PARKED        unroutable for too long, or refused for ever
//
//	Requeue:   PARKED ──► PENDING; Republish: PUBLISHED ──► PENDING; a generation more
//	Drop:      PENDING ──► PARKED ──► deleted, when no relay can have it in memory or in flight
//
//	Schedule ──► scheduled_messages ──► PENDING when due
//
// Rows hash by ordering key onto 16 shards. A relay publishes the shards it holds leases on,
// so there is no claim to write and no row lock on the way: read, publish, mark.
//
// What cannot go delays nobody else. A key's rows wait in its line, one in flight at a time. A
// destination that refused is held, and one row at a time tries it out on a channel of its own.
// A pass over the pending rows walks on beyond what there is no room for, and the next ones jump
// over that. What the broker says decides about a row; an outage, of whatever length, does not.
package outbox
