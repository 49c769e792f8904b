package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"backstep/internal/outbox"
	"backstep/internal/saga"
)

// offers are what can be done to a saga.
type offers struct {
	list    []saga.Offer
	unfit   string // why this binary can do nothing to it
	untried error  // why they could not be tried, and are only what its state allows

	kept saga.StepStatus // what a reply says that could not be handled; see saga.Engine.Kept
}

// goesOn reports whether a retry goes on with what the participant is known to have done.
func (o offers) goesOn() bool { return o.kept == saga.StepCompleted || o.kept == saga.StepCompensated }

// offersTimeout is how long it is tried what can be done, if others have rows that the saga's hooks need.
const offersTimeout = 2 * time.Second

// offersFor asks the saga.
func offersFor(ctx context.Context, db *sql.DB, d saga.Detail) (can offers) {
	ctx, cancel := context.WithTimeout(ctx, offersTimeout)
	defer cancel()
	var err error
	can.kept = sagas().Kept(d)
	can.list, err = sagas().Offers(ctx, db, d.ID)
	refused, no := errors.AsType[*saga.RefusedError](err)
	switch {
	case no:
		can.unfit = refused.Error()
	case err != nil:
		can = allowed(d)
		can.untried = err
	}
	return can
}

// allowed are what the state of a saga allows. What a retry comes to depends on where its message is: it is among them
// if it changes something wherever that is.
func allowed(d saga.Detail) (can offers) {
	can.kept = sagas().Kept(d)
	for _, op := range sagas().Allowed(d) {
		if op.Verb != saga.VerbRetry || d.Status == saga.ManualAction || can.goesOn() {
			can.list = append(can.list, saga.Offer{Operation: op})
		}
	}
	return can
}

// advice names the commands that do something, with what they do, and what has to be done before others can.
func (o offers) advice(d saga.Detail, places []outbox.Place) (lines []string) {
	if o.unfit != "" {
		return unfitAdvice(d, o.unfit)
	}
	var first []string
	cancels := false
	for _, offer := range o.list {
		op := offer.Operation
		cancels = cancels || op.Verb == saga.VerbCancel
		switch {
		case op.Verb == saga.VerbRetry && d.Status != saga.ManualAction && deferred(places) && !o.goesOn(): // it says that this does not help
		case op.Verb == saga.VerbCompensate && cancels: // which says it
		case op.Verb == saga.VerbRetry && o.goesOn() && offer.Against == nil:
			lines = append(lines, fmt.Sprintf("  backstep saga retry %s --reason '…'    # go on with what the participant has done", quote(d.ID)))
		case offer.Against != nil:
			first = append(first, fmt.Sprintf("  %s%s: %s", op.Verb, flagsOf(op), notDone(offer.Against)))
		default:
			lines = append(lines, fmt.Sprintf("  backstep saga %s %s%s --reason '…'    # %s", op.Verb, quote(d.ID), flagsOf(op), doesTo(d, op)))
		}
	}
	if len(lines) > 0 {
		lines = append([]string{"What you can do (each with --dry-run first):"}, lines...)
	}
	if len(first) > 0 {
		lines = append(append(lines, "Its definition refuses, until that is put right:"), first...)
	}
	if o.untried != nil {
		lines = append(lines, "That could not be tried now ("+strings.TrimPrefix(o.untried.Error(), "saga: ")+"): this is what its state allows, and some of it may be refused.")
	}
	return lines
}

// unfitAdvice is for a saga that this binary can do nothing to.
func unfitAdvice(d saga.Detail, why string) []string {
	if _, err := sagas().Definition(d.Type, d.Version); err == nil {
		return []string{"This binary can do nothing to it: " + why + "."}
	}
	if d.Status == saga.Completed {
		return nil
	}
	return []string{"This binary does not know its definition: use the backstep of the release that does to change it. Workers leave alone what they do not know: if none does, its command, when it comes, is parked after 15 minutes; if none comes, it waits for ever (they log 'sagas are overdue')."}
}

// flagsOf are the flags that say which operation of its verb it is.
func flagsOf(op saga.Operation) string {
	switch {
	case op.Verb == saga.VerbResolve:
		return " --as " + strings.ToLower(string(op.As))
	case op.Verb == saga.VerbSkip && op.Direction == saga.Compensate:
		return " --step " + quote(op.Step) + " --compensation"
	case op.Verb == saga.VerbSkip:
		return " --step " + quote(op.Step)
	}
	return ""
}

// doesTo says what an operation does to a saga.
func doesTo(d saga.Detail, op saga.Operation) string {
	what := "step " + op.Step
	if op.Direction == saga.Compensate {
		what = "the compensation of step " + op.Step
	}
	switch op.Verb {
	case saga.VerbRetry:
		if unwanted(d) {
			return "undo it now"
		}
		return "try " + what + " now"
	case saga.VerbSkip:
		return "leave out " + what
	case saga.VerbCancel:
		return "undo what it did"
	case saga.VerbCompensate:
		return "undo it all the same"
	}
	switch {
	case op.As == saga.Compensated:
		return "you have undone by hand what it did"
	case op.Direction == saga.Compensate:
		return "you have done by hand what it did not, or undid"
	}
	return "you have put it right by hand"
}
