package saga

import (
	"slices"
	"strings"
	"testing"
)

// legal is where each event leads, as the design tells it: the state table once more, written by hand.
var legal = map[Status]map[Event]Status{
	Running: {
		EvStepSent: Running, EvCallBegun: Running, EvStepCompleted: Running, EvStepRetried: Running, EvSagaCompleted: Completed,
		EvStepUnwanted: Compensating, EvStepUnwantedClean: Compensated,
		EvStepFailed: Compensating, EvStepFailedClean: Compensated, EvStepRefused: ManualAction,
		EvCancelRecorded: Running, EvCancelled: Compensating, EvCancelledClean: Compensated,
		EvCommandParked: ManualAction, EvRescuesExhausted: ManualAction, EvDeadlineFailed: ManualAction,
		EvRetriedNow: Running, EvStepSkipped: Running, EvSagaSkipped: Completed,
	},
	Compensating: {
		EvCompensationSent: Compensating, EvCompensationBegun: Compensating,
		EvStepCompensated: Compensating, EvCompensationRetried: Compensating, EvSagaCompensated: Compensated,
		EvCompensationFailed: ManualAction, EvCommandParked: ManualAction, EvRescuesExhausted: ManualAction, EvDeadlineFailed: ManualAction,
		EvCompensationRetriedNow: Compensating, EvCompensationSkipped: Compensating, EvLastCompensationSkipped: Compensated,
	},
	ManualAction: {
		EvActionReturned: Running, EvCompensationReturned: Compensating,
		EvRetriedNow: Running, EvCompensationRetriedNow: Compensating,
		EvCancelled: Compensating, EvCancelledClean: Compensated,
		EvStepSkipped: Running, EvSagaSkipped: Completed, EvCompensationSkipped: Compensating, EvLastCompensationSkipped: Compensated,
		EvResolvedCompleted: Completed, EvResolvedCompensated: Compensated,
	},
	Completed: {EvReversed: Compensating},
}

// becomes is what each event makes of the step that the saga is at. The others leave its row alone:
// they are about the saga, its command, or a step whose turn comes next.
var becomes = map[StepStatus][]Event{
	StepWaiting:      {EvStepSent},
	StepRunning:      {EvCallBegun, EvStepRetried},
	StepCompleted:    {EvStepCompleted, EvSagaCompleted, EvStepUnwanted, EvStepUnwantedClean},
	StepFailed:       {EvStepFailed, EvStepFailedClean, EvStepRefused},
	StepCompensating: {EvCompensationSent, EvCompensationBegun, EvCompensationRetried, EvCompensationFailed},
	StepCompensated:  {EvStepCompensated, EvSagaCompensated},
	StepSkipped:      {EvStepSkipped, EvSagaSkipped, EvCompensationSkipped, EvLastCompensationSkipped},
}

// follows is what each event leads to. After the others the saga awaits what it awaited.
var follows = map[effect][]Event{
	doNext:    {EvStepCompleted, EvStepSkipped},
	undoNext:  {EvStepUnwanted, EvStepFailed, EvStepCompensated, EvCancelled, EvCompensationSkipped, EvReversed},
	tryLater:  {EvStepRetried, EvCompensationRetried},
	tryNow:    {EvRetriedNow, EvCompensationRetriedNow},
	complete:  {EvSagaCompleted, EvSagaSkipped, EvResolvedCompleted},
	undone:    {EvStepUnwantedClean, EvStepFailedClean, EvSagaCompensated, EvCancelledClean, EvLastCompensationSkipped, EvResolvedCompensated},
	askPerson: {EvStepRefused, EvCompensationFailed, EvCommandParked, EvRescuesExhausted, EvDeadlineFailed},
}

// under returns what an event stands under, nothing if it does not.
func under[K ~string](groups map[K][]Event, ev Event) (key K) {
	for k, events := range groups {
		if slices.Contains(events, ev) {
			return k
		}
	}
	return key
}

func TestEveryTransition(t *testing.T) {
	events, _ := declaredEvents(t)
	for _, s := range append(Statuses, "", "NONSENSE") {
		for _, ev := range append(events, "", "Nonsense") {
			r, err := next(s, ev)
			to, ok := legal[s][ev]
			want := rule{to, under(becomes, ev), under(follows, ev)}
			switch {
			case ok && (err != nil || r != want):
				t.Errorf("from %s on %s: %+v, %v, want %+v", s, ev, r, err, want)
			case !ok && err == nil:
				t.Errorf("from %s on %s: %s, want it refused", s, ev, r.to)
			case !ok && (!strings.Contains(err.Error(), string(s)) || !strings.Contains(err.Error(), string(ev))):
				t.Errorf("from %s on %s: %q names neither", s, ev, err)
			}
		}
	}
	// Nothing in the table that the test does not know.
	for s, byEvent := range rules {
		for ev := range byEvent {
			if _, ok := legal[s][ev]; !ok {
				t.Errorf("from %s on %s: the test knows of no such transition", s, ev)
			}
		}
	}
	if len(rules[Compensated]) > 0 {
		t.Errorf("%s is final and has transitions", Compensated)
	}
	for ev, r := range rules[Completed] {
		if ev != EvReversed {
			t.Errorf("%s is final but for an operator, and on %s goes to %s", Completed, ev, r.to)
		}
	}
}
