package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

var ops = outbox.Operator{Actor: "ops", Reason: "ticket 12"}

// operator does operations on the sagas of a world.
type operator struct {
	*world
	s *script
}

// newOperator's sagas have the steps a, b and c, c with nothing to undo.
func newOperator(t *testing.T, s *script, options ...StepOption) *operator {
	t.Helper()
	parts := append(s.hooks(), s.part("a", Retry(3, 1)), s.part("b", append(options, Retry(3, 1))...), s.part("c!", Retry(3, 1)))
	return &operator{newWorld(t, Define("trip", 1, parts...)), s}
}

func (o *operator) operate(id string, op Operation) (Effect, error) {
	o.t.Helper()
	op.By = ops
	return o.engine.Operate(o.t.Context(), o.db, id, op)
}

// look is get without what changes while one looks.
func (o *operator) look(id string) Detail {
	o.t.Helper()
	d := o.get(id)
	d.UntilDue = 0
	return d
}

// does demands that an operation changes something, once.
func (o *operator) does(id string, op Operation) Effect {
	o.t.Helper()
	actions := len(o.get(id).Actions)
	eff, err := o.operate(id, op)
	if err != nil || !eff.Changed {
		o.t.Fatalf("%+v: %+v, %v", op, eff, err)
	}
	equal(o.t, "actions", len(o.get(id).Actions), actions+1)
	o.leaves(id, op, eff.Detail)
	return eff
}

// already demands that it is so already: nothing is written.
func (o *operator) already(id string, op Operation) Effect {
	o.t.Helper()
	before := o.look(id)
	eff, err := o.operate(id, op)
	if err != nil || eff.Changed || eff.Detail == "" {
		o.t.Errorf("%+v again: %+v, %v", op, eff, err)
	}
	equal(o.t, "the saga", o.look(id), before)
	return eff
}

// states are the ways to each state a saga can be in. Each leaves the outbox looked at.
var states = []struct {
	name string
	to   func(o *operator, id string)
}{
	{"RUNNING", func(o *operator, id string) { o.done(o.command()); o.command() }},
	{"RUNNING, scheduled", func(o *operator, id string) {
		o.s.fail("b", errPassing)
		o.done(o.command())
		o.done(o.command())
		o.exec(`UPDATE scheduled_messages SET due_at = NOW(6) + INTERVAL 1 HOUR`)
	}},
	{"RUNNING, lost", func(o *operator, id string) {
		o.done(o.command())
		o.exec(`DELETE FROM outbox_events WHERE message_id = ?`, []byte(o.command().MessageID))
	}},
	{"COMPENSATING", func(o *operator, id string) {
		o.s.fail("c", Fail("no"))
		o.done(o.command())
		o.done(o.command())
		o.done(o.command())
		o.command()
	}},
	{"MANUAL_ACTION, parked", func(o *operator, id string) {
		o.done(o.command())
		o.park(o.command(), "poison")
	}},
	{"MANUAL_ACTION, undo parked", func(o *operator, id string) {
		o.s.fail("c", Fail("no"))
		o.done(o.command())
		o.done(o.command())
		o.done(o.command())
		o.park(o.command(), "poison")
	}},
	{"MANUAL_ACTION, undo failed", func(o *operator, id string) {
		o.s.fail("c", Fail("no"))
		o.s.fail("undo b", Fail("stuck"))
		o.run()
	}},
	{"COMPLETED", func(o *operator, id string) { o.run() }},
	{"COMPENSATED", func(o *operator, id string) {
		o.s.fail("b", Fail("no"))
		o.run()
	}},
}

