package saga

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"backstep/internal/outbox"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

// Effect is what an operation did.
type Effect struct {
	Changed bool   `json:"changed"` // false: it was so already
	Detail  string `json:"detail"`
	State
	Step string `json:"step"` // its name
}

// Operate does an operation, in one transaction that has the saga's lock, and writes it to
// saga_actions. A RefusedError says why it was not done. The same operation again changes nothing
// and writes nothing, so that after ErrOutcomeUnknown it can be repeated.
func (e *Engine) Operate(ctx context.Context, db *sql.DB, id string, op Operation) (eff Effect, err error) {
	err = sqltx.WithTx(ctx, db, func(ctx context.Context, tx *sqltx.Tx) error {
		b := &batch{Engine: e, tx: tx}
		if eff, err = b.operate(ctx, id, op); err != nil {
			return err
		}
		return b.write(ctx)
	})
	return eff, err
}

// operate does an operation but for the writing.
func (b *batch) operate(ctx context.Context, id string, op Operation) (Effect, error) {
	found, err := lockInstances(ctx, b.tx, []string{id})
	if err != nil {
		return Effect{}, err
	}
	in := found[id]
	if in == nil {
		return Effect{}, fmt.Errorf("%w: %q", ErrNotFound, id)
	}
	if err := in.unfit(b.find(in), op.Verb); err != nil {
		return Effect{}, err
	}
	if op.Still != nil {
		if err := op.Still.check(ctx, b.tx, id); err != nil {
			return Effect{}, err
		}
	}
	before := in.brief()
	detail, err := b.apply(tracing.Rejoin(ctx, in.traceID), in, op)
	changed := err == nil
	switch {
	case errors.Is(err, ErrAlready):
		detail = strings.TrimPrefix(err.Error(), ErrAlready.Error()+": ")
	case IsPermanent(err):
		return Effect{}, &RefusedError{Why: permanent(err).Error(), byHook: true}
	case err != nil:
		return Effect{}, err
	default:
		b.actions = append(b.actions, action{in.id, string(op.Verb), op.By.Actor, clip(op.reason()), before, in.brief()})
	}
	return Effect{changed, detail, State{in.status, in.direction, in.current, in.attempt}, in.stepName()}, nil
}

// reason is what the audit keeps.
func (op Operation) reason() string {
	switch op.Verb {
	case VerbSkip:
		return half(op.Direction) + " of step " + op.Step + ": " + op.By.Reason
	case VerbResolve:
		return "as " + string(op.As) + ": " + op.By.Reason
	}
	return op.By.Reason
}

// apply moves the saga on, and says how.
func (b *batch) apply(ctx context.Context, in *instance, op Operation) (detail string, err error) {
	kept, err := b.known(ctx, in)
	if err != nil {
		return "", err
	}
	err = in.check(op, kept)
	if refused, ok := errors.AsType[*RefusedError](err); ok {
		switch op.Verb {
		case VerbSkip:
			return "", b.skippedBefore(ctx, in, op, refused)
		case VerbRetry:
			return "", b.endedByRetry(ctx, in, refused)
		}
	}
	if err != nil {
		return "", err
	}
	switch op.Verb {
	case VerbRetry:
		if isDone(kept) {
			return b.onward(ctx, in, b.goOn)
		}
		return b.onward(ctx, in, b.retryNow)
	case VerbSkip:
		return b.onward(ctx, in, b.skip)
	case VerbCancel, VerbCompensate:
		if in.status == Completed {
			return b.reverse(ctx, in, op.By.Reason)
		}
		return b.cancelByHand(ctx, in, op.By.Reason)
	case VerbResolve:
		return b.resolve(ctx, in, op)
	}
	return "", refuse("", "there is no operation %q", op.Verb)
}

// Served by the primary key; by the clock of deadlines.
const overtimeSQL = `
SELECT COUNT(*)
  FROM saga_instances
 WHERE id = ?
   AND saga_deadline_at <= NOW(6) - INTERVAL COALESCE((SELECT downtime_us FROM saga_pulse WHERE id = 1), 0) MICROSECOND`

// onward lets a saga that had stopped go on by do. If its time has passed meanwhile that counts no
// more, or the next look at deadlines would undo what somebody has just decided.
func (b *batch) onward(ctx context.Context, in *instance, do func(context.Context, *instance) (string, error)) (string, error) {
	note := ""
	if in.status == ManualAction && in.direction == Execute {
		var n int
		if err := b.tx.QueryRow(ctx, overtimeSQL, []any{[]byte(in.id)}, &n); err != nil {
			return "", fmt.Errorf("read whether the time of saga %s has passed: %w", in.id, err)
		}
		if n > 0 {
			in.unlimited = true
			note = "; the time that it had until its pivot has passed, and counts no more"
		}
	}
	detail, err := do(ctx, in)
	return detail + note, err
}

