package saga

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"backstep/internal/message"
	"backstep/internal/outbox"
)

// CancelType is the type of the message that asks for a saga to be cancelled. Its body is
// {"reason": "…"}. Its x-saga-id header says which saga, or else "type" and "correlation_id" in the
// body.
const CancelType = "saga.cancel"

// cancel has the saga undone for that reason, or notes that it is to be, if its step made a call
// whose outcome is not known. What checkUndo says is why it was not.
func (b *batch) cancel(ctx context.Context, in *instance, reason string) error {
	kept, err := b.known(ctx, in)
	if err != nil {
		return err
	}
	unknown := in.callOpen || in.mayHaveHappened(kept) && !b.unsent(in)
	if err := in.checkUndo(unknown, kept); err != nil {
		return err
	}
	in.cancelReason, in.wide = clip(reason), true
	if in.status == Running && in.callOpen {
		in.deadline = stepDeadline{mode: noDeadline} // nothing is left that it could lead to
		return b.move(ctx, in, EvCancelRecorded, change{})
	}
	b.withdraw(in)
	return b.undo(ctx, in, EvCancelled, EvCancelledClean, unknown, change{because: in.cancelReason})
}

// checkUndo says why a saga is not to be undone from where it is, whoever wants it: ErrAlready, a
// RefusedError, or nil. unknown: its step may have happened, or may yet. kept: what is known of it all the
// same, though the reply could not be handled.
func (in *instance) checkUndo(unknown bool, kept StepStatus) error {
	s := in.step()
	switch {
	case in.status == Completed:
		return refuse(in.insteadOfNothing(), "it is COMPLETED: too late to cancel it")
	case in.status == ManualAction && in.direction == Compensate:
		return already("it is being undone, and stands in MANUAL_ACTION at step %s; %s", in.stepName(), insteadUndoing)
	case in.direction == Compensate, in.status == Compensated:
		return already("it is %s", in.status)
	case in.pastPivot():
		return refuse(insteadForward, "its pivot, step %s, is behind it: it cannot be undone", in.def.steps[in.def.pivot].name)
	case s.pivot && kept == StepCompleted:
		return refuse("retry goes on with that", "its pivot, step %s, has happened: it cannot be undone", s.name)
	case unknown && s.pivot && !s.undoable():
		return refuse(insteadUnknown, "nobody knows whether step %s, its pivot, has happened: it cannot be undone", s.name)
	case in.status == Running && in.callOpen && in.cancelReason != "":
		return already("it is undone when the call that is open ends, or its command comes again%s: %s", in.unless(), in.cancelReason)
	}
	return nil
}

// unless says what may keep a saga from being undone that is to be when its call is resolved.
func (in *instance) unless() string {
	if !in.step().pivot {
		return ""
	}
	return fmt.Sprintf(", unless step %s, its pivot, has completed then", in.stepName())
}

// unsent reports whether the command that a saga awaits was made by this batch.
func (b *batch) unsent(in *instance) bool {
	return slices.ContainsFunc(b.commands, func(m message.Message) bool { return m.MessageID == in.commandID })
}

// withdraw takes such a command back, and what was noted about its step; likewise a next attempt.
func (b *batch) withdraw(in *instance) {
	b.later = slices.DeleteFunc(b.later, func(d outbox.Delayed) bool { return d.MessageID == in.commandID })
	if !b.unsent(in) {
		return
	}
	b.commands = slices.DeleteFunc(b.commands, func(m message.Message) bool { return m.MessageID == in.commandID })
	b.steps = slices.DeleteFunc(b.steps, func(s stepRow) bool {
		return s.sagaID == in.id && s.order == in.current && s.status == StepWaiting
	})
}

// cancelAsked handles a message of CancelType.
func (b *batch) cancelAsked(ctx context.Context, c *command) (message.Outcome, error) {
	var body struct {
		Reason string `json:"reason"`
	}
	if len(c.Body) > 0 {
		if err := json.Unmarshal(c.Body, &body); err != nil {
			return message.Park("body does not decode: %v", err), nil
		}
	}
	if out := b.findFor(c); out.Kind != message.Done {
		return out, nil
	}
	reason, why := "cancelled", body.Reason
	if why == "" {
		why = "no reason given"
	} else {
		reason += ": " + why
	}
	before := c.in.brief()
	err := b.cancel(ctx, c.in, reason)
	if wasRefused(err) {
		b.actions = append(b.actions, action{c.in.id, "cancel refused", actorOf(c.Message), clip(strings.TrimPrefix(err.Error(), "saga: ")), before, before})
		return stale("saga %s: %v", c.in.id, err), nil
	}
	if err != nil {
		return message.Outcome{}, err
	}
	b.actions = append(b.actions, action{c.in.id, "cancel", actorOf(c.Message), clip(why), before, c.in.brief()})
	return message.Outcome{Kind: message.Done}, nil
}

// actorOf names who sent a message.
func actorOf(m *message.Message) string {
	if m.AppID == "" {
		return clip(fmt.Sprintf("message %q", m.MessageID))
	}
	return clip(fmt.Sprintf("message %q of %q", m.MessageID, m.AppID))
}
