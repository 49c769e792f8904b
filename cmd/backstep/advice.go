package main

import (
	"fmt"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
)

// advice says what is going on with a saga and what can be done about it.
func advice(d saga.Detail, places []outbox.Place) []string {
	switch d.Status {
	case saga.Completed:
		return []string{"It has completed; there is nothing to do."}
	case saga.Compensated:
		return []string{"It was undone because of the failure above; there is nothing to do."}
	case saga.ManualAction:
		return manualAdvice(d, places)
	}
	if d.CommandID == "" {
		return []string{"It has not ended and yet awaits no message: this is a bug; please report it with the output of --json."}
	}
	lines := []string{}
	for _, p := range places {
		lines = append(lines, placeAdvice(d, p))
	}
	if len(lines) == 0 {
		lines = append(lines, "The message it awaits is in no table: it was published longer ago than rows are kept, or somebody deleted it. "+
			"If it is in no queue either, it will not come.")
	}
	return lines
}

func placeAdvice(d saga.Detail, p outbox.Place) string {
	what := fmt.Sprintf("attempt %d", d.Attempt)
	switch p.Status {
	case "SCHEDULED":
		return fmt.Sprintf("It waits for its time: %s is due in %s, because the one before failed: %s", what, short(-p.Age), p.LastError)
	case "PARKED":
		return fmt.Sprintf("The relay could not publish %s to %s %s and parked it: %s", what, p.Exchange, p.RoutingKey, p.LastError)
	case "PENDING":
		s := fmt.Sprintf("The message has waited for a relay for %s. Is one running (backstep outbox relays), and does it reach the broker? See backstep outbox show %s", short(p.Age), quote(d.CommandID))
		if p.LastError != "" {
			s += " The broker refused it: " + p.LastError
		}
		return s
	case "PUBLISHED":
		if p.Exchange == message.ParkedExchange {
			return fmt.Sprintf("A worker parked a copy to %s.parked %s ago.", p.RoutingKey, short(p.Age))
		}
		return fmt.Sprintf("The message was published to queue %s %s ago; a worker has it in hand or will take it. "+
			"If nothing moves: does the queue have a consumer (management UI), and is its worker ready (/readyz)?", p.RoutingKey, short(p.Age))
	}
	return fmt.Sprintf("The message is %s, to %s %s.", p.Status, p.Exchange, p.RoutingKey)
}

// manualAdvice is for a saga that waits for somebody. Its parked command is still awaited, so
// bringing it back moves the saga on; after a failed compensation nothing is.
func manualAdvice(d saga.Detail, places []outbox.Place) []string {
	if d.CommandID == "" {
		return []string{
			"It needs somebody: a compensation failed for good, so what its step did stands.",
			"Put right by hand what is named above. There is no command yet that moves the saga on from here.",
		}
	}
	if len(places) == 0 {
		return []string{
			"It needs somebody: the message it awaits is in no table. It was dropped, or published longer ago than rows are kept: backstep outbox show " + quote(d.CommandID),
			"There is no command yet that moves the saga on from here.",
		}
	}
	lines := []string{"It needs somebody: the message it awaits was parked. Cure the cause named above; the message then moves the saga on:"}
	for _, p := range places {
		switch {
		case p.Status == "PARKED":
			lines = append(lines, fmt.Sprintf("  Its outbox row, to %s %s, is PARKED: backstep outbox requeue %s --reason '…'", p.Exchange, p.RoutingKey, quote(d.CommandID)))
		case p.Exchange == message.ParkedExchange:
			lines = append(lines, fmt.Sprintf("  It is in the queue %s.parked: backstep parked replay %s --queue %[1]s --reason '…'", p.RoutingKey, quote(d.CommandID)))
		}
	}
	return lines
}
