package saga

import (
	"errors"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
)

// What an operation leaves as it is not meant to be at the end that it leads to is named, wherever the saga
// stood.
func TestLeftAsTheyAre(t *testing.T) {
	t.Parallel()
	completed, compensated := Operation{Verb: VerbResolve, As: Completed}, Operation{Verb: VerbResolve, As: Compensated}
	skip := func(step string) Operation { return Operation{Verb: VerbSkip, Step: step} }
	leave := func(step string) Operation { return Operation{Verb: VerbSkip, Step: step, Direction: Compensate} }
	for name, tt := range map[string]struct {
		to   func(w *world, s *script) // to MANUAL_ACTION
		ops  []Operation
		says []string
	}{
		"its third step was parked": {
			func(w *world, s *script) { w.done(w.command()); w.done(w.command()); w.park(w.command(), "poison") },
			[]Operation{completed}, []string{"it is COMPLETED; not run, unless that was done by hand: c, d"},
		},
		"likewise, to be undone": {
			func(w *world, s *script) { w.done(w.command()); w.done(w.command()); w.park(w.command(), "poison") },
			[]Operation{compensated}, []string{"it is COMPENSATED; not undone, unless that was done by hand: b, a"},
		},
		"its second step cannot be undone, the third failed": {
			func(w *world, s *script) { s.fail("c", Fail("no")); s.fail("undo b", Fail("stuck")); w.run() },
			[]Operation{completed},
			[]string{"it is COMPLETED; not run, unless that was done by hand: c, d; undone, or begun to be, unless that was done again by hand: b"},
		},
		"its first step cannot be undone, the second is": {
			func(w *world, s *script) { s.fail("c", Fail("no")); s.fail("undo a", Fail("stuck")); w.run() },
			[]Operation{completed},
			[]string{"it is COMPLETED; not run, unless that was done by hand: c, d; undone, or begun to be, unless that was done again by hand: a, b"},
		},
		"what was to undo its first step was parked": {
			func(w *world, s *script) {
				s.fail("b", Fail("no"))
				w.done(w.command())
				w.done(w.command())
				w.park(w.command(), "poison")
			},
			[]Operation{completed}, []string{"it is COMPLETED; not run, unless that was done by hand: b, c, d"},
		},
		"compensations are left out": {
			func(w *world, s *script) { s.fail("c", Fail("no")); s.fail("undo b", Fail("stuck")); w.run() },
			[]Operation{leave("b"), leave("a")},
			[]string{
				"the compensation of step b is left out; it goes on to compensate step a; not undone, unless that was done by hand: b",
				"the compensation of step a is left out; it is COMPENSATED; not undone, unless that was done by hand: b, a",
			},
		},
		"one is left out, and then it is resolved": {
			func(w *world, s *script) {
				s.fail("c", Fail("no"))
				s.fail("undo b", Fail("stuck"))
				s.fail("undo a", Fail("stuck"), Fail("stuck")) // first in a dry run
				w.run()
			},
			[]Operation{leave("b"), compensated},
			[]string{
				"the compensation of step b is left out; it goes on to compensate step a; not undone, unless that was done by hand: b",
				"it is COMPENSATED; not undone, unless that was done by hand: b, a",
			},
		},
		"a step is left out, and then it is cancelled": {
			func(w *world, s *script) { w.done(w.command()); w.park(w.command(), "poison") },
			[]Operation{skip("b"), {Verb: VerbCancel}},
			[]string{
				"the action of step b is left out; it goes on to execute step c; not run, unless that was done by hand: b",
				"it is undone; it goes on to compensate step a; left out, so not undone if that was done by hand: b",
			},
		},
		"steps are left out": {
			func(w *world, s *script) { w.done(w.command()); w.park(w.command(), "poison") },
			[]Operation{skip("b"), skip("c"), skip("d")},
			[]string{
				"the action of step b is left out; it goes on to execute step c; not run, unless that was done by hand: b",
				"the action of step c is left out; it goes on to execute step d; not run, unless that was done by hand: c",
				"the action of step d is left out; it is COMPLETED; not run, unless that was done by hand: b, c, d",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			o := &operator{newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"), s.part("b"), s.part("c"), s.part("d!"))...)), &s}
			id := o.start("x")
			tt.to(o.world, &s)
			for i, op := range tt.ops {
				if op.Verb == VerbResolve && o.get(id).Status != ManualAction {
					o.run()
				}
				op.By = ops
				dry, err := o.engine.Rehearse(t.Context(), o.db, id, op)
				o.must(err)
				equal(t, "in a dry run", dry.Detail, tt.says[i])
				equal(t, "in earnest", o.does(id, op).Detail, tt.says[i])
			}
		})
	}
}

// What a participant, or a call, may have done is not undone by saying so.
func TestLeftOfWhatMayHaveHappened(t *testing.T) {
	t.Parallel()
	var s script
	o := &operator{newWorld(t, remoteTrip(&s)), &s}
	id := o.start("x")
	o.done(o.command())
	o.park(o.command(), "poison")
	equal(t, "waiting", o.does(id, Operation{Verb: VerbResolve, As: Compensated}).Detail,
		"it is COMPENSATED; not undone, unless that was done by hand: hotel, flight")

	id = o.start("y")
	o.done(o.command())
	o.done(answer(o.command(), `{"status":"refused","error":"full"}`))
	o.run()
	equal(t, "undone by itself", o.engine.Left(o.get(id), false), "")
}

// What a participant is known to have done is left as it is meant to be, though that could not be handled here.
func TestLeftOfWhatIsKept(t *testing.T) {
	t.Parallel()
	for name, tt := range allUnhandled {
		if name == "refused" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s, id, r := tt.begin(t)
			s.fail(tt.hook, errors.New("mailbox full"))
			equal(t, "reply", w.fails(r, 2*time.Minute).Kind, message.Parked)
			eff := (&operator{world: w}).does(id, Operation{Verb: VerbResolve, As: tt.end})
			equal(t, "resolved", eff.Detail, "it is "+string(tt.end))
		})
	}
}

// leaves checks that what is left as it is, if the saga has ended, is said afterwards too.
func (o *operator) leaves(id string, op Operation, said string) {
	o.t.Helper()
	d := o.get(id)
	if _, left, ended := strings.Cut(said, "; it is "+string(d.Status)); ended || op.Verb == VerbResolve {
		if op.Verb == VerbResolve {
			left, _, _ = strings.Cut(strings.TrimPrefix(said, "it is "+string(d.Status)), "; no hook was called")
		}
		equal(o.t, "left, afterwards", o.engine.Left(d, op.Verb == VerbResolve), left)
	}
}

// What has nothing to undo is not said to be not undone.
func TestLeftOutWithNothingToUndo(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := &operator{newWorld(t, s.define("a", "b!", "c")), s}
	id := o.start("x")
	o.done(o.command())
	o.park(o.command(), "poison")
	o.does(id, Operation{Verb: VerbSkip, Step: "b"})
	o.command()
	eff := o.does(id, Operation{Verb: VerbCancel})
	equal(t, "says", eff.Detail, "it is undone; it goes on to compensate step a")
}
