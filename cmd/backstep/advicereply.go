package main

import (
	"context"
	"database/sql"
	"fmt"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
)

// replyTo returns the id that participants of ours give the reply to a command.
func replyTo(command string) string { return "re:" + command }

// placesOf returns where the message is that a saga awaits, and the reply to it.
func placesOf(ctx context.Context, db *sql.DB, d saga.Detail) ([]outbox.Place, error) {
	places, err := outbox.Find(ctx, db, d.CommandID)
	if err != nil {
		return nil, err
	}
	replies, err := outbox.Find(ctx, db, replyTo(d.CommandID))
	return append(places, replies...), err
}

// withoutReply parts the places of a command from those of the reply to it.
func withoutReply(places []outbox.Place) (command, reply []outbox.Place) {
	for _, p := range places {
		if p.RoutingKey == saga.RepliesQueue {
			reply = append(reply, p)
		} else {
			command = append(command, p)
		}
	}
	return command, reply
}

// replyAdvice is for a reply that has come and could not be handled.
func replyAdvice(d saga.Detail, replies []outbox.Place) string {
	id := quote(replyTo(d.CommandID))
	var last outbox.Place
	for _, p := range replies {
		if p.Status == "SCHEDULED" {
			last = p
			break
		}
		if !p.At.Before(last.At) {
			last = p
		}
	}
	const came = "The participant's reply has come, "
	switch {
	case last.Status == "SCHEDULED" && !last.Deferred.IsZero():
		return fmt.Sprintf(came+"and since %s UTC workers of queue replies hand it back: %s. It comes again in %s; if that does not help for long it is parked.",
			clock(last.Deferred), last.LastError, short(-last.Age))
	case last.Status == "SCHEDULED":
		return fmt.Sprintf(came+"and could not be handled: %s. It comes again in %s.", last.LastError, short(-last.Age))
	case last.Exchange == message.ParkedExchange:
		return fmt.Sprintf(came+"could not be handled, and was parked: backstep parked show %s says why. Cure that; the reply then moves the saga on:\n"+
			"  backstep parked replay %[1]s --queue replies --reason '…'", id)
	}
	return came + "could not be handled, and its row to queue replies is " + last.Status + " again: backstep outbox show " + id + "."
}

// keptAdvice is for a reply that has come and could not be handled, and is in no table of ours: it is to an earlier
// attempt, say, or has an id of the participant's own.
func keptAdvice(d saga.Detail, kept saga.StepStatus) string {
	said, then := "it has done what it was asked for", "retry goes on with that and does not ask it again; so does the reply, when it comes again"
	if kept == saga.StepFailed {
		said, then = "it has refused", "the reply moves the saga on, when it comes again"
	}
	return fmt.Sprintf("The reply of step %s's participant has come, and could not be handled here. What it says is kept: %s. Cure why it could not be handled (the log of the workers of queue replies says it); %s "+
		"or, if it was parked, is replayed (backstep parked list --queue replies).", stepOf(d, d.CurrentStep), said, then)
}
