package saga

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/tracing"
)

// change is what a transition is to write, besides what the state table says.
type change struct {
	result    []byte        // what the action returned
	reason    string        // why the step failed
	because   string        // why the saga is where it is going; "": as before
	undo      int           // undoNext: index of the step
	requestID string        // tryLater, tryNow, sent: the first id of the chain of attempts; "": a new chain
	wait      time.Duration // tryLater
}

// move applies the state table: it notes what to write and does what follows.
func (b *batch) move(ctx context.Context, in *instance, ev Event, ch change) error {
	r, err := next(in.status, ev)
	if err != nil {
		return fmt.Errorf("saga %s: %w", in.id, err)
	}
	if r.step != "" {
		b.steps = append(b.steps, stepRow{
			sagaID: in.id, order: in.current, name: in.step().name,
			status: r.step, attempts: in.tried(r.step), result: ch.result, err: ch.reason, chain: in.chainColumn(ch.requestID),
		})
	}
	stopped := in.status == ManualAction
	if in.status != r.to {
		in.rescues = 0
	}
	in.status = r.to
	b.remember(in)
	if stopped && r.to != ManualAction {
		if err := b.resumed(ctx, in); err != nil {
			return err
		}
	}
	if r.to == ManualAction && in.direction == Compensate {
		in.undoReason, in.wide = in.lastError, true
	}
	if ch.because != "" {
		in.lastError = ch.because
	}
	return b.follow(ctx, in, ev, r.effect, ch)
}

// tried returns how often a step was tried, or is at a try, that comes to a status. One that is left
// out while its command is awaited was not tried by that.
func (in *instance) tried(status StepStatus) int {
	if status == StepSkipped && in.direction == Execute && in.commandID != "" && !in.step().remote {
		return in.attempt - 1
	}
	return in.attempt
}

// remember has an instance written, once.
func (b *batch) remember(in *instance) {
	if !in.dirty {
		in.dirty = true
		b.touched = append(b.touched, in)
	}
}

// follow does what follows from a transition.
func (b *batch) follow(ctx context.Context, in *instance, ev Event, e effect, ch change) error {
	switch e {
	case doNext:
		return b.await(ctx, in, in.current+1, Execute)
	case undoNext:
		return b.await(ctx, in, ch.undo, Compensate)
	case tryLater:
		m, err := b.nextAttempt(ctx, in, ch.requestID)
		if err != nil {
			return err
		}
		b.later = append(b.later, outbox.Delayed{Message: m, After: ch.wait, Reason: ch.reason})
		if s := in.step(); s.remote {
			in.expect(ch.wait + s.deadline)
			return b.sent(ctx, in, m)
		}
	case tryNow:
		m, err := b.nextAttempt(ctx, in, ch.requestID)
		if err != nil {
			return err
		}
		b.commands = append(b.commands, m)
		in.expectStep()
		return b.sent(ctx, in, m)
	case complete:
		in.commandID, in.lastError = "", ""
		if in.def != nil {
			return b.hook(ctx, in, in.def.hooks.completed)
		}
	case undone:
		in.commandID = ""
		if in.def != nil {
			return b.hook(ctx, in, in.withReason(in.def.hooks.compensated))
		}
	case askPerson:
		return b.askPerson(ctx, in, ev)
	}
	return nil
}

// await makes step i, in the given direction, what the saga waits for next.
func (b *batch) await(ctx context.Context, in *instance, i int, dir Direction) error {
	in.current, in.direction, in.attempt, in.callOpen = i, dir, 1, false
	in.awaitNew()
	m, err := b.command(ctx, in, "")
	if err != nil {
		return err
	}
	b.commands = append(b.commands, m)
	in.expectStep()
	return b.sent(ctx, in, m)
}

// nextAttempt makes the command of the next attempt.
func (b *batch) nextAttempt(ctx context.Context, in *instance, requestID string) (m message.Message, err error) {
	in.attempt++
	in.awaitNew()
	return b.command(ctx, in, requestID)
}

// command makes the command that the saga awaits, a part of ctx's trace.
func (b *batch) command(ctx context.Context, in *instance, requestID string) (message.Message, error) {
	var done []byte
	if in.step().remote && in.direction == Compensate {
		var err error
		if done, err = b.resultOf(ctx, in); err != nil {
			return message.Message{}, err
		}
	}
	m := in.command(requestID, done)
	tracing.Carry(ctx, &m)
	return m, nil
}

// sent notes that a remote step has its command m: it waits for a reply.
func (b *batch) sent(ctx context.Context, in *instance, m message.Message) error {
	ev := EvStepSent
	if in.direction == Compensate {
		ev = EvCompensationSent
	}
	if !in.step().remote {
		return nil
	}
	return b.move(ctx, in, ev, change{requestID: m.RequestID()})
}

// Served by the primary key.
const selectChainSQL = `
SELECT request_id
  FROM saga_steps
 WHERE saga_id = ?
   AND step_order = ?`

// chainColumn is what is written of the first id, nothing if that stays what it is.
func (in *instance) chainColumn(first string) string {
	if first == "" {
		return ""
	}
	return in.turn() + first
}