// outcome is what an operation comes to, in a word or two.
func (o *operator) outcome(id string, op Operation) string {
	o.t.Helper()
	before := o.look(id)
	eff, err := o.operate(id, op)
	var refused *RefusedError
	switch {
	case errors.As(err, &refused):
		if refused.Why == "" {
			o.t.Errorf("%+v is refused without a word", op)
		}
		equal(o.t, "the saga", o.look(id), before)
		return "refused"
	case err != nil:
		o.t.Fatalf("%+v: %v", op, err)
	case !eff.Changed:
		equal(o.t, "the saga", o.look(id), before)
		return "already"
	}
	after := o.get(id)
	if eff.Status != after.Status || eff.Direction != after.Direction || eff.Attempt != after.Attempt {
		o.t.Errorf("%+v: %+v, the saga is %+v", op, eff, after.Summary)
	}
	a := after.Actions[len(after.Actions)-1]
	var was, is struct{ Status Status }
	if err := errors.Join(json.Unmarshal(a.Before, &was), json.Unmarshal(a.After, &is)); err != nil {
		o.t.Error(err)
	}
	if a.Action != string(op.Verb) || a.Actor != "ops" || !strings.Contains(a.Reason, "ticket 12") || was.Status != before.Status || is.Status != after.Status {
		o.t.Errorf("%+v: audit %+v", op, a)
	}
	return strings.TrimSpace(fmt.Sprintf("%s %s", after.Status, strings.TrimPrefix(eff.Step, before.Type)))
}

// TestOperations is every verb in every state a saga can be in. A second time changes nothing.
func TestOperations(t *testing.T) {
	t.Parallel()
	verbs := []Operation{{Verb: VerbRetry}, {Verb: VerbSkip, Step: "b"}, {Verb: VerbSkip, Step: "b", Direction: Compensate}, {Verb: VerbCancel}, {Verb: VerbCompensate},
		{Verb: VerbResolve, As: Completed}, {Verb: VerbResolve, As: Compensated}}
	want := map[string][]string{ //     retry             skip b            skip undo b       cancel            compensate        resolve           resolve
		"RUNNING":                    {"already", "RUNNING c", "refused", "COMPENSATING a", "COMPENSATING a", "refused", "refused"},
		"RUNNING, scheduled":         {"RUNNING b", "RUNNING c", "refused", "COMPENSATING a", "COMPENSATING a", "refused", "refused"},
		"RUNNING, lost":              {"already", "RUNNING c", "refused", "COMPENSATING a", "COMPENSATING a", "refused", "refused"},
		"COMPENSATING":               {"already", "refused", "COMPENSATING a", "already", "already", "refused", "refused"},
		"MANUAL_ACTION, parked":      {"RUNNING b", "RUNNING c", "refused", "COMPENSATING a", "COMPENSATING a", "COMPLETED b", "COMPENSATED b"},
		"MANUAL_ACTION, undo parked": {"COMPENSATING b", "refused", "COMPENSATING a", "already", "already", "COMPLETED b", "COMPENSATED b"},
		"MANUAL_ACTION, undo failed": {"COMPENSATING b", "refused", "COMPENSATING a", "already", "already", "COMPLETED b", "COMPENSATED b"},
		"COMPLETED":                  {"refused", "refused", "refused", "refused", "COMPENSATING b", "already", "refused"},
		"COMPENSATED":                {"refused", "refused", "refused", "already", "already", "refused", "already"},
	}
	s := &script{}
	o := newOperator(t, s)
	for _, st := range states {
		for i, op := range verbs {
			s.fail("b")
			s.fail("c")
			s.fail("undo b")
			id := o.start(fmt.Sprint(st.name, i))
			st.to(o, id)
			can := o.offers(id, op)
			got := o.outcome(id, op)
			if got != want[st.name][i] {
				t.Errorf("%s %s of a saga that is %s: %s, want %s", op.Verb, op.As, st.name, got, want[st.name][i])
			}
			if can != (got != "refused" && got != "already") {
				t.Errorf("%s of a saga that is %s: it is offered: %t, and comes to: %s", op.Verb, st.name, can, got)
			}
			if got == "refused" {
				equal(t, string(op.Verb)+" that was refused, again", o.outcome(id, op), "refused")
			} else {
				o.already(id, op)
			}
			o.run() // whatever is on its way
			o.exec(`DELETE FROM scheduled_messages`)
			if d := o.get(id); got != "refused" && !strings.HasPrefix(got, "already") && (d.Status == Running || d.Status == Compensating) && st.name != "RUNNING, scheduled" {
				t.Errorf("after %s the saga that was %s is %s for good, and awaits %s", op.Verb, st.name, d.Status, d.CommandID)
			}
		}
	}
}

