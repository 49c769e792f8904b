package saga

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/trace"

	"backstep/internal/crash"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

// handle runs the step that commands ask for, all the same one in the same direction, and
// moves their instances on. An error ends the batch.
func (b *batch) handle(ctx context.Context, commands []*command) error {
	s, direction := commands[0].in.step(), commands[0].in.direction
	calls := make([]*call, len(commands))
	spans := make([]trace.Span, len(commands))
	var run []*call
	for i, c := range commands {
		c.ctx = tracing.Extract(ctx, c.Headers)
		if c.in.status == ManualAction {
			if err := b.resume(c.ctx, c.in); err != nil {
				return err
			}
		}
		cl := &call{
			info: c.info(),
			in:   c.in.input, done: c.done, timeout: s.timeout, earlier: &results{b: b, in: c.in},
		}
		c.ctx, spans[i] = tracing.Step(c.ctx, c.in.id, s.name, string(direction), c.in.attempt)
		cl.ctx = withCall(c.ctx, cl)
		calls[i] = cl
		switch {
		case c.Failure != "":
			cl.err = errors.New(c.Failure)
		case c.reply != nil:
			cl.result, cl.err = c.reply.Result, c.reply.err()
		case c.answer != nil && c.answer.err != nil:
			cl.err = c.answer.err
		default:
			if c.answer != nil {
				cl.prepared = c.answer.outcome
			}
			run = append(run, cl)
		}
	}
	if len(run) > 0 {
		s.run(ctx, b.tx, direction, run)
	}
	for i, cl := range calls {
		tracing.End(spans[i], cmp.Or(cl.err, b.tx.Err()))
	}
	for i, c := range commands {
		if b.tx.Err() != nil {
			return b.tx.Err()
		}
		if err := b.settle(c.ctx, c, calls[i]); err != nil {
			return err
		}
	}
	return nil
}

// run calls the step's function.
func (s *step) run(ctx context.Context, tx *sqltx.Tx, direction Direction, calls []*call) {
	switch {
	case direction == Execute:
		s.action(ctx, tx, calls)
	case s.compensate != nil:
		crash.Point("saga.compensating")
		s.compensate(ctx, tx, calls)
	}
}

// settle moves an instance on by what became of its call.
func (b *batch) settle(ctx context.Context, c *command, cl *call) error {
	in, err := c.in, cl.err
	b.events = append(b.events, cl.events...)
	away, ok := errors.AsType[*elsewhere](err)
	switch {
	case ok:
		*c.out = deferred("%s", away.reason)
		return nil
	case err == nil && in.direction == Execute:
		in.callOpen = false
		return b.completed(ctx, in, cl.result)
	case err == nil:
		return b.compensated(ctx, in)
	case in.unknowable(), errors.Is(err, errUnasked):
		return b.undo(ctx, in, EvCancelled, EvCancelledClean, in.callOpen, change{because: in.cancelReason})
	case !IsPermanent(err) && in.mayRetry():
		first := c.RequestID()
		if c.reply != nil { // it has an id of its own, and need not say whose first it answers
			var rerr error
			if first, rerr = b.chain(ctx, in); rerr != nil {
				return rerr
			}
		}
		return b.retry(ctx, in, first, err)
	case in.direction == Execute:
		// The command of an earlier attempt may reach a participant yet, whatever it says of this one.
		return b.failed(ctx, in, err, in.callOpen || in.step().remote && (!IsPermanent(err) || in.attempt > 1))
	default:
		return b.stop(ctx, in, EvCompensationFailed,
			fmt.Sprintf("compensation of step %s failed at attempt %d: %v", in.step().name, in.attempt, err))
	}
}

// mayRetry reports whether the step that is awaited may be tried once more.
func (in *instance) mayRetry() bool {
	return in.pastPivot() || in.attempt < in.step().attempts(in.direction)
}

