package saga

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

// amid are the ways to a call that nobody knows the end of: its worker has died. Each returns the
// command that made it, which is delivered again at the end of it.
var amid = []struct {
	name string
	to   func(o *operator) message.Message
}{
	{"RUNNING", func(o *operator) message.Message {
		o.done(o.command())
		m := o.command()
		o.leave(m)
		return m
	}},
	{"COMPENSATING", func(o *operator) message.Message {
		o.s.fail("c", Fail("no"))
		o.done(o.command())
		o.done(o.outside(o.command()))
		o.done(o.command())
		m := o.command()
		o.leave(m)
		return m
	}},
}

// finish delivers messages and all that follows, calls included.
func (w *world) finish(msgs ...message.Message) {
	w.t.Helper()
	for msgs = append(msgs, w.commands()...); len(msgs) > 0; msgs = w.commands() {
		for _, m := range msgs {
			if o := w.deliver(m)[0]; o.Kind == message.Outside {
				m.Answer = o.Call(w.t.Context())
				w.done(m)
			}
		}
	}
}

// TestOperationsDuringACall is every verb amid a call, of an action and of a compensation, while its
// worker may still be at it and after its command was parked. While nobody knows whether the call has
// happened the step cannot count as left out, and is undone as if it had.
func TestOperationsDuringACall(t *testing.T) {
	t.Parallel()
	verbs := []Operation{{Verb: VerbRetry}, {Verb: VerbSkip, Step: "pay"}, {Verb: VerbCancel}, {Verb: VerbCompensate},
		{Verb: VerbResolve, As: Completed}, {Verb: VerbResolve, As: Compensated}}
	type ends struct {
		comesTo string // at once
		end     Status // when the command has come again, and all that follows it
	}
	want := map[string][]ends{
		"RUNNING": {{"already", Completed}, {"refused", Completed}, {"RUNNING pay", Compensated}, {"RUNNING pay", Compensated},
			{"refused", Completed}, {"refused", Completed}},
		"RUNNING, parked": {{"RUNNING pay", Completed}, {"refused", Completed}, {"COMPENSATING pay", Compensated}, {"COMPENSATING pay", Compensated},
			{"COMPLETED pay", Completed}, {"COMPENSATED pay", Compensated}},
		"COMPENSATING": {{"already", Compensated}, {"refused", Compensated}, {"already", Compensated}, {"already", Compensated},
			{"refused", Compensated}, {"refused", Compensated}},
		"COMPENSATING, parked": {{"COMPENSATING pay", Compensated}, {"refused", Compensated}, {"already", Compensated}, {"already", Compensated},
			{"COMPLETED pay", Completed}, {"COMPENSATED pay", Compensated}},
	}
	s, d := &script{}, &desk{}
	o := &operator{newWorld(t, s.paid(d, "c")), s}
	for _, at := range amid {
		for _, parked := range []string{"", ", parked"} {
			for i, op := range verbs {
				name := fmt.Sprintf("%s %s of a saga that is %s%s", op.Verb, op.As, at.name, parked)
				s.fail("c")
				id := o.start(name)
				m := at.to(o)
				if parked != "" {
					o.park(m, "poison")
				}
				before, calls := o.get(id), len(d.calls)
				equal(t, name+": a call is open", before.CallOpen, true)
				equal(t, name+": skip is offered", slices.Contains(o.can(id), VerbSkip), false)
				want := want[at.name+parked][i]
				op.Direction = before.Direction
				equal(t, name, o.outcome(id, op), want.comesTo)
				after := o.get(id)
				resolved := op.Verb == VerbResolve && parked != ""
				equal(t, name+": it is open yet", after.CallOpen, !resolved && after.Direction == before.Direction)
				equal(t, name+": calls", len(d.calls), calls)
				o.finish(m)
				after = o.get(id)
				equal(t, name+": in the end", []any{after.Status, after.CallOpen}, []any{want.end, false})
				// What the call may have done is undone, once, by a call that is told that nobody knows.
				undone := slices.Index(d.calls, "compensate "+id+":pay:compensate")
				equal(t, name+": undone by a call", undone >= 0, want.end == Compensated && !resolved)
				if undone >= 0 {
					equal(t, name+": calls to undo it", len(d.calls)-undone, 1)
					equal(t, name+": unknown", d.infos[undone].Unknown, at.name == "RUNNING")
				}
			}
		}
	}
}