// TestOperationsPastThePivot: there is no way back.
func TestOperationsPastThePivot(t *testing.T) {
	t.Parallel()
	s := &script{}
	parts := append(s.hooks(), s.part("a", Retry(3, 1)), s.part("b", Pivot(), Retry(3, 1)), s.part("c!", Retry(3, 1)))
	o := &operator{newWorld(t, Define("trip", 1, parts...)), s}
	s.fail("c", Fail("no"))
	for _, op := range []Operation{{Verb: VerbCancel}, {Verb: VerbCompensate}} {
		id := o.start(string(op.Verb))
		o.done(o.command())
		o.done(o.command())
		if _, err := o.operate(id, op); err == nil || !strings.Contains(err.Error(), "its pivot, step b, is behind it") || !strings.Contains(err.Error(), "retry, skip or resolve") {
			t.Errorf("RUNNING: %s gave %v", op.Verb, err)
		}
		o.run()
		s.fail("c")
		if d := o.get(id); d.Status != ManualAction || !slices.Equal(o.can(id), []Verb{VerbRetry, VerbSkip, VerbResolve}) {
			if op.Verb == VerbCancel {
				t.Errorf("%+v can: %v", d.Summary, o.can(id))
			}
		} else {
			o.does(id, Operation{Verb: VerbRetry})
			o.run()
		}
		equal(t, "status", o.get(id).Status, Completed)
		if _, err := o.operate(id, op); err == nil {
			t.Errorf("COMPLETED: %s was done", op.Verb)
		}
	}
}

// TestRetry: the step that failed is tried at once, under an id that is the only one awaited.
func TestRetry(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := newOperator(t, s)
	t.Run("scheduled", func(t *testing.T) {
		id := o.start("scheduled")
		states[1].to(o, id)
		awaited := o.get(id).CommandID
		o.does(id, Operation{Verb: VerbRetry})
		d := o.get(id)
		equal(t, "awaited, and attempt", []any{d.CommandID, d.Attempt}, []any{awaited, 2})
		equal(t, "due", o.number(`SELECT COUNT(*) FROM scheduled_messages WHERE due_at <= NOW(6)`), 1)
		o.done(o.scheduled())
		o.run()
		equal(t, "status", o.get(id).Status, Completed)
	})
	t.Run("stopped", func(t *testing.T) {
		s.fail("c", Fail("no"))
		s.fail("undo b", errPassing, errPassing, errPassing)
		id := o.start("stopped")
		o.run()
		o.done(o.scheduled())
		o.done(o.scheduled())
		equal(t, "status", o.get(id).Status, ManualAction)
		eff := o.does(id, Operation{Verb: VerbRetry})
		equal(t, "effect", []any{eff.Status, eff.Step, eff.Attempt}, []any{Compensating, "b", 1})
		equal(t, "why it is undone", o.get(id).LastError, "c: no")
		o.run()
		equal(t, "status", o.get(id).Status, Compensated)
		calls := strings.Join(s.called(), ", ")
		if !strings.Contains(calls, "resumed, undo b b of stopped, undo a") {
			t.Errorf("calls %s", calls)
		}
	})
	t.Run("parked", func(t *testing.T) {
		s.fail("c")
		id := o.start("parked")
		o.done(o.command())
		parked := o.command()
		o.park(parked, "poison")
		o.does(id, Operation{Verb: VerbRetry})
		if out := one(t, "outcomes", o.deliver(parked)); out.Kind != message.Stale {
			t.Errorf("the command that was parked is %s", out.Kind)
		}
		o.run()
		equal(t, "status", o.get(id).Status, Completed)
	})
	t.Run("published longer ago than rows are kept", func(t *testing.T) {
		id := o.start("swept")
		m := o.command()
		o.exec(`DELETE FROM outbox_events`)
		before := o.get(id)
		eff, err := o.engine.Operate(t.Context(), o.db, id, Operation{Verb: VerbRetry, By: outbox.Operator{Actor: "me", Reason: "slow"}})
		if err != nil || eff.Changed || !strings.Contains(eff.Detail, "emits it again") {
			t.Errorf("a retry says %q, %v, and changed it: %t", eff.Detail, err, eff.Changed)
		}
		equal(t, "saga", o.get(id), before) // the one that is in its queue is awaited still, at its attempt
		o.done(m)
		o.run()
		equal(t, "status", o.get(id).Status, Completed)
	})
	t.Run("superseded", func(t *testing.T) {
		id := o.start("superseded")
		states[1].to(o, id)
		s.fail("b")
		o.does(id, Operation{Verb: VerbSkip, Step: "b"})
		equal(t, "scheduled", o.number(`SELECT COUNT(*) FROM scheduled_messages`), 0)
		o.run()
		equal(t, "status", o.get(id).Status, Completed)
	})
}