// retryNow tries the step it is at at once. What waits for its time keeps its id. A saga that had
// stopped gets a new one; a copy of the old one comes to nothing. What waits for a relay, or was published, is
// not made once more: a backlog would grow by it, and the step lose attempts. Lost ones are rescued.
func (b *batch) retryNow(ctx context.Context, in *instance) (string, error) {
	ev, anew := EvRetriedNow, ""
	if in.direction == Compensate {
		ev = EvCompensationRetriedNow
	}
	if in.status != ManualAction {
		hastened, status, err := outbox.Hasten(ctx, b.tx, in.commandID)
		switch {
		case err != nil:
			return "", err
		case hastened && in.noted():
			return fmt.Sprintf("it is undone now%s; the call of step %s is not made once more", in.unless(), in.stepName()), nil
		case hastened:
			return fmt.Sprintf("attempt %d to %s step %s waits no longer", in.attempt, in.direction, in.stepName()), nil
		case in.step().remote && (status == "PUBLISHED" || status == "") && !b.retriedBefore(ctx, in):
			// The participant may have lost it; it must take repeats.
		default:
			return "", already("attempt %d to %s step %s %s", in.attempt, in.direction, in.stepName(), in.whereabouts(status))
		}
	} else if !in.step().remote {
		in.attempt = 0 // it has all its attempts again; replies of participants are told apart by it
		if in.step().prepare != nil {
			anew = "; its attempts are counted anew, its calls (TIMES) on" // the other system knows them all by one key
		}
	}
	var ch change
	if in.step().remote { // to its participant all attempts are one
		var err error
		if ch.requestID, err = b.chain(ctx, in); err != nil {
			return "", err
		}
	}
	if err := b.move(ctx, in, ev, ch); err != nil {
		return "", err
	}
	if in.noted() { // it was before it stopped
		return fmt.Sprintf("it is undone when its command comes again, which goes out%s; the call of step %s is not made once more", in.unless(), in.stepName()), b.tx.Err()
	}
	return fmt.Sprintf("attempt %d to %s step %s goes out%s", in.attempt, in.direction, in.stepName(), anew), b.tx.Err()
}

// whereabouts says all that is known of the command that is awaited, and where to look further. status is that of
// its row, "" if it has none.
func (in *instance) whereabouts(status string) string {
	const none = "so no other is sent"
	queue, look, lost := in.step().queue, "backstep saga show "+in.id, ""
	if !in.step().remote {
		lost = fmt.Sprintf(" If it was lost, a worker of queue %s emits it again.", queue)
	}
	switch status {
	case "":
		return fmt.Sprintf("is in no table: its row was published longer ago than rows are kept, or deleted, %s.%s See %s", none, lost, look)
	case "PUBLISHED":
		if !in.step().remote {
			look += ", backstep parked list --queue " + queue
		}
		return fmt.Sprintf("is PUBLISHED in the outbox, and no more is known: it may be in queue %s, in hand, dead-lettered or lost, %s.%s See %s", queue, none, lost, look)
	case "PARKED":
		return fmt.Sprintf("is PARKED in the outbox, %s. See backstep outbox show %s", none, in.commandID)
	}
	return fmt.Sprintf("is %s and waits for a relay, %s. See backstep outbox show %s", status, none, in.commandID)
}

// Served by ix_actions_saga.
const lastRetrySQL = `
SELECT COUNT(*)
  FROM saga_actions
 WHERE saga_id = ?
   AND action = 'retry'
   AND JSON_UNQUOTE(JSON_EXTRACT(CONVERT(after_json USING utf8mb4), '$.command_id')) = ?`

// retriedBefore reports whether the command that is awaited is there because somebody retried. If
// that cannot be read the transaction has ended.
func (b *batch) retriedBefore(ctx context.Context, in *instance) bool {
	var n int
	if err := b.tx.QueryRow(ctx, lastRetrySQL, []any{[]byte(in.id), in.commandID}, &n); err != nil {
		b.tx.Fail(err)
	}
	return n > 0
}

// Served by ix_actions_saga. What comes too late to change anything is audited too.
const lastVerbSQL = `
SELECT action, after_json
  FROM saga_actions
 WHERE saga_id = ?
   AND action IN ('retry', 'skip', 'cancel', 'compensate', 'resolve')
 ORDER BY id DESC
 LIMIT 1`

// endedByRetry tells a saga that a retry has brought to its end, since nothing was left to ask, from one at which
// there is nothing to try.
func (b *batch) endedByRetry(ctx context.Context, in *instance, refused error) error {
	var verb, after []byte
	err := b.tx.QueryRow(ctx, lastVerbSQL, []any{[]byte(in.id)}, &verb, &after)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("read what was done to saga %s last: %w", in.id, err)
	}
	var is struct {
		Status Status `json:"status"`
	}
	_ = json.Unmarshal(after, &is) // what is not ours says nothing
	if Verb(verb) == VerbRetry && is.Status == in.status {
		return already("it is %s: the retry before went on with what was known to be done", in.status)
	}
	return refused
}

