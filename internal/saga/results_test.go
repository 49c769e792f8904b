package saga

import (
	"context"
	"errors"
	"testing"
	"time"

	"backstep/internal/sqltx"
)

// Later steps, compensations and hooks can read what a step returned.
func TestResultOf(t *testing.T) { bothForms(t, testResultOf) }

func testResultOf(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("flight", "hotel", "car"))
	var got []string
	read := func(step string) func(ctx context.Context, tx *sqltx.Tx) error {
		return func(ctx context.Context, tx *sqltx.Tx) error {
			b, err := ResultOf[booking](ctx, tx, step)
			got = append(got, b.Ref)
			return err
		}
	}
	s.on("hotel", read("flight"))
	s.on("undo flight", read("hotel"))
	s.on("compensated", read("hotel"))
	s.fail("car", Fail("no car"))
	id := w.start("x")
	w.run()
	equal(t, "status", w.get(id).Status, Compensated)
	equal(t, "results", got, []string{"flight of x", "hotel of x", "hotel of x"})
}

// What the batch has decided and not written yet counts: that of the last step in OnCompleted, that
// of a step whose saga is cancelled beside it in OnCompensated.
func TestResultOfTheBatchItself(t *testing.T) { bothForms(t, testResultOfTheBatchItself) }

func testResultOfTheBatchItself(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("flight", "hotel"))
	var got []string
	s.on("completed", func(ctx context.Context, tx *sqltx.Tx) error {
		for _, step := range []string{"flight", "hotel"} {
			b, err := ResultOf[booking](ctx, tx, step)
			if err != nil {
				return err
			}
			got = append(got, b.Ref)
		}
		return nil
	})
	x, y := w.start("x"), w.start("y")
	w.done(w.commands()...)
	w.done(w.commands()...)
	equal(t, "statuses", []Status{w.get(x).Status, w.get(y).Status}, []Status{Completed, Completed})
	equal(t, "results", got, []string{"flight of x", "hotel of x", "flight of y", "hotel of y"})
}

// A step whose compensation is left out has returned what it returned; one that is left out itself
// has not.
func TestResultOfSkipped(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := &operator{newWorld(t, s.define("a", "b", "c", "d")), s}
	id := o.start("x")
	o.done(o.command())
	o.command()
	o.does(id, Operation{Verb: VerbSkip, Step: "b"})
	o.done(o.command())
	s.fail("d", Fail("no"))
	o.done(o.command())
	o.command()
	o.does(id, Operation{Verb: VerbSkip, Step: "c", Direction: Compensate})
	var got []string
	s.on("undo a", func(ctx context.Context, tx *sqltx.Tx) error {
		for _, step := range []string{"b", "c"} {
			b, err := ResultOf[booking](ctx, tx, step)
			if errors.Is(err, ErrNoResult) {
				b.Ref = "none"
			} else if err != nil {
				return err
			}
			got = append(got, step+": "+b.Ref)
		}
		return nil
	})
	o.run()
	equal(t, "results", got, []string{"b: none", "c: c of x"})
}

func TestResultOfNothing(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, s.define("flight", "hotel"))
	s.on("flight", func(ctx context.Context, tx *sqltx.Tx) error {
		if _, err := ResultOf[booking](ctx, tx, "hotel"); !errors.Is(err, ErrNoResult) {
			t.Errorf("of a step to come: %v, want ErrNoResult", err)
		}
		_, err := ResultOf[booking](ctx, tx, "boat")
		return err
	})
	id := w.start("x")
	w.run()
	equal(t, "reason", w.get(id).LastError, `flight: saga.ResultOf: trip version 1 has no step "boat"`)
}

// A function that takes longer than its step's time has failed, and its neighbours have not.
func TestTimeout(t *testing.T) { bothForms(t, testTimeout) }

func testTimeout(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("flight", Timeout(50*time.Millisecond), Retry(2, 1)))...))
	slow, fast := w.start("slow"), w.start("fast")
	s.on("flight", func(ctx context.Context, _ *sqltx.Tx) error {
		if InfoFrom(ctx).SagaID == slow {
			<-ctx.Done()
		}
		return nil
	})
	if s.batched { // a statement that is cut takes the connection with it: the lane runs them one by one
		for _, m := range w.commands() {
			w.done(m)
		}
	} else {
		w.done(w.commands()...)
	}
	equal(t, "fast", w.get(fast).Status, Completed)
	d := w.get(slow)
	equal(t, "slow", d.Status, Running)
	equal(t, "attempt", d.Attempt, 2)
	w.done(w.scheduled())
	d = w.get(slow)
	equal(t, "slow", d.Status, Compensated)
	equal(t, "reason", d.LastError, "flight: gave up after 2 attempts: not done within 50ms: context deadline exceeded")
	equal(t, "effects", w.effects(), []string{"flight", "completed", "compensated (" + d.LastError + ")"})
}
