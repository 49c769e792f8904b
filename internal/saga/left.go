package saga

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Served by the primary key.
const stepRowsSQL = `
SELECT step_order, status, attempts, COALESCE(error, '')
  FROM saga_steps
 WHERE saga_id = ?`

// stepRows returns the rows of a saga's steps by their order, those that are not written yet included: status,
// attempts and error of each. They are read once, because only who has the saga's lock changes them.
func (b *batch) stepRows(ctx context.Context, in *instance) (map[int]StepState, error) {
	if in.rows == nil {
		if err := b.readStepRows(ctx, in); err != nil {
			return nil, fmt.Errorf("read steps of saga %s: %w", in.id, err)
		}
	}
	all := maps.Clone(in.rows)
	for _, s := range b.steps {
		if s.sagaID == in.id {
			all[s.order] = StepState{Order: s.order, Status: s.status, Attempts: s.attempts, Error: s.err}
		}
	}
	return all, nil
}

func (b *batch) readStepRows(ctx context.Context, in *instance) error {
	rows, err := b.tx.Query(ctx, stepRowsSQL, []byte(in.id))
	if err != nil {
		return err
	}
	defer rows.Close()
	read := map[int]StepState{}
	for rows.Next() {
		var s StepState
		if err := rows.Scan(&s.Order, &s.Status, &s.Attempts, &s.Error); err != nil {
			return err
		}
		read[s.Order] = s
	}
	if err := rows.Err(); err != nil {
		return err
	}
	in.rows = read
	return nil
}

// stand is how a step stands.
type stand struct {
	name     string
	status   StepStatus // "": it has no row
	undoable bool
	leftOut  bool // its action is not to be undone; of another one that is SKIPPED the compensation was left out
	deed     deed // leftOut: what its participant did of it
}

// stands says how the steps of a saga stand. late: see deedOf.
func (in *instance) stands(rows map[int]StepState, late uint64) []stand {
	steps := make([]stand, len(in.def.steps))
	for i, s := range in.def.steps {
		steps[i] = stand{name: s.name, status: rows[i].Status, undoable: s.undoable(), leftOut: in.skipped&(1<<i) != 0}
		if steps[i].leftOut {
			steps[i].deed = deedOf(s.remote, rows[i], late&(1<<i) != 0)
		}
	}
	return steps
}

// left says what a saga that a person ends where it is leaves as it is not meant to be at that end.
func (b *batch) left(ctx context.Context, in *instance, end Status) (string, error) {
	rows, err := b.stepRows(ctx, in)
	if err != nil {
		return "", err
	}
	late, err := b.lateDeeds(ctx, in)
	if err != nil {
		return "", err
	}
	return leftAsTheyAre(end, in.stands(rows, late), reached(in.direction, in.current, in.mayHaveHappened(in.keptIn(rows)))), nil
}

// Left says of a saga that has ended what Operate said when it was ended, or had something left out: which
// steps are not as they are meant to be at its end, after a semicolon. ByHand: a person ended it where it was.
func (e *Engine) Left(d Detail, byHand bool) string {
	var steps []stand
	var remote uint64
	if def, err := e.DefinitionOf(d); err == nil {
		for i, s := range def.steps {
			steps = append(steps, stand{name: s.name, undoable: s.undoable()})
			if s.remote {
				remote |= 1 << i
			}
		}
	}
	may := remote&(1<<d.CurrentStep) != 0 && !d.endedRefused() // its call, or its participant's part, may have happened
	for _, s := range d.Steps {
		for len(steps) <= s.Order { // nobody here knows the definition
			steps = append(steps, stand{name: s.Name, undoable: true})
		}
		steps[s.Order].status = s.Status
		if d.LeftOut&(1<<s.Order) != 0 {
			steps[s.Order].deed = deedOf(remote&(1<<s.Order) != 0, s, d.lateDeed(s.Name))
		}
	}
	for i := range steps {
		steps[i].leftOut = d.LeftOut&(1<<i) != 0
	}
	upTo := -1
	if byHand {
		upTo = reached(d.Direction, d.CurrentStep, may || d.called()&(1<<d.CurrentStep) != 0)
	}
	return leftAsTheyAre(d.Status, steps, upTo)
}

// reached returns the last step that has happened, or may have, of a saga that is ended where it is.
func reached(dir Direction, current int, may bool) int {
	if dir == Execute && !may {
		return current - 1
	}
	return current
}

// leftAsTheyAre names the steps that are not as they are meant to be at an end: those to be undone, up to
// the last that was reached, the last one first; those to be run in order.
func leftAsTheyAre(end Status, steps []stand, reached int) string {
	var not, undone, may, did []string
	for i, s := range steps {
		switch {
		case end == Compensated:
			if !s.leftOut && s.undoable && (i <= reached && s.status != StepCompensated || s.status == StepSkipped) {
				not = append(not, s.name)
			}
		case s.status == StepCompensated, s.status == StepCompensating:
			undone = append(undone, s.name)
		case s.deed == mayHaveDone:
			may = append(may, s.name)
		case s.deed == hasDone:
			did = append(did, s.name)
		case s.leftOut, s.status != StepCompleted && s.status != StepSkipped:
			not = append(not, s.name)
		}
	}
	if end == Compensated {
		slices.Reverse(not)
		return unlessByHand(end, not...) + notUndone(steps)
	}
	return unlessByHand(end, not...) + named("left out, but its participant may have done it all the same", may) +
		named("left out, but its participant says that it has done it", did) +
		named("undone, or begun to be, unless that was done again by hand", undone)
}

// notUndone names the steps that a saga which is undone leaves as they are, and why. What was left out and has
// nothing to undo is not among them, unless it is a participant's, which may have done it all the same.
func notUndone(steps []stand) string {
	var leftOut, may, did, before, never []string
	for _, s := range steps {
		switch {
		case !s.leftOut:
		case s.deed == mayHaveDone:
			may = append(may, s.name)
		case s.deed == hasDone:
			did = append(did, s.name)
		case s.status == StepSkipped && !s.undoable:
		case s.status == StepSkipped:
			leftOut = append(leftOut, s.name)
		case s.status == StepCompensated:
			before = append(before, s.name)
		default:
			never = append(never, s.name)
		}
	}
	return named("left out, so not undone if that was done by hand", leftOut) +
		named("left out, but its participant may have done it all the same, and nobody undoes that", may) +
		named("left out, but its participant says that it has done it, and nobody undoes that", did) +
		named("undone before, so not undone if that was done again by hand", before) +
		named("did not happen, as far as is known, so not undone if that was done by hand", never)
}

func unlessByHand(end Status, names ...string) string {
	if end == Completed {
		return named("not run, unless that was done by hand", names)
	}
	return named("not undone, unless that was done by hand", names)
}

// named says something of some steps, after a semicolon; nothing if there are none.
func named(what string, steps []string) string {
	if len(steps) == 0 {
		return ""
	}
	return "; " + what + ": " + strings.Join(steps, ", ")
}
