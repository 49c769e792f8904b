package saga

import (
	"slices"
	"testing"
	"time"
)

// Behind the pivot a step is only ever retried: with growing pauses, without limit. If it says no
// for good a person has to decide; nothing is undone.
func TestPivot(t *testing.T) { bothForms(t, testPivot) }

func testPivot(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("flight", Pivot()), s.part("hotel!", Retry(2, 1)))...))
	id := w.start("x")
	w.done(w.command())
	s.fail("hotel", errPassing, errPassing, errPassing, errPassing, Fail("full"))
	m := w.command()
	for attempt := 1; attempt < 5; attempt++ {
		w.done(m)
		m = w.scheduled()
		equal(t, "attempt", m.Attempt(), attempt+1)
		equal(t, "status", w.get(id).Status, Running)
	}
	w.done(m)
	d := w.get(id)
	equal(t, "status", d.Status, ManualAction)
	equal(t, "steps", d.steps(), []string{"flight COMPLETED", "hotel FAILED"})
	equal(t, "reason", d.LastError, "hotel: full; the pivot is behind it, so the saga cannot be undone")
}

// The pivot itself can fail: what came before it is undone.
func TestPivotFails(t *testing.T) { bothForms(t, testPivotFails) }

func testPivotFails(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("flight"), s.part("hotel!", Pivot()), s.part("car!"))...))
	id := w.start("x")
	s.fail("hotel", Fail("full"))
	w.run()
	equal(t, "status", w.get(id).Status, Compensated)
	equal(t, "effects", w.effects(), []string{"flight", "undo flight flight of x", "compensated (hotel: full)"})
}

// Of a remote pivot that does not answer nobody knows whether there is a way back.
func TestPivotWithoutReply(t *testing.T) {
	t.Parallel()
	s := &script{}
	remote := RemoteStep[trip, booking]("hotel", "hotel", Pivot(), NothingToUndo(), Deadline(time.Minute))
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("flight"), remote)...))
	id := w.start("x")
	w.done(w.command())
	w.pass(id, time.Hour)
	d := w.get(id)
	equal(t, "status", d.Status, ManualAction)
	equal(t, "reason", d.LastError, "hotel: not done within 1m0s; nobody knows whether this step, the pivot, has happened")
}

// Each step has its own attempts, and its own base and cap of the back-off: the pauses grow to that cap
// and no further. The other step has the default's.
func TestRetryPolicyOfStep(t *testing.T) {
	t.Parallel()
	s := &script{}
	const attempts, base, limit = 13, 500 * time.Millisecond, 2 * time.Second
	flight := s.part("flight", Retry(attempts, base), RetryCap(limit))
	w := newWorld(t, Define("trip", 1, append(s.hooks(), flight, s.part("hotel"))...))
	id := w.start("x")
	s.fail("flight", slices.Repeat([]error{errPassing}, attempts)...)
	w.done(w.command())
	for attempt := 2; attempt <= attempts; attempt++ {
		// By the 13th it would be half an hour, or with the default's cap 5 min.
		pause := time.Duration(w.number(`SELECT TIMESTAMPDIFF(MICROSECOND, NOW(6), due_at) FROM scheduled_messages`)) * time.Microsecond
		if pause > min(limit, base<<(attempt-2)) {
			t.Errorf("attempt %d is in %s, want %s at most", attempt, pause, min(limit, base<<(attempt-2)))
		}
		w.done(w.scheduled())
	}
	d := w.get(id)
	equal(t, "status", d.Status, Compensated)
	equal(t, "reason", d.LastError, "flight: gave up after 13 attempts: wrapped: try again")
	equal(t, "policies", []retryPolicy{w.def.steps[0].retry, w.def.steps[1].retry}, []retryPolicy{{attempts, base, limit}, defaultRetry})
}
