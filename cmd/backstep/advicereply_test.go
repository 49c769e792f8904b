package main

import (
	"slices"
	"strings"
	"testing"

	"backstep/internal/outbox"
	"backstep/internal/saga"
)

// TestReplyAdvice: a reply that is in and cannot be handled is not waited for: it is said where it is, and what
// helps.
func TestReplyAdvice(t *testing.T) {
	t.Parallel()
	l := sagasOf(t)
	id := l.place("a")
	command := l.awaited(id).MessageID
	const columns = "message_id, ordering_key, exchange, routing_key, properties, headers, payload"
	reply := func(table, exchange, more, values string) {
		t.Helper()
		execute(t, l.db, "INSERT INTO "+table+" ("+columns+more+") SELECT CONCAT('re:', message_id), ordering_key, ?, 'replies', properties, "+
			"JSON_SET(CONVERT(headers USING utf8mb4), '$.\"x-deferred-since\"', '2026-01-02T12:00:00Z'), payload"+values+
			" FROM outbox_events WHERE message_id = ?", exchange, []byte(command))
	}
	show := func(want ...string) {
		t.Helper()
		l.run("", "saga", "show", id).want(exitOK, append(want, "What you can do")...)
	}
	reply("scheduled_messages", "backstep.commands", ", due_at, last_error", ", NOW(6) + INTERVAL 1 HOUR, 'hook of saga: boom'")
	show("The participant's reply has come, and since 2026-01-02 12:00:00.000 UTC workers of queue replies hand it back: hook of saga: boom. It comes again in ")
	execute(t, l.db, "DELETE FROM scheduled_messages")
	reply("outbox_events", "backstep.commands", "", "")
	show("could not be handled, and its row to queue replies is PENDING again: backstep outbox show re:" + command)
	execute(t, l.db, "UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6)")
	reply("outbox_events", "backstep.parked", ", status, published_at", ", 'PUBLISHED', NOW(6)")
	l.park(id, "the reply could not be handled")
	show("It needs somebody. The participant's reply has come, could not be handled, and was parked: backstep parked show re:"+command+" says why.",
		"\n  backstep parked replay re:"+command+" --queue replies --reason '…'")
}

// TestKeptAdvice: a reply that is in no table of ours, to an earlier attempt, say, is not waited for if what it says
// is kept, and what helps is offered: wherever the command is that an operator's retry has made.
func TestKeptAdvice(t *testing.T) {
	t.Parallel()
	const waits = "waits for the participant's reply"
	handedBack := handedBack("no")
	for _, status := range []saga.Status{saga.Running, saga.ManualAction} {
		for _, places := range [][]outbox.Place{nil, {{Status: "PUBLISHED", RoutingKey: "payment"}}, handedBack} {
			for kept, want := range map[saga.StepStatus]string{
				saga.StepCompleted:   "What it says is kept: it has done what it was asked for.",
				saga.StepCompensated: "What it says is kept: it has done what it was asked for.",
				saga.StepFailed:      "What it says is kept: it has refused.",
			} {
				d := detail(status, 1, "m")
				retry := saga.Operation{Verb: saga.VerbRetry, Step: "charge-payment", Direction: saga.Execute}
				got := strings.Join(advice(d, slices.Clone(places), nil, offers{kept: kept, list: []saga.Offer{{Operation: retry}}}), "\n")
				offered := strings.Contains(got, "  backstep saga retry the-saga --reason '…'    # go on with what the participant has done")
				if !strings.Contains(got, "The reply of step charge-payment's participant has come") || !strings.Contains(got, want) || strings.Contains(got, waits) || offered != (kept != saga.StepFailed) {
					t.Errorf("%s, %s, %d places: %s", status, kept, len(places), got)
				}
			}
		}
	}
}
