package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
)

// advice says what is going on with a saga and what can be done about it.
func advice(d saga.Detail, places []outbox.Place, consumers []saga.Consumer, can offers) []string {
	var lines []string
	places, replies := withoutReply(places)
	switch {
	case d.Status == saga.Completed, d.Status == saga.Compensated:
		lines = []string{endAdvice(d)}
		if d.Status == saga.Compensated {
			return lines
		}
	case d.Status == saga.ManualAction:
		if lines = manualAdvice(d, places, replies, can.kept); d.CommandID != "" {
			lines = append(lines, callAdvice(d)...)
		}
	case d.CommandID == "":
		lines = []string{"It has not ended and yet awaits no message: this is a bug; please report it with the output of --json."}
	case len(replies) > 0:
		lines = []string{replyAdvice(d, replies)}
	case can.kept != "":
		lines = []string{keptAdvice(d, can.kept)}
	default:
		lines = append(callAdvice(d), waitAdvice(d, places, consumers)...)
	}
	return append(lines, can.advice(d, places)...)
}

// callAdvice is for a saga at work whose step calls another system.
func callAdvice(d saga.Detail) (lines []string) {
	if !d.CallOpen {
		return nil
	}
	switch callStatus(d) {
	case "DONE":
		lines = []string{"Its call to another system has been made; what it said is yet to be written here."}
	default:
		lines = []string{"Its call to another system is being made, or was: what became of it is not known yet."}
	}
	if unwanted(d) {
		lines = append(lines, "That it is to be undone is noted ("+d.CancelReason+"). It is done when the call that is being made ends; if none is any more, "+
			"when its message comes again, as if the call had been made: no other is made.")
	}
	return lines
}

// unwanted reports whether a saga with an open call is to be undone.
func unwanted(d saga.Detail) bool {
	return d.CallOpen && d.CancelReason != "" && d.Direction == saga.Execute
}

// callStatus returns the status of the call of the step a saga is at, "" if there is none.
func callStatus(d saga.Detail) string { return statusOfCall(d, d.Direction) }

// statusOfCall is callStatus in that direction.
func statusOfCall(d saga.Detail, dir saga.Direction) string {
	for _, c := range d.Calls {
		if c.Step == d.CurrentStep && c.Direction == dir {
			return c.Status
		}
	}
	return ""
}

// endAdvice says how a saga came to its end, and what of it somebody has to have done by hand.
func endAdvice(d saga.Detail) string {
	how, by := "It was undone because of the failure above", resolvedBy(d)
	switch {
	case by != "":
		how = "It was resolved by hand " + by
	case d.Status == saga.Completed:
		how = "It has completed"
	case d.CancelReason != "":
		how = "It was undone as was asked for (" + d.CancelReason + ")"
	}
	if left := sagas().Left(d, by != ""); left != "" {
		return how + left + "."
	}
	return how + "; there is nothing to do."
}

// resolvedBy says who resolved a saga that has ended, and why; "": nobody did.
func resolvedBy(d saga.Detail) string {
	for _, a := range slices.Backward(d.Actions) {
		switch saga.Verb(a.Action) {
		case saga.VerbResolve:
			return fmt.Sprintf("by %s (%s)", a.Actor, a.Reason)
		case saga.VerbRetry, saga.VerbSkip, saga.VerbCancel, saga.VerbCompensate:
			return "" // it went on after whatever came before
		}
	}
	return ""
}

// waitAdvice says where the message is that a saga at work awaits.
func waitAdvice(d saga.Detail, places []outbox.Place, consumers []saga.Consumer) (lines []string) {
	for _, p := range current(places) {
		lines = append(lines, placeAdvice(d, p, consumers))
	}
	if len(lines) == 0 {
		said := "The message it awaits is in no table: it was published longer ago than rows are kept, or somebody deleted it. "
		switch {
		case !remote(d):
			said += "If it was lost, the workers send it again by themselves: " + whenRescued
		case retried(d):
			said += "Somebody has sent another already; is the participant running, and does it reply?"
		default:
			said += askedAgain(d) + "If it is in no queue either, retry sends another now."
		}
		lines = append(lines, said)
	}
	return lines
}

// current leaves out the copies that are no more: each time a message is handed back it becomes a new
// one, with the same id.
func current(places []outbox.Place) (list []outbox.Place) {
	var last time.Time
	waits := false
	command := func(p outbox.Place) bool { return p.Status == "PUBLISHED" && p.Exchange != message.ParkedExchange }
	for _, p := range places {
		if command(p) && p.At.After(last) {
			last = p.At
		}
		waits = waits || p.Status == "SCHEDULED" || p.Status == "PENDING"
	}
	for _, p := range places {
		if !command(p) || !waits && p.At.Equal(last) {
			list = append(list, p)
		}
	}
	return list
}

