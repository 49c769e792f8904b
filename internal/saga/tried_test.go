package saga

import "testing"

// What is left out while its command is awaited was not tried by that, unless a participant may have it.
func TestTriesOfWhatIsLeftOut(t *testing.T) {
	t.Parallel()
	awaits := func(o *operator, step string) {
		for _, name := range []string{"a", "b"} {
			if step == name {
				return
			}
			o.done(o.command())
		}
		if m := o.command(); step == "last" {
			o.done(answer(m, replyOf(nil)))
		}
	}
	undoes := func(o *operator, id string) {
		awaits(o, "hotel")
		o.does(id, Operation{Verb: VerbCancel})
		o.done(answer(o.command(), replyOf(nil)))
	}
	for name, tt := range map[string]struct {
		to   func(o *operator, id string)
		op   Operation
		want int
	}{
		"awaited": {func(o *operator, _ string) { awaits(o, "b") }, Operation{Step: "b"}, 0},
		"awaited, tried before": {func(o *operator, _ string) {
			awaits(o, "b")
			o.s.fail("b", errPassing)
			o.done(o.command())
		}, Operation{Step: "b"}, 1},
		"a participant's": {func(o *operator, _ string) { awaits(o, "hotel") }, Operation{Step: "hotel"}, 1},
		"refused past the pivot": {func(o *operator, _ string) {
			awaits(o, "last")
			o.s.fail("last", Fail("no"))
			o.done(o.command())
		}, Operation{Step: "last"}, 1},
		"a compensation, awaited": {undoes, Operation{Step: "b", Direction: Compensate}, 1},
		"a compensation that has failed": {func(o *operator, id string) {
			undoes(o, id)
			o.s.fail("undo b", Fail("stuck"))
			o.done(o.command())
		}, Operation{Step: "b", Direction: Compensate}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &script{}
			o := &operator{newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"), s.part("b", Retry(3, 1)),
				RemoteStep[trip, booking]("hotel", "hotel", Pivot()), s.part("last!"))...)), s}
			id := o.start("x")
			tt.to(o, id)
			tt.op.Verb = VerbSkip
			o.does(id, tt.op)
			for _, step := range o.get(id).Steps {
				if step.Name == tt.op.Step {
					equal(t, "status, attempts", []any{step.Status, step.Attempts}, []any{StepSkipped, tt.want})
				}
			}
		})
	}
}

// What had failed, and was to be undone for another reason too by then, is undone for what had failed: also once
// its compensation has stopped, and goes on.
func TestReasonOfWhatFailedAndWasCancelled(t *testing.T) {
	t.Parallel()
	s, d := &script{}, &desk{}
	o := &operator{newWorld(t, s.paid(d)), s}
	id := o.start("x")
	o.done(o.command())
	m := o.command()
	call := o.leave(m)
	o.does(id, Operation{Verb: VerbCancel})
	d.fail(Execute, Fail("declined"))
	m.Answer = call(t.Context())
	o.done(m)
	equal(t, "undone", o.get(id).LastError, "pay: declined")
	s.fail("undo a", Fail("stuck"))
	o.done(o.command())
	equal(t, "stopped", o.get(id).Status, ManualAction)
	o.does(id, Operation{Verb: VerbRetry})
	equal(t, "goes on", o.get(id).LastError, "pay: declined")
}
