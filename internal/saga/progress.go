package saga

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/trace"

	"backstep/internal/crash"
	"backstep/internal/outbox"
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
		cl := &call{info: Info{SagaID: c.in.id, Step: s.name, Direction: direction, Attempt: c.in.attempt}, in: c.in.input, done: c.done}
		c.ctx, spans[i] = tracing.Step(c.ctx, c.in.id, s.name, string(direction), c.in.attempt)
		cl.ctx = withCall(c.ctx, cl)
		if calls[i] = cl; c.Failure != "" {
			cl.err = errors.New(c.Failure)
		} else {
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
	switch {
	case err == nil && in.direction == Execute:
		return b.completed(ctx, in, cl.result)
	case err == nil:
		return b.compensated(ctx, in)
	case !IsPermanent(err) && in.attempt < in.step().retry.attempts:
		return b.retry(ctx, in, c.RequestID(), err)
	case in.direction == Execute:
		return b.failed(ctx, in, err)
	default:
		return b.stop(ctx, in, EvCompensationFailed,
			fmt.Sprintf("compensation of step %s failed at attempt %d: %v", in.step().name, in.attempt, err))
	}
}

// hook calls f if the definition has it. What it emits is kept if it succeeds.
func (b *batch) hook(ctx context.Context, in *instance, f hook) error {
	if f == nil {
		return nil
	}
	c := &call{}
	if err := f(withCall(ctx, c), b.tx, in.input); err != nil {
		return fmt.Errorf("hook of saga %s: %w", in.id, err)
	}
	b.events = append(b.events, c.events...)
	return nil
}

// move applies the state table, and remembers what to write.
func (b *batch) move(in *instance, ev Event, result []byte, reason string) error {
	r, err := next(in.status, ev)
	if err != nil {
		return fmt.Errorf("saga %s: %w", in.id, err)
	}
	if r.step != "" {
		b.steps = append(b.steps, stepRow{
			sagaID: in.id, order: in.current, name: in.step().name,
			status: r.step, attempts: in.attempt, result: result, err: reason,
		})
	}
	in.status = r.to
	if !in.dirty {
		in.dirty = true
		b.touched = append(b.touched, in)
	}
	return nil
}

// await makes step i, in the given direction, what the saga waits for next.
func (b *batch) await(ctx context.Context, in *instance, i int, dir Direction) {
	in.current, in.direction, in.attempt = i, dir, 1
	m := in.command("")
	tracing.Carry(ctx, &m)
	b.commands = append(b.commands, m)
}

func (b *batch) completed(ctx context.Context, in *instance, result []byte) error {
	if in.current+1 < len(in.def.steps) {
		if err := b.move(in, EvStepCompleted, result, ""); err != nil {
			return err
		}
		b.await(ctx, in, in.current+1, Execute)
		return nil
	}
	if err := b.move(in, EvSagaCompleted, result, ""); err != nil {
		return err
	}
	in.commandID, in.lastError = "", ""
	return b.hook(ctx, in, in.def.hooks.completed)
}

func (b *batch) failed(ctx context.Context, in *instance, cause error) error {
	reason := clip(cause.Error())
	if !IsPermanent(cause) {
		reason = fmt.Sprintf("gave up after %d attempts: %s", in.attempt, reason)
	}
	in.lastError = failureOf(in.step().name, reason)
	undo := in.def.undoBefore(in.current)
	if undo < 0 {
		return b.undone(ctx, in, EvStepFailedClean, reason)
	}
	if err := b.move(in, EvStepFailed, nil, reason); err != nil {
		return err
	}
	b.await(ctx, in, undo, Compensate)
	crash.Point("saga.failed")
	return nil
}

// failureOf says why a saga is compensated.
func failureOf(step, reason string) string { return step + ": " + reason }

func (b *batch) compensated(ctx context.Context, in *instance) error {
	undo := in.def.undoBefore(in.current)
	if undo < 0 {
		return b.undone(ctx, in, EvSagaCompensated, "")
	}
	if err := b.move(in, EvStepCompensated, nil, ""); err != nil {
		return err
	}
	b.await(ctx, in, undo, Compensate)
	return nil
}

// undone ends a saga of which nothing is left to undo.
func (b *batch) undone(ctx context.Context, in *instance, ev Event, reason string) error {
	if err := b.move(in, ev, nil, reason); err != nil {
		return err
	}
	in.commandID = ""
	return b.hook(ctx, in, in.withReason(in.def.hooks.compensated))
}

// retry schedules the next attempt under a new id, which the saga awaits from now on.
func (b *batch) retry(ctx context.Context, in *instance, requestID string, cause error) error {
	ev := EvStepRetried
	if in.direction == Compensate {
		ev = EvCompensationRetried
	}
	reason := clip(cause.Error())
	if err := b.move(in, ev, nil, reason); err != nil {
		return err
	}
	s := in.step()
	wait := s.retry.delay(in.attempt)
	b.log.Warn("saga step will be retried", "saga_id", in.id, "step", s.name, "direction", in.direction,
		"attempt", in.attempt, "wait", wait.Round(time.Millisecond), "error", reason)
	in.attempt++
	next := in.command(requestID)
	tracing.Carry(ctx, &next)
	b.later = append(b.later, outbox.Delayed{Message: next, After: wait, Reason: reason})
	return nil
}

// stop leaves the saga to an operator. Its hook cannot prevent that, or the saga would be
// stuck: what is wrong with the hook is added to the reason.
func (b *batch) stop(ctx context.Context, in *instance, ev Event, reason string) error {
	reason = clip(reason)
	if err := b.move(in, ev, nil, reason); err != nil {
		return err
	}
	if ev == EvCompensationFailed {
		in.commandID = "" // a parked command is still awaited: its replay moves the saga on
	}
	in.lastError = reason
	if in.def != nil {
		err := apart(ctx, b.tx, func() (err error) {
			defer func() {
				if r := recover(); r != nil {
					err = fmt.Errorf("panic: %v", r)
				}
			}()
			return b.hook(ctx, in, in.withReason(in.def.hooks.manualAction))
		})
		if b.tx.Err() != nil {
			return b.tx.Err()
		}
		if err != nil {
			in.lastError = clip(fmt.Sprintf("%s; then OnManualAction failed: %v", reason, err))
		}
	}
	b.log.Error("saga needs manual action", "saga_id", in.id, "step", in.stepName(), "error", in.lastError)
	b.events = append(b.events, in.manualActionEvent(time.Now()))
	return nil
}

// Served by the primary key.
const selectFailureSQL = `
SELECT name, error
  FROM saga_steps
 WHERE saga_id = ?
   AND status = 'FAILED'
 ORDER BY step_order DESC
 LIMIT 1`

// resume moves a saga whose parked command came back to where it was. What it says went wrong
// is again what had gone wrong before it was stopped.
func (b *batch) resume(ctx context.Context, in *instance) error {
	ev := EvActionReturned
	if in.direction == Compensate {
		ev = EvCompensationBack
	}
	if err := b.move(in, ev, nil, ""); err != nil {
		return err
	}
	in.lastError = ""
	if in.direction == Compensate {
		var name []byte
		var reason sql.NullString
		err := b.tx.QueryRow(ctx, selectFailureSQL, []any{[]byte(in.id)}, &name, &reason)
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return fmt.Errorf("read why saga %s is compensated: %w", in.id, err)
		}
		if err == nil {
			in.lastError = failureOf(string(name), reason.String)
		}
	}
	return b.hook(ctx, in, in.def.hooks.resumed)
}
