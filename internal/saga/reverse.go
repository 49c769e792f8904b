package saga

import (
	"context"
	"fmt"
	"slices"
)

// A saga may have COMPLETED because a person said so, and not all of its steps have happened then. What did
// not, as far as is known, is not undone if the saga is reversed: a compensation may rely on its action, and
// give back what nobody took. Nor is what was undone before undone twice. What may have happened, a call
// that is open or a participant's command, is undone as if it had.

// mayStand reports whether what a step's action did stands, or may. called: it called a system that has not
// refused it.
func (s *step) mayStand(row StepState, called bool) bool {
	switch row.Status {
	case StepCompleted, StepCompensating, StepSkipped: // SKIPPED: its compensation was left out
		return true
	case StepCompensated:
		return false
	case StepFailed: // a participant says so only of the attempt that it refuses
		return called || s.remote && row.Attempts > 1
	case "", StepPending: // no command was sent
		return called
	}
	return called || s.remote
}

// absent returns the steps of which nothing stands, as far as is known. Those that were left out are not
// among them. called are those that called a system that has not refused it. Bit i is step i.
func (in *instance) absent(rows map[int]StepState, called uint64) (steps uint64) {
	for i, s := range in.def.steps {
		if in.skipped&(1<<i) == 0 && !s.mayStand(rows[i], called&(1<<i) != 0) {
			steps |= 1 << i
		}
	}
	return steps
}

// known reads what the checks of an operation need to know of a saga's steps. What of the step that is awaited
// has been kept is returned.
func (b *batch) known(ctx context.Context, in *instance) (kept StepStatus, err error) {
	if in.status != Completed {
		return b.kept(ctx, in)
	}
	rows, err := b.stepRows(ctx, in)
	if err != nil {
		return "", err
	}
	called, err := b.called(ctx, in)
	if err != nil {
		return "", fmt.Errorf("read calls of saga %s: %w", in.id, err)
	}
	in.nothing = in.absent(rows, called)
	return "", nil
}

// Served by the primary key.
const selectCalledSQL = `
SELECT step_order
  FROM saga_calls
 WHERE saga_id = ?
   AND direction = 'execute'
   AND status <> 'REFUSED'`

// called returns the steps whose action called a system that has not refused it.
func (b *batch) called(ctx context.Context, in *instance) (steps uint64, err error) {
	if !slices.ContainsFunc(in.def.steps, func(s *step) bool { return s.prepare != nil }) {
		return 0, nil
	}
	rows, err := b.tx.Query(ctx, selectCalledSQL, []byte(in.id))
	if err != nil {
		return 0, err
	}
	defer rows.Close()
	for rows.Next() {
		var i int
		if err := rows.Scan(&i); err != nil {
			return 0, err
		}
		steps |= 1 << i
	}
	return steps, rows.Err()
}

// checkReverse is for a saga that has completed.
func (in *instance) checkReverse() error {
	last := len(in.def.steps) - 1
	switch {
	case in.def.pivot <= last:
		return refuse("", "it is COMPLETED, and so is its pivot, step %s: what is behind that is not undone", in.def.steps[in.def.pivot].name)
	case in.def.undoFrom(last, in.skipped) < 0:
		return refuse("", "it is COMPLETED, and none of its steps has anything to undo")
	case in.def.undoFrom(last, in.skipped|in.nothing) < 0:
		return refuse("what was done by hand is undone by hand", "it is COMPLETED, and none of its steps that could be undone has happened, as far as is known")
	}
	return nil
}

// reverse has a completed saga undone.
func (b *batch) reverse(ctx context.Context, in *instance, reason string) (string, error) {
	in.cancelReason, in.wide = clip("reversed: "+reason), true
	if err := b.hook(ctx, in, in.def.hooks.resumed); err != nil {
		return "", err
	}
	rows, err := b.stepRows(ctx, in)
	if err != nil {
		return "", err
	}
	late, err := b.lateDeeds(ctx, in)
	if err != nil {
		return "", err
	}
	in.skipped |= in.nothing
	undo := in.def.undoFrom(len(in.def.steps)-1, in.skipped)
	err = b.move(ctx, in, EvReversed, change{undo: undo, because: in.cancelReason})
	return "it is undone" + b.then(in) + in.undoing(rows, late), err
}

// undoing says what else is undone of a saga that is on its way back, in that order, and what is not. rows are those
// from before it turned; late: see deedOf.
func (in *instance) undoing(rows map[int]StepState, late uint64) (says string) {
	if in.status == Compensating {
		for i := in.current; ; {
			if i = in.def.undoFrom(i-1, in.skipped); i < 0 {
				break
			}
			says += ", then " + in.def.steps[i].name
		}
	}
	var final []string
	for i, s := range in.def.steps {
		if !s.undoable() && rows[i].Status == StepCompleted {
			final = append(final, s.name)
		}
	}
	return says + named("without a compensation, so not undone", final) + notUndone(in.stands(rows, late))
}
