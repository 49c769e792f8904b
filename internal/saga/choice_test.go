package saga

import (
	"errors"
	"testing"
	"time"

	"backstep/internal/outbox"
)

// What was chosen by a filter is looked at again when its turn comes: it may have gone on meanwhile.
func TestChoiceIsLookedAtAgain(t *testing.T) {
	t.Parallel()
	o := newOperator(t, &script{})
	id := o.start("x")
	choose := func(f Filter, among ...Status) *Choice {
		if f.At == nil {
			f.At = o.engine.Positions("a")
		}
		return &Choice{Filter: f, Among: among}
	}
	o.exec(`UPDATE saga_instances SET last_error = 'Too slow', updated_at = NOW(6) - INTERVAL 1 HOUR`)
	for name, c := range map[string]*Choice{
		"status": choose(Filter{Status: ManualAction}), "no status": choose(Filter{}, Completed, ManualAction),
		"type": choose(Filter{Type: "cruise"}, Running), "step": choose(Filter{At: o.engine.Positions("b")}, Running),
		"reason": choose(Filter{Error: "too fast"}, Running), "age": choose(Filter{OlderThan: 2 * time.Hour}, Running),
	} {
		op := Operation{Verb: VerbCancel, By: outbox.Operator{Actor: "me", Reason: "because"}, Still: c}
		if _, err := o.engine.Operate(t.Context(), o.db, id, op); !errors.Is(err, ErrMovedOn) {
			t.Errorf("%s: %v, want ErrMovedOn", name, err)
		}
	}
	equal(t, "status", o.get(id).Status, Running)
	o.does(id, Operation{Verb: VerbCancel, Still: choose(Filter{Type: "trip", Error: "too SLOW", OlderThan: 30 * time.Minute}, ManualAction, Running)})
	equal(t, "status", o.get(id).Status, Compensated)
}