// skip leaves out what it is at: an action, which then is never undone, or a compensation.
func (b *batch) skip(ctx context.Context, in *instance) (string, error) {
	name, was := in.stepName(), ""
	if in.direction == Compensate {
		if err := b.undo(ctx, in, EvCompensationSkipped, EvLastCompensationSkipped, false, change{}); err != nil {
			return "", err
		}
		left, err := b.leftOut(ctx, in, Compensated, name)
		return fmt.Sprintf("the compensation of step %s is left out%s%s", name, b.then(in), left), err
	}
	rows, err := b.stepRows(ctx, in)
	if err != nil {
		return "", err
	}
	in.skipped, in.wide = in.skipped|1<<in.current, true
	ev, ch := EvStepSkipped, change{}
	switch {
	case in.current+1 == len(in.def.steps):
		ev = EvSagaSkipped // its end says what its participant may have done
	case in.step().remote:
		was = "; its participant may have done it all the same"
	}
	if in.step().remote && !in.mayHaveHappened(in.keptIn(rows)) {
		was, ch.reason = "", rows[in.current].Error // by which deedOf knows
	}
	if err := b.move(ctx, in, ev, ch); err != nil {
		return "", err
	}
	left, err := b.leftOut(ctx, in, Completed, name)
	return fmt.Sprintf("the action of step %s is left out%s%s%s", name, was, b.then(in), left), err
}

// leftOut says what is left as it is: what has just been skipped, or, if that was the last that was to be
// done, all of it.
func (b *batch) leftOut(ctx context.Context, in *instance, end Status, step string) (string, error) {
	if in.status != end {
		return unlessByHand(end, step), nil
	}
	left, err := b.left(ctx, in, end)
	if err != nil {
		return "", err
	}
	return left, b.endedByHand(ctx, in)
}

// then says where a saga is going.
func (b *batch) then(in *instance) string {
	if in.commandID == "" {
		return fmt.Sprintf("; it is %s", in.status)
	}
	return fmt.Sprintf("; it goes on to %s step %s", in.direction, in.stepName())
}

// Served by the primary key.
const stepSkippedSQL = `
SELECT COUNT(*)
  FROM saga_steps
 WHERE saga_id = ?
   AND name = ?
   AND status = 'SKIPPED'`

// skippedBefore tells what was skipped from what cannot be. Of a step that is SKIPPED it was the
// action if the instance says so, else the compensation.
func (b *batch) skippedBefore(ctx context.Context, in *instance, op Operation, refused error) error {
	var n int
	if err := b.tx.QueryRow(ctx, stepSkippedSQL, []any{[]byte(in.id), []byte(op.Step)}, &n); err != nil {
		return fmt.Errorf("read step %s of saga %s: %w", op.Step, in.id, err)
	}
	i := slices.Index(in.def.StepNames(), op.Step)
	if action := i >= 0 && in.skipped&(1<<i) != 0; n > 0 && action != op.undoes() {
		return already("the %s of step %s is SKIPPED", half(op.Direction), op.Step)
	}
	return refused
}

// cancelByHand has a saga undone that has not ended.
func (b *batch) cancelByHand(ctx context.Context, in *instance, reason string) (string, error) {
	rows, err := b.stepRows(ctx, in)
	if err != nil {
		return "", err
	}
	late, err := b.lateDeeds(ctx, in)
	if err != nil {
		return "", err
	}
	err = b.cancel(ctx, in, "cancelled: "+reason)
	if err == nil && in.status == Running {
		return "it is undone when the call that is open ends, or its command comes again" + in.unless() +
			"; the call is not made once more" + in.undoing(rows, late), nil
	}
	return "it is undone" + b.then(in) + in.undoing(rows, late), err
}

// resolve ends a saga that somebody has put right by hand.
func (b *batch) resolve(ctx context.Context, in *instance, op Operation) (string, error) {
	ev, because := EvResolvedCompleted, ""
	if op.As == Compensated {
		ev = EvResolvedCompensated
		if in.direction == Execute { // else there is a reason
			because = clip("resolved: " + op.By.Reason)
		}
	}
	left, err := b.left(ctx, in, op.As)
	if err != nil {
		return "", err
	}
	in.callOpen, in.wide = false, true
	if err := b.move(ctx, in, ev, change{because: because}); err != nil {
		return "", err
	}
	if in.unread {
		left += "; no hook was called, because its input does not decode: what they do is yours to do by hand"
	}
	return fmt.Sprintf("it is %s%s", in.status, left), b.endedByHand(ctx, in)
}

// endedByHand lets the definition say no to an end that its steps did not bring about.
func (b *batch) endedByHand(ctx context.Context, in *instance) error {
	f := in.def.hooks.endedByHand
	if f == nil {
		return nil
	}
	return b.hook(ctx, in, func(ctx context.Context, tx *sqltx.Tx, input any) error {
		return f(ctx, tx, input, in.status, in.lastError)
	})
}
