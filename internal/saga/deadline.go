package saga

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

// stepDeadline is what becomes of an instance's deadline when it is written.
type stepDeadline struct {
	mode  deadlineMode
	after time.Duration // setDeadline: from now; 0: this step has none
	again time.Duration // setDeadline: from now until its command is emitted once more; 0: never
}

type deadlineMode string

const (
	keepDeadline deadlineMode = "keep" // the default
	setDeadline  deadlineMode = "set"  // the earlier one of the step's and the saga's
	noDeadline   deadlineMode = "none"
)

// expectStep sets the deadline of the step that is awaited now. A compensation that runs here has
// none: it is retried, and then it is a person's.
func (in *instance) expectStep() {
	if s := in.step(); in.direction == Execute || s.remote {
		in.expect(s.deadline)
		return
	}
	in.expect(0)
}

func (in *instance) expect(d time.Duration) {
	in.deadline = stepDeadline{mode: setDeadline, after: d}
	if s := in.step(); s.remote && d > 0 {
		in.deadline.again = d - s.half()
	}
	in.wide = in.wide || d > 0
}

const (
	downtimeSQL = `SELECT downtime_us FROM saga_pulse WHERE id = 1`

	// By the clock that stands still during outages.
	selectOverdueSQL = `
SELECT id, saga_deadline_at <= now_at
  FROM saga_instances,
       (SELECT NOW(6) - INTERVAL COALESCE((SELECT downtime_us FROM saga_pulse WHERE id = 1), 0) MICROSECOND AS now_at) AS clock
 WHERE id IN (%s)
   AND deadline_at <= now_at`
)

// downtime returns for how long database, broker or workers have been away since the beginning,
// which is what the clock of deadlines is behind. It is a consistent read: it locks nothing.
func downtime(ctx context.Context, tx *sqltx.Tx) (time.Duration, error) {
	var us int64
	err := tx.QueryRow(ctx, downtimeSQL, nil, &us)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return 0, fmt.Errorf("read the clock of deadlines: %w", err)
	}
	return time.Duration(us) * time.Microsecond, nil
}

// deadlinePassed moves on those of the instances whose deadline has passed. It looks again under
// their locks. Instances of definitions that the engine does not know are left to who does.
func (e *Engine) deadlinePassed(ctx context.Context, tx *sqltx.Tx, ids []string) error {
	ids = slices.Sorted(slices.Values(ids))
	found, err := lockInstances(ctx, tx, ids)
	if err != nil {
		return err
	}
	overdue, err := e.overdue(ctx, tx, ids)
	if err != nil {
		return err
	}
	b := &batch{Engine: e, tx: tx}
	for _, id := range ids {
		in := found[id]
		ofSaga, passed := overdue[id]
		if in == nil || !passed {
			continue
		}
		ctx := tracing.Rejoin(ctx, in.traceID)
		switch out := b.find(in); out.Kind {
		case message.Done:
			note := b.noteAbandoned(in)
			err = b.expire(ctx, in, ofSaga)
			note()
		case message.Parked:
			err = b.expireUnfit(ctx, in, out.Reason)
		}
		if err != nil {
			return err
		}
	}
	return b.write(ctx)
}

// noteAbandoned returns what notes, once its deadline has been dealt with, that an instance awaits the command
// of a step of ours no more: it may have been lost, and nobody need look for it then (Void).
func (b *batch) noteAbandoned(in *instance) func() {
	command, before := in.commandID, in.brief()
	if command == "" || in.def == nil || in.current >= len(in.def.steps) || in.step().remote {
		return func() {}
	}
	return func() {
		if in.commandID != command {
			b.actions = append(b.actions, action{in.id, "deadline", "worker", "its deadline has passed", before, in.brief()})
		}
	}
}

