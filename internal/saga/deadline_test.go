package saga

import (
	"context"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// pass lets the clock of deadlines go on, and has the engine look at a saga.
func (w *world) pass(id string, d time.Duration) {
	w.t.Helper()
	w.exec(`INSERT INTO saga_pulse (id, beat_at, up_since, downtime_us) VALUES (1, NOW(6), NOW(6), ?)
    ON DUPLICATE KEY UPDATE downtime_us = downtime_us + VALUES(downtime_us)`, -d.Microseconds())
	err := sqltx.WithTx(w.t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		return w.engine.deadlinePassed(ctx, tx, []string{id})
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

func TestDeadlineOfStep(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("flight"), s.part("hotel", Deadline(time.Minute)))...))
	id := w.start("x")
	w.done(w.command())
	late := w.command()
	w.pass(id, 30*time.Second)
	equal(t, "status before", w.get(id).Status, Running)
	w.pass(id, 31*time.Second)
	d := w.get(id)
	equal(t, "steps", d.steps(), []string{"flight COMPLETED", "hotel FAILED"})
	equal(t, "command that comes late", w.deliver(late)[0].Kind, message.Stale)
	w.run()
	d = w.get(id)
	equal(t, "status", d.Status, Compensated)
	equal(t, "effects", w.effects(), []string{"flight", "undo flight flight of x", "compensated (hotel: not done within 1m0s)"})
}

// A retry does not start the deadline anew: it is the step's, not the attempt's.
func TestDeadlineGoesOnOverRetries(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("flight", Deadline(time.Minute)))...))
	id := w.start("x")
	before := w.get(id).DeadlineAt
	s.fail("flight", errPassing)
	w.done(w.command())
	equal(t, "deadline", w.get(id).DeadlineAt, before)
	retry := w.scheduled() // on its way
	w.pass(id, 2*time.Minute)
	equal(t, "status", w.get(id).Status, Compensated)
	equal(t, "retry that comes late", w.deliver(retry)[0].Kind, message.Stale)
}

// A remote step may have happened when its time is over: it is undone first.
func TestDeadlineOfRemoteStep(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, remoteTrip(s, Deadline(time.Minute), Retry(2, 1)))
	id := w.start("x")
	w.done(w.command())
	first := w.command()
	w.pass(id, 2*time.Minute)
	second := w.scheduled()
	equal(t, "attempt", second.Attempt(), 2)
	w.pass(id, 10*time.Second)
	equal(t, "status amid the second", w.get(id).Status, Running)
	w.pass(id, time.Minute)
	undo := w.command()
	equal(t, "to undo", undo.RoutingKey+" "+undo.Headers.String(message.HeaderDirection), "hotel compensate")
	equal(t, "late reply", w.deliver(answer(first, `{"status":"completed","result":{"Ref":"H"}}`))[0].Kind, message.Stale)
	for attempt := 2; attempt <= 5; attempt++ { // its compensation is tried again too
		w.pass(id, 10*time.Minute)
		undo = w.scheduled()
		equal(t, "attempt", undo.Attempt(), attempt)
	}
	w.pass(id, 10*time.Minute)
	d := w.get(id)
	equal(t, "status", d.Status, ManualAction)
	if !d.DeadlineAt.IsZero() {
		t.Errorf("deadline %s of a saga that waits for a person", d.DeadlineAt)
	}
}

func TestDeadlineOfSaga(t *testing.T) {
	t.Parallel()
	s := &script{}
	parts := append(s.hooks(), Within[trip](time.Hour), s.part("flight"), s.part("hotel", Pivot()), s.part("car!", Deadline(time.Minute)))
	w := newWorld(t, Define("trip", 1, parts...))
	tooLate, inTime := w.start("late"), w.start("in time")
	w.done(w.commands()...)
	hotels := w.commands()
	for _, m := range hotels {
		if m.Headers.String(message.HeaderSagaID) == inTime {
			w.done(m)
		}
	}
	w.pass(tooLate, 2*time.Hour)
	w.pass(inTime, 0)
	d := w.get(inTime)
	equal(t, "status past the pivot", d.Status, Running)
	if !d.DeadlineAt.IsZero() {
		t.Errorf("deadline %s past the pivot", d.DeadlineAt)
	}
	w.run()
	equal(t, "status past the pivot", w.get(inTime).Status, Completed)
	d = w.get(tooLate)
	equal(t, "status", d.Status, Compensated)
	equal(t, "reason", d.LastError, "not done within 1h0m0s")
}

// A saga that had stopped, and whose command comes back, has its deadlines again.
func TestDeadlineOfWhatComesBack(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		within bool
		goesOn func(w *world, s *script, m message.Message)
	}{
		"and fails":              {false, func(w *world, s *script, m message.Message) { s.fail("b", errPassing); w.done(m) }},
		"and fails, in the saga": {true, func(w *world, s *script, m message.Message) { s.fail("b", errPassing); w.done(m) }},
		"and begins a call":      {false, func(w *world, _ *script, m message.Message) { w.leave(m) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, d, options := &script{}, &desk{}, []StepOption{Retry(9, 1)}
			if strings.Contains(name, "call") {
				options = d.options()
			}
			parts := s.hooks()
			if tt.within {
				parts = append(parts, Within[trip](time.Hour))
			} else {
				options = append(options, Deadline(time.Hour))
			}
			w := newWorld(t, Define("trip", 1, append(parts, s.part("a"), s.part("b", options...))...))
			id := w.start("x")
			w.done(w.command())
			m := w.command()
			w.park(m, "panic")
			w.pass(id, 2*time.Minute)
			tt.goesOn(w, s, m)
			now := w.get(id)
			equal(t, "status", now.Status, Running)
			if now.DeadlineAt.IsZero() {
				t.Fatal("it has no deadline")
			}
			w.pass(id, 2*time.Hour)
			if s := w.get(id); s.Status == Running && s.CancelReason == "" {
				t.Errorf("long after its deadline: %+v", s.Summary)
			}
		})
	}
}

// An operator who has a saga go on after its time does not want it undone.
func TestSagaGoesOnAfterItsTime(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		stopped time.Duration
		op      Operation
		want    Status
	}{
		"retry":         {2 * time.Hour, Operation{Verb: VerbRetry}, Running},
		"skip":          {2 * time.Hour, Operation{Verb: VerbSkip, Step: "b"}, Running},
		"retry in time": {time.Minute, Operation{Verb: VerbRetry}, Compensating},
		"comes back":    {2 * time.Hour, Operation{}, Compensating}, // nobody has decided anything
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &script{}
			w := newWorld(t, Define("trip", 1, append(s.hooks(), Within[trip](time.Hour), s.part("a"), s.part("b"), s.part("c"))...))
			id := w.start("x")
			w.done(w.command())
			m := w.command()
			w.park(m, "panic")
			w.pass(id, tt.stopped)
			if tt.op.Verb == "" {
				w.done(m)
			} else {
				said := (&operator{world: w}).does(id, tt.op).Detail
				equal(t, "it is said: "+said, strings.Contains(said, "counts no more"), tt.want == Running)
			}
			w.pass(id, 2*time.Hour-tt.stopped)
			equal(t, "status", w.get(id).Status, tt.want)
		})
	}
}