// turn stands before the id in the column: a worker of an earlier release that turns the saga leaves the
// action's there.
func (in *instance) turn() string { return string(in.direction) + " " }

// chain returns the first id of the attempts at what a saga awaits. Each is noted with the step when its
// command is made, but for that of a local step's first attempt, which is the command's own.
func (b *batch) chain(ctx context.Context, in *instance) (string, error) {
	if !in.step().remote && in.attempt == 1 {
		return in.commandID, nil
	}
	var first []byte
	err := b.tx.QueryRow(ctx, selectChainSQL, []any{[]byte(in.id), in.current}, &first)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return "", fmt.Errorf("read the first id of step %s of saga %s: %w", in.stepName(), in.id, err)
	}
	if id, ok := strings.CutPrefix(string(first), in.turn()); ok {
		return id, nil
	}
	return in.commandID, nil // a worker of an earlier release has made it
}

// resultOf returns what the action of the current step returned, nil if that is not known.
func (b *batch) resultOf(ctx context.Context, in *instance) (result []byte, err error) {
	for _, s := range b.steps { // not written yet
		if s.sagaID == in.id && s.order == in.current && s.result != nil {
			result = s.result
		}
	}
	if result != nil {
		return result, nil
	}
	err = b.tx.QueryRow(ctx, selectResultSQL, []any{[]byte(in.id), in.current}, &result)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("read result of step %s of saga %s: %w", in.stepName(), in.id, err)
	}
	return result, nil
}

// hook calls f if the definition has it and the input can be read. What it emits is kept if it succeeds.
func (b *batch) hook(ctx context.Context, in *instance, f hook) error {
	if f == nil || in.unread {
		return nil
	}
	c := &call{info: Info{SagaID: in.id}, in: in.input, earlier: &results{b: b, in: in}}
	c.ctx = ctx
	if err := guarded(func() error { return f(withCall(ctx, c), b.tx, in.input) }); err != nil {
		if b.tx.Err() != nil {
			return fmt.Errorf("hook of saga %s: %w", in.id, err)
		}
		return &HookError{in.id, err}
	}
	b.events = append(b.events, c.events...)
	return nil
}

// askPerson calls OnManualAction and tells whoever listens. The hook cannot prevent that, or the
// saga would be stuck: what is wrong with it is added to the reason.
func (b *batch) askPerson(ctx context.Context, in *instance, ev Event) error {
	if ev == EvCompensationFailed || ev == EvStepRefused || ev == EvDeadlineFailed {
		in.commandID = "" // a parked or lost command is still awaited: if it comes the saga moves on
	}
	if in.def != nil {
		err := apart(ctx, b.tx, func() error { return b.tell(ctx, in) })
		if b.tx.Err() != nil {
			return b.tx.Err()
		}
		if err != nil {
			in.lastError = clip(fmt.Sprintf("%s; then OnManualAction failed: %v", in.lastError, err))
		}
	}
	b.log.Error("saga needs manual action", "saga_id", in.id, "step", in.stepName(), "error", in.lastError)
	b.events = append(b.events, in.manualActionEvent(time.Now()))
	return nil
}

// tell calls OnManualAction. What it emits is looked at here: it would be refused with the whole transaction.
func (b *batch) tell(ctx context.Context, in *instance) error {
	n := len(b.events)
	if err := b.hook(ctx, in, in.withReason(in.def.hooks.manualAction)); err != nil {
		return err
	}
	for _, m := range b.events[n:] {
		if err := outbox.Check(ctx, m); err != nil {
			b.events = b.events[:n]
			return err
		}
	}
	return nil
}

// Served by the primary key.
const selectResultSQL = `
SELECT result
  FROM saga_steps
 WHERE saga_id = ?
   AND step_order = ?`

// Served by the primary key.
const selectFailureSQL = `
SELECT name, COALESCE(error, '')
  FROM saga_steps
 WHERE saga_id = ?
   AND status = 'FAILED'
 ORDER BY step_order DESC
 LIMIT 1`

// firstFailure returns which step's failure has a saga undone, if that is known, and why.
func (b *batch) firstFailure(ctx context.Context, in *instance) (string, error) {
	var name, reason []byte
	err := b.tx.QueryRow(ctx, selectFailureSQL, []any{[]byte(in.id)}, &name, &reason)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("read why saga %s is undone: %w", in.id, err)
	}
	return failureOf(string(name), string(reason)), nil
}

// resumed is for a saga that leaves MANUAL_ACTION. What it says went wrong is again what had gone
// wrong before it was stopped.
func (b *batch) resumed(ctx context.Context, in *instance) error {
	if in.direction == Execute {
		in.lastError = ""
	} else {
		if in.undoReason == "" && in.cancelReason == "" { // a worker of an earlier release has stopped it
			var err error
			if in.undoReason, err = b.firstFailure(ctx, in); err != nil {
				return err
			}
		}
		in.lastError = cmp.Or(in.undoReason, in.cancelReason, in.lastError)
	}
	if in.def == nil {
		return nil
	}
	return b.hook(ctx, in, in.def.hooks.resumed)
}