func (b *batch) completed(ctx context.Context, in *instance, result []byte) error {
	in.lastError = "" // its deadline may have passed, and failed to end it
	if in.cancelReason != "" && in.current < in.def.pivot {
		ch := change{result: result, because: in.cancelReason}
		return b.undo(ctx, in, EvStepUnwanted, EvStepUnwantedClean, true, ch)
	}
	if in.cancelReason != "" {
		why := fmt.Sprintf("its pivot, step %s, has completed: too late to undo it (%s)", in.stepName(), in.cancelReason)
		b.log.Info("too late to cancel", "saga_id", in.id, "reason", in.cancelReason)
		in.cancelReason, in.wide = "", true
		at := in.brief()
		b.actions = append(b.actions, action{in.id, "cancel refused", "worker", clip(why), at, at})
	}
	if in.current+1 == len(in.def.steps) {
		return b.move(ctx, in, EvSagaCompleted, change{result: result})
	}
	return b.move(ctx, in, EvStepCompleted, change{result: result})
}

// failed undoes a saga whose step failed for good: what came before it, and if nobody knows
// whether it happened, the step too. Where there is no way back a person has to decide.
func (b *batch) failed(ctx context.Context, in *instance, cause error, unknown bool) error {
	s, reason := in.step(), clip(cause.Error())
	if !IsPermanent(cause) {
		reason = fmt.Sprintf("gave up after %d attempts: %s", in.attempt, reason)
	}
	because := failureOf(s.name, reason)
	if in.pastPivot() {
		return b.stop(ctx, in, EvStepRefused, because+"; the pivot is behind it, so the saga cannot be undone")
	}
	if unknown && s.pivot && !s.undoable() {
		return b.stop(ctx, in, EvStepRefused, because+"; nobody knows whether this step, the pivot, has happened")
	}
	err := b.undo(ctx, in, EvStepFailed, EvStepFailedClean, unknown, change{reason: reason, because: because})
	crash.Point("saga.failed")
	return err
}

// failureOf says why a saga is compensated.
func failureOf(step, reason string) string { return step + ": " + reason }

// undo begins to undo a saga: some if there is something to undo, else none. What its current step
// did is to be undone only if it may have done it.
func (b *batch) undo(ctx context.Context, in *instance, some, none Event, current bool, ch change) error {
	from := in.current
	if !current {
		from--
	}
	in.callOpen = false // from now on it counts as one that happened
	if ch.undo = in.def.undoFrom(from, in.skipped); ch.undo < 0 {
		return b.move(ctx, in, none, ch)
	}
	return b.move(ctx, in, some, ch)
}

func (b *batch) compensated(ctx context.Context, in *instance) error {
	return b.undo(ctx, in, EvStepCompensated, EvSagaCompensated, false, change{})
}

// retry schedules the next attempt under a new id, which the saga awaits from now on.
func (b *batch) retry(ctx context.Context, in *instance, requestID string, cause error) error {
	ev := EvStepRetried
	if in.direction == Compensate {
		ev = EvCompensationRetried
	}
	s := in.step()
	ch := change{reason: clip(cause.Error()), requestID: requestID, wait: s.retry.delay(in.attempt)}
	b.log.Warn("saga step will be retried", "saga_id", in.id, "step", s.name, "direction", in.direction,
		"attempt", in.attempt, "wait", ch.wait.Round(time.Millisecond), "error", ch.reason)
	return b.move(ctx, in, ev, ch)
}

// stop leaves the saga to an operator.
func (b *batch) stop(ctx context.Context, in *instance, ev Event, reason string) error {
	reason = clip(reason)
	return b.move(ctx, in, ev, change{reason: reason, because: reason})
}

// resume moves a saga whose parked command came back to where it was. Its deadline starts anew.
func (b *batch) resume(ctx context.Context, in *instance) error {
	ev := EvActionReturned
	if in.direction == Compensate {
		ev = EvCompensationReturned
	}
	in.expectStep()
	return b.move(ctx, in, ev, change{})
}
