package saga

import (
	"errors"
	"strings"
	"testing"
)

// A saga that a person has ended as COMPLETED is reversed: what never happened, as far as is known, is not undone,
// nor is what was undone before, and it is said which steps are and which are not, in a dry run too, and when it has
// ended.
func TestReverseOfWhatWasResolved(t *testing.T) {
	t.Parallel()
	resolve := func(o *operator, id string) { o.does(id, Operation{Verb: VerbResolve, As: Completed}) }
	for name, tt := range map[string]struct {
		to    func(o *operator, id string)
		says  string
		steps []string // in the end
		undid string
		left  string // as is said in the end
	}{
		"its third step was parked": {
			func(o *operator, id string) {
				o.done(o.command())
				o.done(o.command())
				o.park(o.command(), "poison")
				resolve(o, id)
			},
			"it is undone; it goes on to compensate step b, then a; did not happen, as far as is known, so not undone if that was done by hand: c, d",
			[]string{"a COMPENSATED", "b COMPENSATED"}, "undo b b of x, undo a a of x",
			"; did not happen, as far as is known, so not undone if that was done by hand: c, d",
		},
		"its third step failed, the second is undone, the first cannot be": {
			func(o *operator, id string) {
				o.s.fail("c", Fail("no"))
				o.s.fail("undo a", Fail("stuck"))
				o.run()
				resolve(o, id)
			},
			"it is undone; it goes on to compensate step a; undone before, so not undone if that was done again by hand: b" +
				"; did not happen, as far as is known, so not undone if that was done by hand: c, d",
			[]string{"a COMPENSATED", "b COMPENSATED", "c FAILED"}, "undo a a of x",
			"; undone before, so not undone if that was done again by hand: b; did not happen, as far as is known, so not undone if that was done by hand: c, d",
		},
		"a compensation was left out": {
			func(o *operator, id string) {
				o.s.fail("c", Fail("no"))
				o.s.fail("undo b", Fail("stuck"))
				o.run()
				o.does(id, Operation{Verb: VerbSkip, Step: "b", Direction: Compensate})
				o.park(o.command(), "poison")
				resolve(o, id)
			},
			"it is undone; it goes on to compensate step b, then a; did not happen, as far as is known, so not undone if that was done by hand: c, d",
			[]string{"a COMPENSATED", "b COMPENSATED", "c FAILED"}, "undo b b of x, undo a a of x",
			"; did not happen, as far as is known, so not undone if that was done by hand: c, d",
		},
		"all of it ran but what was left out": {
			func(o *operator, id string) {
				o.done(o.command())
				o.does(id, Operation{Verb: VerbSkip, Step: "b"})
				for _, m := range o.commands() {
					o.deliver(m)
				}
				o.run()
			},
			"it is undone; it goes on to compensate step c, then a; without a compensation, so not undone: d; left out, so not undone if that was done by hand: b",
			[]string{"a COMPENSATED", "b SKIPPED", "c COMPENSATED", "d COMPLETED"}, "undo c c of x, undo a a of x",
			"; left out, so not undone if that was done by hand: b",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &script{}
			o := &operator{newWorld(t, s.define("a", "b", "c", "d!")), s}
			id := o.start("x")
			tt.to(o, id)
			equal(t, "status", o.get(id).Status, Completed)
			before := len(s.called())
			op := Operation{Verb: VerbCompensate, By: ops}
			dry, err := o.engine.Rehearse(t.Context(), o.db, id, op)
			o.must(err)
			equal(t, "in a dry run", dry.Detail, tt.says)
			rehearsed := len(s.called())
			equal(t, "in earnest", o.does(id, op).Detail, tt.says)
			s.fail("undo a")
			s.fail("undo b")
			o.run()
			d := o.get(id)
			equal(t, "status", d.Status, Compensated)
			equal(t, "steps", d.steps(), tt.steps)
			var undid []string
			for _, call := range s.called()[rehearsed:] {
				if strings.HasPrefix(call, "undo ") {
					undid = append(undid, call)
				}
			}
			equal(t, "undone", strings.Join(undid, ", "), tt.undid)
			equal(t, "left", o.engine.Left(d, false), tt.left)
			if before == rehearsed {
				t.Error("the dry run called nothing")
			}
		})
	}
}

// What may have happened is undone as if it had: a call that nobody knows the end of, a participant's step.
func TestReverseOfWhatMayHaveHappened(t *testing.T) {
	t.Parallel()
	t.Run("call", func(t *testing.T) {
		t.Parallel()
		s := &script{}
		v := s.visit(t, "c")
		o := &operator{v.world, s}
		v.leave(v.m)
		o.park(v.m, "poison")
		o.does(v.id, Operation{Verb: VerbResolve, As: Completed})
		eff := o.does(v.id, Operation{Verb: VerbCompensate})
		equal(t, "it says", eff.Detail, "it is undone; it goes on to compensate step pay, then a; did not happen, as far as is known, so not undone if that was done by hand: c")
		v.undo()
	})
	t.Run("call that was refused", func(t *testing.T) {
		t.Parallel()
		s := &script{}
		v := s.visit(t, "c")
		o := &operator{v.world, s}
		v.desk.fail(Execute, Fail("declined"))
		s.fail("undo a", Fail("stuck"))
		v.served(v.m)
		v.run()
		o.does(v.id, Operation{Verb: VerbResolve, As: Completed})
		eff := o.does(v.id, Operation{Verb: VerbCompensate})
		equal(t, "it says", eff.Detail, "it is undone; it goes on to compensate step a; did not happen, as far as is known, so not undone if that was done by hand: pay, c")
	})
	t.Run("participant", func(t *testing.T) {
		t.Parallel()
		s := &script{}
		o := &operator{newWorld(t, remoteTrip(s)), s}
		id := o.start("x")
		o.done(o.command())
		o.park(o.command(), "poison")
		o.does(id, Operation{Verb: VerbResolve, As: Completed})
		if eff := o.does(id, Operation{Verb: VerbCompensate}); !strings.HasPrefix(eff.Detail, "it is undone; it goes on to compensate step hotel, then flight") {
			t.Errorf("it says %q", eff.Detail)
		}
	})
}

// Where nothing happened that could be undone there is nothing to do, and it is neither offered nor suggested.
func TestReverseOfNothing(t *testing.T) {
	t.Parallel()
	o := newOperator(t, &script{})
	id := o.start("x")
	o.park(o.command(), "poison")
	o.does(id, Operation{Verb: VerbResolve, As: Completed})
	_, err := o.operate(id, Operation{Verb: VerbCompensate})
	if r, ok := errors.AsType[*RefusedError](err); !ok ||
		r.Error() != "it is COMPLETED, and none of its steps that could be undone has happened, as far as is known; what was done by hand is undone by hand" {
		t.Errorf("compensate gave %v", err)
	}
	for _, op := range []Operation{{Verb: VerbRetry}, {Verb: VerbCancel}} {
		if _, err := o.operate(id, op); err == nil || strings.Contains(err.Error(), "compensate undoes it") {
			t.Errorf("%s gave %v", op.Verb, err)
		}
	}
	equal(t, "can", o.can(id), []Verb(nil))
	equal(t, "allowed", len(o.engine.Allowed(o.get(id))), 0)
}