// TestSkipIsNotCompensated, in both forms of steps.
func TestSkipIsNotCompensated(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, s *script) {
		t.Parallel()
		o := newOperator(t, s)
		s.fail("b", Fail("not this one"), Fail("nor this"))
		s.fail("c", Fail("no"))
		id := o.start("x")
		o.done(o.command())
		o.park(o.command(), "poison")
		o.does(id, Operation{Verb: VerbSkip, Step: "b"})
		o.run()
		d := o.get(id)
		equal(t, "steps", d.steps(), []string{"a COMPENSATED", "b SKIPPED", "c FAILED"})
		equal(t, "attempts of what was never tried", d.Steps[1].Attempts, 0)
		equal(t, "status", d.Status, Compensated)
		equal(t, "calls", s.called(), []string{"a", "manual action (command parked: poison)", "resumed", "c", "undo a a of x", "compensated (c: no)"})
		o.already(id, Operation{Verb: VerbSkip, Step: "b"})

		// The last step: the saga has completed, and reversing it leaves the step alone.
		s.fail("b")
		id = o.start("y")
		o.done(o.command())
		o.does(id, Operation{Verb: VerbSkip, Step: "b"})
		o.done(o.commands()[1])
		if _, err := o.operate(id, Operation{Verb: VerbSkip, Step: "c"}); err == nil || !strings.Contains(err.Error(), "it is COMPLETED") {
			t.Errorf("skip of a step that has completed gave %v", err)
		}
		o.does(id, Operation{Verb: VerbCompensate})
		o.run()
		d = o.get(id)
		equal(t, "reversed", d.steps(), []string{"a COMPENSATED", "b SKIPPED", "c COMPLETED"})
		equal(t, "status", d.Status, Compensated)
		equal(t, "why", d.LastError, "reversed: ticket 12")
	})
}

// TestReverse: a saga that has completed is undone, each step with what it returned.
func TestReverse(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, s *script) {
		t.Parallel()
		o := newOperator(t, s)
		id := o.start("x")
		o.run()
		s.fail("undo a", Fail("stuck"))
		o.does(id, Operation{Verb: VerbCompensate})
		if d := o.get(id); d.Status != Compensating || !d.FinishedAt.IsZero() {
			t.Errorf("%+v", d.Summary)
		}
		o.run()
		equal(t, "status", o.get(id).Status, ManualAction)
		o.does(id, Operation{Verb: VerbRetry})
		o.run()
		d := o.get(id)
		equal(t, "steps", d.steps(), []string{"a COMPENSATED", "b COMPENSATED", "c COMPLETED"})
		equal(t, "status", d.Status, Compensated)
		equal(t, "calls", s.called(), []string{"a", "b", "c", "completed", "resumed", "undo b b of x", "undo a a of x",
			"manual action (compensation of step a failed at attempt 1: stuck)", "resumed", "undo a a of x", "compensated (reversed: ticket 12)"})
	})
}

