package saga

import (
	"errors"
	"fmt"

	"backstep/internal/outbox"
)

// Verb is something that an operator does to a saga.
type Verb string

// The verbs.
const (
	VerbRetry      Verb = "retry"      // the step it is at, now
	VerbSkip       Verb = "skip"       // leave out the step it is at
	VerbCompensate Verb = "compensate" // undo it, also if it has completed
	VerbCancel     Verb = "cancel"     // undo it, until its pivot
	VerbResolve    Verb = "resolve"    // it has been put right by hand
)

// Operation is a verb with all that it needs.
type Operation struct {
	Verb Verb
	By   outbox.Operator
	Step string // VerbSkip: the step that is to be left out, or doing it twice would leave out two
	// Direction is for VerbSkip too: Compensate leaves out the step's compensation, anything else its
	// action. What a saga is at may have become the other since somebody looked.
	Direction Direction
	As        Status // VerbResolve: Completed or Compensated

	// Still is what the saga was chosen by. It is looked at again under the saga's lock; one that it
	// does not choose any more has moved on meanwhile: ErrMovedOn. Nil: it was named.
	Still *Choice
}

// Choice is a filter, and the statuses that it chooses among if it names none.
type Choice struct {
	Filter
	Among []Status
}

var (
	// ErrMovedOn means that a saga is not any more what it was chosen for.
	ErrMovedOn = errors.New("saga: it has moved on")
	// ErrAlready means that what was asked for has been done, or is being done.
	ErrAlready = errors.New("saga: already so")
)

// RefusedError means that an operation would do harm, or nothing, where the saga is: it was not done.
type RefusedError struct {
	Why     string
	Instead string // what can be done; "": nothing has to be

	byHook bool // the definition says no, not the state
}

func (e *RefusedError) Error() string {
	if e.Instead == "" {
		return e.Why
	}
	return e.Why + "; " + e.Instead
}

func refuse(instead, format string, args ...any) error {
	return &RefusedError{Why: fmt.Sprintf(format, args...), Instead: instead}
}

// already is not an error to an operator: what they want is so.
func already(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrAlready, fmt.Sprintf(format, args...))
}

// wasRefused tells a saga that is left as it is, for a reason, from one of which something went wrong.
func wasRefused(err error) bool {
	_, ok := errors.AsType[*RefusedError](err)
	return ok || errors.Is(err, ErrAlready)
}

// What else to do.
const (
	insteadForward  = "it can only go forward: retry, skip or resolve"
	insteadUndoing  = "retry, skip or resolve what it is at"
	insteadUnwanted = "put it right by hand and resolve the saga; or retry, which has it undone"
	insteadUnknown  = "retry finds out; or put it right by hand and resolve the saga"
)

// check says why an operation is not to be done to a saga as it is. ErrAlready, a RefusedError, or
// nil. That the saga's definition is known has been checked. kept is as for checkUndo.
func (in *instance) check(op Operation, kept StepStatus) error {
	ended := in.status == Completed || in.status == Compensated
	switch op.Verb {
	case VerbRetry:
		if ended {
			return refuse(in.insteadOfNothing(), "it is %s: there is nothing to try", in.status)
		}
	case VerbSkip:
		switch {
		case ended:
			return refuse(in.insteadOfNothing(), "it is %s: there is no step to leave out", in.status)
		case op.Step != in.stepName():
			return refuse("", "it is at step %s now, not at %s", in.stepName(), op.Step)
		case op.undoes() != (in.direction == Compensate):
			return refuse("skip --compensation leaves out a compensation, skip without it an action",
				"it is at the %s of step %s now, not at its %s", half(in.direction), in.stepName(), half(op.Direction))
		case isDone(kept):
			return refuse("retry goes on with that", "the %s of step %s is known to be done", half(in.direction), in.stepName())
		case in.callOpen && in.direction == Compensate:
			return refuse(in.insteadOfSkip(), "the compensation of step %s has called another system and nobody knows whether that has happened, "+
				"so it cannot be left out", in.stepName())
		case in.callOpen:
			return refuse(in.insteadOfSkip(), "step %s has called another system and nobody knows whether that has happened, so it cannot count as skipped", in.stepName())
		}
	case VerbCancel, VerbCompensate:
		if op.Verb == VerbCompensate && in.status == Completed {
			return in.checkReverse()
		}
		// A command that waits in the outbox counts as sent: a relay may have published it and not said so yet.
		return in.checkUndo(in.mayHaveHappened(kept), kept)
	case VerbResolve:
		switch {
		case in.status == op.As:
			return already("it is %s", in.status)
		case ended:
			return refuse(in.insteadOfNothing(), "it is %s", in.status)
		case in.status == Compensating:
			return refuse("wait", "it is %s, so workers are at it", in.status)
		case in.status != ManualAction:
			return refuse(in.insteadOfResolve(), "it is %s, so workers are at it", in.status)
		}
	}
	return nil
}

// noted reports whether it is to be undone when its open call is resolved: nobody is asked again.
func (in *instance) noted() bool { return in.status == Running && in.unwanted() }

// unwanted is noted, also of a saga that has stopped since.
func (in *instance) unwanted() bool {
	return in.direction == Execute && in.callOpen && in.cancelReason != ""
}

// insteadOfResolve is what can be done to a saga that is RUNNING.
func (in *instance) insteadOfResolve() string {
	if in.pastPivot() {
		return "wait"
	}
	return "wait, or have it undone: backstep saga cancel " + in.id
}

// insteadOfSkip is what can be done about a call of which nobody knows whether it has happened.
func (in *instance) insteadOfSkip() string {
	switch {
	case in.noted():
		return "it is to be undone, when the call ends or its command comes again" + in.unless()
	case in.unwanted():
		return insteadUnwanted + in.unless()
	case in.status != ManualAction:
		return "that is found out when the call ends or its command comes again"
	}
	return insteadUnknown
}

// undoes reports whether it is about a step's compensation, not its action.
func (op Operation) undoes() bool { return op.Direction == Compensate }

// half is what of a step is run in a direction.
func half(d Direction) string {
	if d == Compensate {
		return "compensation"
	}
	return "action"
}

// insteadOfNothing is what can be done to a saga that has ended.
func (in *instance) insteadOfNothing() string {
	if in.status == Completed && in.checkReverse() == nil {
		return "compensate undoes it"
	}
	return ""
}

// Remote reports whether the step with this index is another service's.
func (d *Definition) Remote(i int) bool { return i < len(d.steps) && d.steps[i].remote }