// TestWhatIsSaidDuringACall: an operator learns why not, and what will be.
func TestWhatIsSaidDuringACall(t *testing.T) {
	t.Parallel()
	s, d := &script{}, &desk{}
	o := &operator{newWorld(t, s.paid(d, "c")), s}
	for i, what := range []string{"step pay has called", "the compensation of step pay has called"} {
		id := o.start(what)
		m := amid[i].to(o)
		what += " another system and nobody knows whether that has happened"
		if _, err := o.operate(id, Operation{Verb: VerbSkip, Step: "pay", Direction: []Direction{Execute, Compensate}[i]}); err == nil || !strings.HasPrefix(err.Error(), what) {
			t.Errorf("skip gave %v, want %s", err, what)
		}
		s.fail("c")
		o.finish(m)
	}
	id := o.start("recorded")
	amid[0].to(o)
	if eff := o.does(id, Operation{Verb: VerbCancel}); !strings.Contains(eff.Detail, "when the call that is open ends") {
		t.Errorf("%+v", eff)
	}
	equal(t, "cancel", o.get(id).CancelReason, "cancelled: ticket 12")
	o.already(id, Operation{Verb: VerbCancel})
	o.already(id, Operation{Verb: VerbCompensate})
	id = o.start("resolved")
	o.park(amid[0].to(o), "poison")
	eff := o.does(id, Operation{Verb: VerbResolve, As: Compensated})
	equal(t, "resolved", eff.Detail, "it is COMPENSATED; not undone, unless that was done by hand: pay, a")
}

// TestOperationsAtAPivot: one that may have happened and has nothing to undo is not cancelled, nor is
// that offered; neither where its command is still in the outbox, and may be published at that moment.
func TestOperationsAtAPivot(t *testing.T) {
	t.Parallel()
	s := &script{}
	remote := append(s.hooks(), s.part("a"), RemoteStep[trip, booking]("b", "b", Pivot(), NothingToUndo()))
	local := append(s.hooks(), s.part("a"), s.part("b!", Pivot(), (&desk{}).options()[1]))
	for name, parts := range map[string][]Part[trip]{"remote": remote, "local": local} {
		o := &operator{newWorld(t, Define("trip", 1, parts...)), s}
		id := o.start(name)
		o.done(o.command())
		if name == "local" {
			equal(t, "before its call", slices.Contains(o.can(id), VerbCancel), true)
			o.leave(o.command())
		}
		for _, v := range []Verb{VerbCancel, VerbCompensate} {
			equal(t, name+": it is offered", slices.Contains(o.can(id), v), false)
			if _, err := o.operate(id, Operation{Verb: v}); err == nil || !strings.Contains(err.Error(), "nobody knows whether step b, its pivot, has happened") {
				t.Errorf("%s: %s gave %v", name, v, err)
			}
		}
	}
}

// TestOperationMeetsWorker: who operates on a saga whose step runs waits for its end, and then finds
// the saga where that has brought it.
func TestOperationMeetsWorker(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		op    Operation
		says  string
		steps []string // in the end
	}{
		{Operation{Verb: VerbSkip, Step: "b"}, "it is at step c now, not at b", []string{"a COMPLETED", "b COMPLETED", "c COMPLETED"}},
		{Operation{Verb: VerbCancel}, "it is undone; it goes on to compensate step b", []string{"a COMPENSATED", "b COMPENSATED"}},
		{Operation{Verb: VerbRetry}, "attempt 1 to execute step c is PENDING and waits for a relay, so no other is sent. See backstep outbox show", []string{"a COMPLETED", "b COMPLETED", "c COMPLETED"}},
	} {
		s := &script{}
		o := newOperator(t, s)
		said := make(chan string, 1)
		var id string
		s.on("b", func(ctx context.Context, tx *sqltx.Tx) error {
			go func() {
				tt.op.By = ops
				eff, err := o.engine.Operate(t.Context(), o.db, id, tt.op)
				said <- fmt.Sprint(eff.Detail, err)
			}()
			return o.waitsForLock(ctx, locking)
		})
		id = o.start("x")
		o.done(o.command())
		o.done(o.command())
		if got := <-said; !strings.Contains(got, tt.says) {
			t.Errorf("%s: %q, want %q", tt.op.Verb, got, tt.says)
		}
		for _, m := range o.commands() { // the one of c is stale if it was cancelled
			o.deliver(m)
		}
		o.run()
		d := o.get(id)
		equal(t, string(tt.op.Verb), d.steps(), tt.steps)
	}
}

// locking is like the statement that locks instances.
const locking = `%saga_instances%FOR UPDATE%`

// waitsForLock waits until somebody is at a statement like this.
func (w *world) waitsForLock(ctx context.Context, statement string) error {
	for ctx.Err() == nil {
		if ids, err := testenv.Processes(ctx, w.db, `db = DATABASE() AND info LIKE ?`, statement); err != nil || len(ids) > 0 {
			return err
		}
		time.Sleep(2 * time.Millisecond) // a server tells nobody who waits for a lock: it is asked again
	}
	return ctx.Err()
}