// deferred reports whether workers hand back the message that a saga awaits, as not theirs to handle.
func deferred(places []outbox.Place) bool {
	return slices.ContainsFunc(current(places), func(p outbox.Place) bool { return !p.Deferred.IsZero() })
}

// remote reports whether the step a saga is at is a participant's.
func remote(d saga.Detail) bool {
	def, err := sagas().DefinitionOf(d)
	return err == nil && def.Remote(d.CurrentStep)
}

// retried reports whether the message that is awaited is there because somebody retried.
func retried(d saga.Detail) bool {
	for _, a := range d.Actions {
		var after struct {
			CommandID string `json:"command_id"`
		}
		if a.Action == string(saga.VerbRetry) && json.Unmarshal(a.After, &after) == nil && after.CommandID == d.CommandID {
			return true
		}
	}
	return false
}

func placeAdvice(d saga.Detail, p outbox.Place, consumers []saga.Consumer) string {
	what := fmt.Sprintf("attempt %d", d.Attempt)
	switch p.Status {
	case "SCHEDULED":
		if !p.Deferred.IsZero() {
			return deferredAdvice(d, p)
		}
		if unwanted(d) {
			return fmt.Sprintf("Its call has failed, so it is undone in %s: %s", short(-p.Age), p.LastError)
		}
		due := "in " + short(-p.Age)
		if p.Age >= 0 {
			due = "now"
		}
		return fmt.Sprintf("It waits for its time: %s is due %s, because the one before failed: %s", what, due, p.LastError)
	case "PARKED":
		return fmt.Sprintf("The relay could not publish %s to %s %s and parked it: %s.%s", what, p.Exchange, p.RoutingKey, p.LastError, noRoute(p))
	case "PENDING":
		see := " See backstep outbox show " + quote(d.CommandID) + "."
		if p.LastError != "" {
			return fmt.Sprintf("The message has waited for %s, for the broker refused it: %s.%s It is tried again every few seconds, and parked after a while.",
				short(p.Age), p.LastError, noRoute(p)) + see
		}
		return fmt.Sprintf("The message has waited for a relay for %s. An earlier one of the saga goes first, or no relay is running (backstep outbox relays), or none reaches the broker.", short(p.Age)) + see
	case "PUBLISHED":
		if p.Exchange == message.ParkedExchange {
			return fmt.Sprintf("A worker parked a copy to %s.parked %s ago.", p.RoutingKey, short(p.Age))
		}
		if remote(d) {
			return remoteAdvice(d, p)
		}
		if d.CallOpen {
			return fmt.Sprintf("The message was published to queue %s %s ago. A worker took it and makes the call, or has ended since; then the broker gives the message to another.", p.RoutingKey, short(p.Age))
		}
		said := queueAdvice(p, consumers)
		if !p.Deferred.IsZero() {
			said += fmt.Sprintf(" Since %s UTC workers hand it back; their log says why (message deferred).", clock(p.Deferred))
		}
		return said
	}
	return fmt.Sprintf("The message is %s, to %s %s.", p.Status, p.Exchange, p.RoutingKey)
}

// noRoute says what is wrong if the broker returned a message.
func noRoute(p outbox.Place) string {
	if !strings.Contains(p.LastError, "NO_ROUTE") {
		return ""
	}
	return fmt.Sprintf(" No queue is bound under %s on exchange %s: declare it, and bind it.", p.RoutingKey, p.Exchange)
}

// deferredAdvice is for a message that a worker has handed back because another may be able to handle it.
func deferredAdvice(d saga.Detail, p outbox.Place) string {
	cure := "that is set up for it, or of the release that knows the definition,"
	if d.CallOpen {
		cure = "with the BACKSTEP_PAYMENT_URL of the one that made the call"
	}
	return fmt.Sprintf("Since %s UTC a worker of queue %[2]s hands the message back, and no attempt is spent: %[3]s. It comes again in %[4]s. "+
		"It goes on when a worker %[5]s consumes queue %[2]s; after 15 minutes the message is parked. A retry does not help: it asks the same workers",
		clock(p.Deferred), p.RoutingKey, p.LastError, short(-p.Age), cure) + "."
}

const whenRescued = "when they have had nothing in hand, or only later messages, for BACKSTEP_RESCUE_AFTER (1 min, unless they are told else)."

// queueAdvice is for a message that is in a queue, in a worker's hand, or lost.
func queueAdvice(p outbox.Place, consumers []saga.Consumer) string {
	said := fmt.Sprintf("The message was published to queue %s %s ago", p.RoutingKey, short(p.Age))
	if len(consumers) == 0 {
		return said + ", and no worker that consumes it was heard of lately: is one running, and ready (/readyz)?"
	}
	said += fmt.Sprintf("; consumed by %s", plural(len(consumers), "worker"))
	var latest time.Time
	idle := true
	for _, c := range consumers {
		idle = idle && !c.IdleSince.IsZero()
		if c.Latest.After(latest) {
			latest = c.Latest
		}
	}
	switch {
	case idle:
		return said + fmt.Sprintf(", with nothing in hand. Either it has just been worked off, or it was lost, as by a purge, or the broker has dead-lettered it (then backstep parked list --queue %s has it): "+
			"the workers send it again by themselves, ", p.RoutingKey) + whenRescued
	case !latest.IsZero() && latest.Before(p.At):
		return said + fmt.Sprintf(", and what was taken last was published %s before it.", short(p.At.Sub(latest)))
	}
	return said + ": one has it in hand, or will take it."
}

