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
package outbox
