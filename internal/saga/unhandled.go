package saga

import (
	"context"
	"fmt"
	"time"

	"backstep/internal/message"
)

// handleFor is how long a reply comes back whose handling fails here. What it was handed back for before, because
// no worker knew its saga, say, does not count.
const handleFor = time.Minute

// unhandled is for a reply whose handling failed here, in what follows from it: that says nothing
// about the step. What the participant said is kept, and the reply comes back. If that does not help
// it is parked, and the saga left to an operator (CommandParked).
func (b *batch) unhandled(c *command) message.Outcome {
	what := fmt.Sprintf("reply (%s) to %s step %s could not be handled: %s", c.reply.Status, c.in.direction, c.in.stepName(), c.Failure)
	if c.DeferredFor(message.HeaderUnhandledFor) >= handleFor {
		return message.Park("%s", what)
	}
	b.keep(c)
	out := deferred("%s", what)
	out.Counter = message.HeaderUnhandledFor
	return out
}

// keepUnhandled keeps what a message that is parked says, if it is such a reply, whatever of it failed,
// and reports that.
func (b *batch) keepUnhandled(ctx context.Context, c *command) (bool, error) {
	if c.Type != ReplyType || c.Failure == "" {
		return false, nil
	}
	if out, err := b.checkReply(ctx, c); err != nil || out.Kind != message.Done {
		return false, err
	}
	b.keep(c)
	return true, nil
}

// keep notes with the step what a participant said of it, though the saga does not move on.
func (b *batch) keep(c *command) {
	in := c.in
	row := stepRow{sagaID: in.id, order: in.current, name: in.stepName(), attempts: in.attempt}
	switch {
	case c.reply.Status == replyCompleted && in.direction == Execute:
		row.status, row.result = StepCompleted, c.reply.Result
	case c.reply.Status == replyCompleted:
		row.status = StepCompensated
	case c.reply.Status == replyRefused && in.direction == Execute:
		row.status, row.err = StepFailed, clip(c.reply.Error)
	default:
		return
	}
	b.steps = append(b.steps, row)
}

// kept returns what has been kept of the remote step that is awaited, "" if its reply has not come.
func (b *batch) kept(ctx context.Context, in *instance) (StepStatus, error) {
	if !in.step().remote {
		return "", nil
	}
	rows, err := b.stepRows(ctx, in)
	return in.keptIn(rows), err
}

// keptIn is kept where the rows of the steps are known.
func (in *instance) keptIn(rows map[int]StepState) StepStatus {
	done := StepCompleted
	if in.direction == Compensate {
		done = StepCompensated
	}
	// One that has stopped after its reply was handled awaits nothing.
	if status := rows[in.current].Status; in.step().remote && in.commandID != "" && (status == done || status == StepFailed) {
		return status
	}
	return ""
}

// isDone reports whether the participant is known to have done what the saga awaits.
func isDone(kept StepStatus) bool { return kept == StepCompleted || kept == StepCompensated }

// mayHaveHappened reports whether a step may have happened, or may yet. That it was refused says so only
// of a first attempt.
func (in *instance) mayHaveHappened(kept StepStatus) bool {
	return in.callOpen || in.step().remote && (kept != StepFailed || in.attempt > 1)
}

// goOn is an operator's retry of what is known to be done: the participant is not asked again.
func (b *batch) goOn(ctx context.Context, in *instance) (string, error) {
	what := fmt.Sprintf("the %s of step %s is known to be done", half(in.direction), in.stepName())
	if in.status == ManualAction {
		if err := b.resume(ctx, in); err != nil {
			return "", err
		}
	}
	if in.direction == Compensate {
		err := b.compensated(ctx, in)
		return what + b.then(in), err
	}
	result, err := b.resultOf(ctx, in)
	if err != nil {
		return "", err
	}
	err = b.completed(ctx, in, result)
	return what + b.then(in), err
}
