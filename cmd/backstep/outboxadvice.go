package main

import (
	"fmt"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
)

// rowAdvice says what is going on with an outbox row and what can be done about it.
func rowAdvice(d *outbox.Detail) []string {
	var lines []string
	switch d.Status {
	case outbox.StatusPublished:
		lines = append(lines, "The broker has confirmed it. To send it once more:",
			// Others may have its key: the moment tells it from them.
			fmt.Sprintf("  backstep outbox republish --key %s --since %s --until %s --reason '…'", quote(d.Key),
				d.PublishedAt.UTC().Format(time.RFC3339Nano), d.PublishedAt.UTC().Add(time.Microsecond).Format(time.RFC3339Nano)))
	case outbox.StatusParked:
		if n := len(d.Actions); n > 0 && d.Actions[n-1].Action == "withdraw" {
			lines = append(lines, "Somebody began to drop it; no relay reads it any more. To finish that:", dropCommand(d),
				"To send it all the same:", fmt.Sprintf("  backstep outbox requeue %d --reason '…'", d.ID))
			break
		}
		lines = append(lines, "A relay has written it off, for the reason above. When that is cured:",
			fmt.Sprintf("  backstep outbox requeue %d --reason '…'", d.ID), "If it must never be sent:", dropCommand(d))
	default:
		lines = append(lines, whyItWaits(d)...)
	}
	if id := d.Message.Headers.String(message.HeaderSagaID); id != "" {
		lines = append(lines, "It belongs to a saga:", "  backstep saga show "+quote(id))
	}
	return lines
}

func dropCommand(d *outbox.Detail) string {
	return fmt.Sprintf("  backstep outbox drop %d --reason '…'", d.ID)
}

// whyItWaits says what holds up a pending row: what comes first holds up the rest.
func whyItWaits(d *outbox.Detail) []string {
	var lines []string
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	switch {
	case d.Owner == "":
		say("It waits for a relay: none owns shard %d. Is one running? See backstep outbox relays.", d.Shard)
	case d.Silent < 0:
		say("Relay %s owns its shard, but is gone; another takes over if one is running. See backstep outbox relays.", d.Owner)
	default:
		say("Relay %s owns its shard; its last heartbeat was %s ago.", d.Owner, short(d.Silent))
	}
	if d.Ahead != nil {
		say("An earlier row with the same key goes first: backstep outbox show %d", d.Ahead.ID)
	}
	switch {
	case d.Held != nil && d.Held.ID == d.ID:
		say("The broker has refused it %s; it is tried again every few seconds, and parked after a while (BACKSTEP_RELAY_PARK_AFTER, 15m by default): %s", times(d.Attempts), d.LastError)
	case d.Held != nil:
		say("Its destination is held: the broker refused row %d, which goes there too (%s). Rows wait until one gets through: %s",
			d.Held.ID, times(d.Held.Attempts), d.Held.LastError)
	case d.Ahead == nil && d.Owner != "" && d.Silent >= 0:
		say("Nothing in the database holds it up. If it stays: does the relay reach the broker (/readyz), and is there room in the queue (the management UI)? " +
			"A full queue is not recorded here; the relay logs \"destination held\".")
	}
	if d.Held != nil && d.Exchange == message.CommandsExchange {
		say("If the queue or its binding is missing: backstep topology apply")
	}
	return append(lines, "If it must never be sent:", dropCommand(d))
}

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}