// TestEndedByHand: what a definition has against an end that its steps did not bring about, holds.
func TestEndedByHand(t *testing.T) {
	t.Parallel()
	s := &script{}
	parts := append(s.hooks(), s.part("a", Retry(3, 1)), s.part("b", Retry(3, 1)),
		OnEndedByHand(func(ctx context.Context, tx *sqltx.Tx, in trip, st Status, reason string) error {
			return s.do(ctx, tx, "by hand", fmt.Sprint(st, " ", reason))
		}))
	o := &operator{newWorld(t, Define("trip", 1, parts...)), s}
	for _, tt := range []struct {
		op   Operation
		says string
	}{
		{Operation{Verb: VerbResolve, As: Completed}, "by hand COMPLETED"},
		{Operation{Verb: VerbResolve, As: Compensated}, "by hand COMPENSATED resolved: ticket 12"},
		{Operation{Verb: VerbSkip, Step: "b"}, "by hand COMPLETED"},
	} {
		id := o.start(fmt.Sprint(tt.op))
		o.done(o.command())
		o.park(o.command(), "poison")
		before, effects := o.get(id), len(o.effects())
		s.fail("by hand", Fail("the stock is not right"))
		if _, err := o.operate(id, tt.op); err == nil || err.Error() != "the stock is not right" {
			t.Errorf("%+v gave %v", tt.op, err)
		}
		equal(t, "the saga", o.get(id), before)
		equal(t, "effects", len(o.effects()), effects)
		o.does(id, tt.op)
		if calls := s.called(); calls[len(calls)-1] != tt.says {
			t.Errorf("%+v: calls %q, want %q last", tt.op, calls, tt.says)
		}
	}
}

// TestTwoOperators at once do one thing.
func TestTwoOperators(t *testing.T) {
	t.Parallel()
	o := newOperator(t, &script{})
	for _, op := range []Operation{{Verb: VerbRetry}, {Verb: VerbSkip, Step: "b"}, {Verb: VerbCancel}, {Verb: VerbResolve, As: Completed}} {
		id := o.start(string(op.Verb))
		o.done(o.command())
		o.park(o.command(), "poison")
		var mu sync.Mutex
		changed := 0
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				eff, err := o.operate(id, op)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					t.Errorf("%s: %v", op.Verb, err)
				}
				if eff.Changed {
					changed++
				}
			})
		}
		wg.Wait()
		equal(t, "of 8 operators it was done by", changed, 1)
		equal(t, "actions", len(o.get(id).Actions), 1)
		o.run()
	}
}

// TestOperationsOnUnknown sagas and definitions are refused with what to do.
func TestOperationsOnUnknown(t *testing.T) {
	t.Parallel()
	o := newOperator(t, &script{})
	if _, err := o.operate("nobody", Operation{Verb: VerbRetry}); !errors.Is(err, ErrNotFound) {
		t.Errorf("no saga: %v", err)
	}
	id := o.start("x")
	o.exec(`UPDATE saga_instances SET version = 7`)
	if _, err := o.operate(id, Operation{Verb: VerbRetry}); err == nil || !strings.Contains(err.Error(), "version 7") || !strings.Contains(err.Error(), "release") {
		t.Errorf("unknown version: %v", err)
	}
	if offers, err := o.engine.Offers(t.Context(), o.db, id); len(offers) > 0 || err == nil || !strings.Contains(err.Error(), "release") {
		t.Errorf("unknown version: %+v are offered, %v", offers, err)
	}
	equal(t, "allowed", len(o.engine.Allowed(o.get(id))), 0)
}

// A resolve of what workers are at is refused with what can be done: the command that has it undone, if it can be.
func TestResolveOfWhatIsAtWork(t *testing.T) {
	t.Parallel()
	s := &script{}
	parts := append(s.hooks(), s.part("a", Pivot()), s.part("b!"))
	o := &operator{newWorld(t, Define("trip", 1, parts...)), s}
	id := o.start("x")
	refused := func(want string) {
		t.Helper()
		if _, err := o.operate(id, Operation{Verb: VerbResolve, As: Completed}); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	refused("it is RUNNING, so workers are at it; wait, or have it undone: backstep saga cancel " + id)
	o.done(o.command())
	refused("it is RUNNING, so workers are at it; wait") // it is past its pivot
}
