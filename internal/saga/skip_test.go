package saga

import (
	"errors"
	"strings"
	"testing"
)

// Who leaves out an action has not left out its compensation, which is what the saga may have come
// to meanwhile; nor the other way round.
func TestSkipSaysWhich(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := newOperator(t, s)
	id := o.start("x")
	action, undo := Operation{Verb: VerbSkip, Step: "b"}, Operation{Verb: VerbSkip, Step: "b", Direction: Compensate}
	refused := func(op Operation, says string) {
		t.Helper()
		before := o.look(id)
		_, err := o.operate(id, op)
		if r, ok := errors.AsType[*RefusedError](err); !ok || !strings.Contains(r.Error(), says) {
			t.Errorf("%v, want that it is refused: %s", err, says)
		}
		equal(t, "the saga", o.look(id), before)
	}
	s.fail("c", Fail("no"))
	o.done(o.command())
	b := o.command()
	refused(undo, "it is at the action of step b now, not at its compensation")
	o.done(b)
	o.done(o.command())
	o.command()
	equal(t, "where it is", o.get(id).Direction, Compensate)
	refused(action, "it is at the compensation of step b now, not at its action")
	if eff := o.does(id, undo); !strings.HasPrefix(eff.Detail, "the compensation of step b is left out") {
		t.Errorf("it says %q", eff.Detail)
	}
	equal(t, "reason", o.get(id).Actions[0].Reason, "compensation of step b: "+ops.Reason)
	o.already(id, undo)
	refused(action, "it is at step a now, not at b") // what was skipped is not the action
	o.run()
	equal(t, "effects", s.called(), []string{"a", "b", "c", "undo a a of x", "compensated (c: no)"})
}

// A choice of sagas has in it those that are at what is to be left out, and no others.
func TestChoiceOfDirection(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := newOperator(t, s)
	forward, back := o.start("forward"), o.start("back")
	o.exec(`UPDATE saga_instances SET direction = 'compensate' WHERE id = ?`, []byte(back))
	for d, want := range map[Direction]string{Execute: forward, Compensate: back} {
		f := Filter{Type: "trip", Direction: d}
		ids, err := Choose(t.Context(), o.db, f, []Status{Running})
		o.must(err)
		equal(t, "chosen", ids, []string{want})
		list, _, err := List(t.Context(), o.db, f)
		o.must(err)
		if len(list) != 1 || list[0].ID != want {
			t.Errorf("listed %+v", list)
		}
	}
	c := &Choice{Filter: Filter{Direction: Compensate}, Among: []Status{Running}}
	if _, err := o.operate(forward, Operation{Verb: VerbCancel, Still: c}); !errors.Is(err, ErrMovedOn) {
		t.Errorf("%v, want ErrMovedOn", err)
	}
}
