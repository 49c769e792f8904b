package saga

import (
	"strings"
	"testing"
)

// legal is the state table once more, as the design tells it.
var legal = map[Status]map[Event]Status{
	Running: {
		EvStepCompleted: Running, EvStepRetried: Running, EvSagaCompleted: Completed,
		EvStepFailed: Compensating, EvStepFailedClean: Compensated, EvCommandParked: ManualAction,
	},
	Compensating: {
		EvStepCompensated: Compensating, EvCompensationRetried: Compensating, EvSagaCompensated: Compensated,
		EvCompensationFailed: ManualAction, EvCommandParked: ManualAction,
	},
	ManualAction: {EvActionReturned: Running, EvCompensationBack: Compensating},
}

var events = []Event{
	EvStepCompleted, EvSagaCompleted, EvStepRetried, EvStepFailed, EvStepFailedClean, EvStepCompensated, EvSagaCompensated,
	EvCompensationRetried, EvCompensationFailed, EvCommandParked, EvActionReturned, EvCompensationBack,
}

func TestEveryTransition(t *testing.T) {
	for _, s := range append(Statuses, "", "NONSENSE") {
		for _, ev := range append(events, "", "Nonsense") {
			r, err := next(s, ev)
			to, ok := legal[s][ev]
			switch {
			case ok && (err != nil || r.to != to):
				t.Errorf("from %s on %s: %q, %v, want %s", s, ev, r.to, err, to)
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
	for _, s := range []Status{Completed, Compensated} {
		if len(rules[s]) > 0 {
			t.Errorf("%s is final and has transitions", s)
		}
	}
}
