// Package amqp connects to RabbitMQ 3.10 to 4.4: sessions and reconnection, topology,
// consumers, and publishing with confirms. It is the only package that imports amqp091;
// everybody else sees messages of package message.
//
// A Client keeps one Session, one connection, at a time. Channels, deliveries, tags and
// confirms belong to their session and end with it. Nothing below Client connects again:
// whoever used a session that ended waits for the next one and starts over.
//
//	            dial, OnSession             socket lost, closed by the broker
//	connecting ────────────────► connected ──────────────────────────────────┐
//	    ▲                         │   ▲                                      │
//	    │                alarm on │   │ alarm off                            │
//	    │                         ▼   │                                      │
//	    │                        blocked ────────────────────────────────────┤
//	    └────────────── wait: jittered, up to MaxBackoff ◄───────────────────┘
//	any of them ── Run's context ends ──► stopped
//
// A Subscription delivers each message with a tag that is good for its own Ack and Nack only.
// After its session's end they return ErrSessionGone and nothing is sent: the broker has
// requeued the message, and on another channel the same number is another message.
//
//	consuming ── Reopen ──► consuming with another prefetch
//	consuming ── Cancel ──► draining: what had arrived, then Deliveries is closed
//	either ── Close, session or channel lost, consumer cancelled by the broker ──► closed
//
// A ConfirmChannel gives each message it wrote exactly one message.Result, whatever happens
// to the channel:
//
//	Confirmed  acked and not returned
//	Nacked     negatively confirmed
//	Returned   acked, but no queue was bound; or the channel was closed because the exchange
//	           of this message is missing or forbidden
//	Aborted    the broker closed channel or connection with an error, perhaps over it
//	Lost       the channel went for another reason
//
// Only Confirmed says that the message is in a queue, and none of the others that it is not.
//
// Not promised: that foreign messages can all be read. amqp091 v1.16 cuts the connection over
// a header table nested deeper than 32 or with more than 8192 entries. The policy's delivery
// limit dead-letters such a message; Publish refuses to make one.
package amqp