// remoteAdvice is for a saga that waits for a participant's reply.
func remoteAdvice(d saga.Detail, p outbox.Place) string {
	until := ""
	if !d.DeadlineAt.IsZero() {
		until = ", until its deadline"
	}
	return fmt.Sprintf("The command was published to queue %s %s ago; it waits for the participant's reply%s. "+askedAgain(d)+
		"If none comes: is the participant running, does it publish to the reply_to of the command, and is something in replies.parked?", p.RoutingKey, short(p.Age), until)
}

// askedAgain says that workers send a participant's command again by themselves, once.
func askedAgain(d saga.Detail) string {
	if d.Rescues > 0 {
		return "The command has been sent once more, as no reply had come by half of the step's deadline. "
	}
	return "If no reply has come by half of the step's deadline the command is sent once more. "
}

// manualAdvice is for a saga that waits for somebody. Its parked command is still awaited, so
// bringing it back moves the saga on; after a step that failed for good nothing is.
func manualAdvice(d saga.Detail, places, replies []outbox.Place, kept saga.StepStatus) []string {
	switch {
	case d.CommandID == "":
		return []string{stoppedAdvice(d)}
	case len(replies) > 0:
		return []string{"It needs somebody. " + replyAdvice(d, replies)}
	case kept != "":
		return []string{"It needs somebody. " + keptAdvice(d, kept)}
	case len(places) == 0:
		return []string{"It needs somebody: the message it awaits is in no table. It was dropped, or published longer ago than rows are kept: backstep outbox show " + quote(d.CommandID)}
	}
	lines := []string{}
	for _, p := range places {
		switch {
		case p.Status == "PARKED":
			lines = append(lines, fmt.Sprintf("  Its outbox row, to %s %s, is PARKED: backstep outbox requeue %s --reason '…'", p.Exchange, p.RoutingKey, quote(d.CommandID)))
		case p.Exchange == message.ParkedExchange:
			lines = append(lines, fmt.Sprintf("  It is in the queue %s.parked: backstep parked replay %s --queue %[1]s --reason '…'", p.RoutingKey, quote(d.CommandID)))
		}
	}
	if len(lines) == 0 {
		return []string{"It needs somebody: the message it awaits did not come to its end (see above)."}
	}
	return append([]string{"It needs somebody: the message it awaits was parked. Cure the cause named above; the message then moves the saga on:"}, lines...)
}

// stoppedAdvice is for a saga whose step, or compensation, failed and is not tried again by itself.
func stoppedAdvice(d saga.Detail) string {
	call, undoing := callStatus(d), d.Direction == saga.Compensate
	what := "step " + stepOf(d, d.CurrentStep)
	if undoing {
		what = "the compensation of " + what
	}
	said := "It needs somebody: " + what + " failed for good"
	if call != "REFUSED" && outOfAttempts(d) {
		said = fmt.Sprintf("It needs somebody: %s has used up its %s", what, plural(d.Attempt, "attempt"))
	}
	switch call {
	case "OPEN":
		said += ". Its call to another system may have happened: nobody knows. Ask that system; a retry does so, too"
	case "DONE":
		said += ". Its call to another system has happened, and only what comes of it is not written here: a retry goes on from there"
	case "REFUSED":
		said += ", for the other system refused its call"
	}
	switch {
	case undoing && (call == "" || call == "REFUSED") && statusOfCall(d, saga.Execute) == "OPEN":
		said += ". Nobody knows whether the call that was to be undone has happened: ask that system"
	case undoing && (call == "REFUSED" || call == "" && remote(d)):
		said += ": its answer says whether what the step did stands"
	case undoing && call == "":
		said += ", so what the step did stands"
	case !undoing:
		said += ", and there is no way back any more"
	}
	return said + ". Cure the cause named above, or put it right by hand."
}

// outOfAttempts reports whether what a saga is at was tried as often as its definition says.
func outOfAttempts(d saga.Detail) bool {
	def, err := sagas().DefinitionOf(d)
	if err != nil || d.CurrentStep >= len(def.StepNames()) {
		return false
	}
	s := def.Outline()[d.CurrentStep]
	if d.Direction == saga.Compensate {
		return d.Attempt >= s.Undos
	}
	return !s.PastPivot && d.Attempt >= s.Attempts
}
