package saga

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"backstep/internal/sqltx"
)

// deaf makes a hook that does not heed its context, nor return until it is woken, or the test is over. Then
// it does something, and says what became of that.
func (w *world) deaf(s *script, what string) (wake func(), late chan error) {
	over := make(chan struct{})
	late = make(chan error, 100)
	s.on(what, func(_ context.Context, tx *sqltx.Tx) error {
		<-over
		_, err := tx.Exec(context.Background(), `INSERT INTO effects (what) VALUES ('late')`)
		late <- err
		return err
	})
	wake = sync.OnceFunc(func() { close(over) })
	w.t.Cleanup(wake)
	return wake, late
}

// brief is a keeper that is not patient with hooks.
func (w *world) brief() *Keeper {
	k := w.keeper(KeeperConfig{})
	k.endLimit, k.grace = 300*time.Millisecond, 100*time.Millisecond
	return k
}

// within demands that something ends.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatalf("%s does not end", what)
	}
}

// A hook that does not return at a deadline holds up no other saga. It is left behind and not tried again,
// and its saga is a person's at once, also if OnManualAction does not return either.
func TestHookThatDoesNotReturnAtADeadline(t *testing.T) {
	t.Parallel()
	for name, hooks := range map[string][]string{"one hook": {"compensated"}, "the last resort too": {"compensated", "manual action"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Deadline(time.Minute)), s.part("b", Deadline(time.Minute)))...))
			w.upFor(24 * time.Hour)
			id, other := w.start("x"), w.start("y")
			for _, m := range w.commands() {
				if m.OrderingKey == other { // it has something to undo, and so calls no hook
					w.done(m)
				}
			}
			w.belated(id)
			w.belated(other)
			for _, hook := range hooks {
				w.deaf(&s, hook)
			}
			k := w.brief()
			within(t, "the look", func() {
				w.alive()
				if err := k.scanDeadlines(t.Context()); err == nil || !strings.Contains(err.Error(), "may run on until the worker is restarted") {
					t.Errorf("the look gave %v", err)
				}
			})
			equal(t, "the other's status", w.get(other).Status, Compensating)
			d := w.get(id)
			if d.Status != ManualAction || !strings.HasPrefix(d.LastError, "its deadline has passed, but it could not be ended: hook does not heed its context") {
				t.Errorf("it is %s: %s", d.Status, d.LastError)
			}
			equal(t, "it is said of the last resort", strings.HasSuffix(d.LastError, "; then OnManualAction did not return in time"), len(hooks) > 1)
			called := len(s.called())
			w.scan(k)
			equal(t, "calls after another look", len(s.called()), called)
		})
	}
}

// What a hook that was left behind does in the end has no effect, and its connection is free.
func TestHookThatReturnsLate(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Deadline(time.Minute)))...))
	w.upFor(24 * time.Hour)
	w.db.SetMaxOpenConns(1)
	id := w.start("x")
	w.belated(id)
	wake, late := w.deaf(&s, "compensated")
	within(t, "the look", func() {
		w.alive()
		if err := w.brief().scanDeadlines(t.Context()); err == nil {
			t.Error("it was ended")
		}
	})
	wake()
	if err := <-late; err == nil {
		t.Error("what a hook does that was left behind has an effect")
	}
	d := w.get(id)
	equal(t, "effects", w.effects(), []string{"manual action (" + d.LastError + ")"})
}

// Nor does one keep lost commands of other sagas from being emitted again.
func TestHookThatDoesNotReturnInARescue(t *testing.T) {
	t.Parallel()
	for name, heeds := range map[string]bool{"heeds its context": true, "does not": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, s.define("a"))
			id, other := w.start("x"), w.start("y")
			w.exec(publishSQL)
			w.wait(id, 70*time.Hour)
			w.wait(other, 70*time.Hour)
			w.exec(`UPDATE saga_instances SET rescues = ? WHERE id = ?`, maxRescues, []byte(id))
			w.upFor(72 * time.Hour)
			w.consumes("a", "m", unknown, time.Hour)
			w.deaf(&s, "manual action")
			if heeds {
				s.on("manual action", func(ctx context.Context, _ *sqltx.Tx) error { <-ctx.Done(); return ctx.Err() })
			}
			k := w.keeper(KeeperConfig{Consumer: "m", Queues: map[string]func() Standing{"a": nil}})
			k.endLimit, k.grace = 300*time.Millisecond, 100*time.Millisecond
			within(t, "the look", func() { w.rescue(k) })
			d := w.get(id)
			if d.Status != ManualAction || !strings.HasSuffix(d.LastError, "never came out of it; then OnManualAction did not return in time") {
				t.Errorf("it is %s: %s", d.Status, d.LastError)
			}
			equal(t, "rescues of the other", w.get(other).Rescues, 1)
			equal(t, "emitted again", w.number(`SELECT COUNT(*) FROM outbox_events WHERE generation > 0`), 1)
		})
	}
}

// The last resort is come to within one look, also if that takes all its time. All times are a twentieth of what
// they are.
func TestLastResortWithinALook(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Deadline(time.Minute)), s.part("b", Deadline(time.Minute)))...))
	w.upFor(24 * time.Hour)
	id, other := w.start("x"), w.start("y")
	for _, m := range w.commands() {
		if m.OrderingKey == other { // it has something to undo, and so calls no hook
			w.done(m)
		}
	}
	w.belated(id)
	w.belated(other)
	w.deaf(&s, "compensated")
	w.deaf(&s, "manual action")
	k := w.keeper(KeeperConfig{})
	k.endLimit, k.grace = endLimit/20, endGrace/20
	for range 3 {
		w.alive()
		ctx, cancel := context.WithTimeout(t.Context(), lookLimit/20)
		_ = k.scanDeadlines(ctx) // it says what it could not end
		cancel()
	}
	equal(t, "its status", w.get(id).Status, ManualAction)
	equal(t, "the other's status", w.get(other).Status, Compensating)
}