// overdue returns which of the ids are overdue, and whether it is the whole saga.
func (e *Engine) overdue(ctx context.Context, tx *sqltx.Tx, ids []string) (map[string]bool, error) {
	out := map[string]bool{}
	if len(ids) == 0 {
		return out, nil
	}
	rows, err := tx.Query(ctx, fmt.Sprintf(selectOverdueSQL, sqltx.Placeholders(len(ids))), sqltx.Binary(ids)...)
	if err != nil {
		return nil, fmt.Errorf("look for deadlines: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var id []byte
		var ofSaga sql.NullBool
		if err := rows.Scan(&id, &ofSaga); err != nil {
			return nil, fmt.Errorf("look for deadlines: %w", err)
		}
		out[string(id)] = ofSaga.Bool
	}
	return out, rows.Err()
}

// expireUnfit is for one that does not fit its definition, or whose input does not decode, whatever it
// waits for. Its command is parked when it comes, but that may be lost, or be a participant's: of a
// reply that is parked nobody is told.
func (b *batch) expireUnfit(ctx context.Context, in *instance, why string) error {
	if in.status != Running && in.status != Compensating {
		return b.clearDeadline(in)
	}
	return b.stop(ctx, in, EvCommandParked, "its time has passed, and nothing that comes of it can be handled: "+why)
}

// expire does what a deadline that has passed leads to.
func (b *batch) expire(ctx context.Context, in *instance, ofSaga bool) error {
	s := in.step()
	if kept, err := b.kept(ctx, in); err != nil {
		return err
	} else if kept != "" && (in.status == Running || in.status == Compensating) {
		return b.stop(ctx, in, EvCommandParked, fmt.Sprintf("the reply to %s step %s came, but could not be handled; it is %s", in.direction, s.name, kept))
	}
	if ofSaga {
		err := b.cancel(ctx, in, fmt.Sprintf("not done within %s", in.def.within))
		switch {
		case errors.Is(err, ErrAlready):
			return b.clearDeadline(in)
		case wasRefused(err): // its pivot may have happened: from now on only the step's counts
			in.unlimited = true
			in.expectStep()
			return b.touch(in)
		}
		return err
	}
	late := fmt.Errorf("not done within %s", s.deadline)
	switch {
	case in.status != Running && in.status != Compensating:
		return b.clearDeadline(in)
	case s.remote && in.mayRetry():
		first, err := b.chain(ctx, in)
		if err != nil {
			return err
		}
		return b.retry(ctx, in, first, late)
	case in.status == Compensating:
		if !s.remote {
			return b.clearDeadline(in)
		}
		return b.stop(ctx, in, EvCompensationFailed,
			fmt.Sprintf("compensation of step %s failed at attempt %d: no reply: %v", s.name, in.attempt, late))
	case in.pastPivot():
		return b.clearDeadline(in)
	case in.callOpen:
		if err := b.cancel(ctx, in, failureOf(s.name, late.Error())); !wasRefused(err) {
			return err
		}
		return b.clearDeadline(in) // what follows is the call's matter
	}
	return b.failed(ctx, in, &failure{late.Error()}, s.remote)
}

// maxEnds is how often it is tried to end something at its deadline, until a person has to see to it.
const maxEnds = 5

const (
	// Served by ix_actions_saga. One that has moved on meanwhile awaits another command.
	countFailedEndsSQL = `
SELECT COUNT(*)
  FROM saga_actions
 WHERE saga_id = ?
   AND action = 'deadline failed'
   AND JSON_UNQUOTE(JSON_EXTRACT(CONVERT(after_json USING utf8mb4), '$.command_id')) = ?`

	// The saga's own deadline stays what it is, so that it is known which one has passed.
	tryToEndLaterSQL = `
UPDATE saga_instances
   SET last_error = ?, updated_at = NOW(6), deadline_at = NOW(6) + INTERVAL ? MICROSECOND
 WHERE id = ?`
)

// endFailed notes that a saga could not be ended at its deadline, because a hook failed, say, and has
// that tried again later. After some times it is a person's, as it is when a step has failed that often: it
// is in the database how often that was, whichever workers tried. If silent, no hook is told.
func (e *Engine) endFailed(ctx context.Context, tx *sqltx.Tx, id string, cause error, silent bool) error {
	found, err := lockInstances(ctx, tx, []string{id})
	if err != nil {
		return err
	}
	overdue, err := e.overdue(ctx, tx, []string{id})
	if err != nil {
		return err
	}
	in := found[id]
	_, passed := overdue[id]
	if in == nil || !passed || in.status != Running && in.status != Compensating { // somebody else has ended it, or tried
		return nil
	}
	var n int
	if err := tx.QueryRow(ctx, countFailedEndsSQL, []any{[]byte(id), in.commandID}, &n); err != nil {
		return fmt.Errorf("count how often saga %s could not be ended: %w", id, err)
	}
	n++
	e.find(in) // its steps have names
	b := &batch{Engine: e, tx: tx}
	if n >= maxEnds || errors.Is(cause, sqltx.ErrLeftBehind) { // another try would leave another behind
		why := fmt.Sprintf("its deadline has passed, but it could not be ended %d times: %v", n, cause)
		if n == 1 {
			why = fmt.Sprintf("its deadline has passed, but it could not be ended: %v", cause)
		}
		note := b.noteAbandoned(in)
		if err := b.stopFor(tracing.Rejoin(ctx, in.traceID), in, EvDeadlineFailed, why, silent); err != nil {
			return err
		}
		note()
		return b.write(ctx)
	}
	down, err := downtime(ctx, tx)
	if err != nil {
		return err
	}
	reason, before := clip(fmt.Sprintf("try %d of %d to end it: %v", n, maxEnds, cause)), in.brief()
	if in.direction == Execute { // else it is why it is being undone
		in.lastError = clip("its deadline has passed; " + reason)
	}
	b.actions = append(b.actions, action{id, "deadline failed", "worker", reason, before, in.brief()})
	if _, err := tx.Exec(ctx, tryToEndLaterSQL, nullText(in.lastError), (defaultRetry.delay(n) - down).Microseconds(), []byte(id)); err != nil {
		return fmt.Errorf("put off the deadline of saga %s: %w", id, err)
	}
	return b.write(ctx)
}

// clearDeadline is for one that means nothing any more.
func (b *batch) clearDeadline(in *instance) error {
	in.deadline = stepDeadline{mode: noDeadline}
	return b.touch(in)
}

// touch has an instance written that is not moved on.
func (b *batch) touch(in *instance) error {
	in.wide = true
	b.remember(in)
	return nil
}
