package saga

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"backstep/internal/sqltx"
)

// refused makes a hook whose statement the server refuses with an error of this number.
func refused(number string) func(ctx context.Context, tx *sqltx.Tx) error {
	return func(ctx context.Context, tx *sqltx.Tx) error {
		_, err := tx.Exec(ctx, `SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = `+number)
		return err
	}
}

// What the database refuses to a hook because of its own state is an outage, wherever the hook runs:
// nothing is noted with the saga, and it goes on when that is over.
func TestHookInAnOutage(t *testing.T) {
	t.Parallel()
	for name, number := range map[string]string{"full": "1114", "disk full": "1021", "read-only": "1290", "shutting down": "1053"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Deadline(time.Minute)))...))
			w.upFor(24 * time.Hour)
			id := w.start("x")
			m := w.command()
			s.on("completed", refused(number))
			s.on("compensated", s.plan["completed"])
			before := w.get(id)
			_, err := w.try(m) // of a lane, which holds it by the error's class
			if _, ok := errors.AsType[*HookError](err); err == nil || ok {
				t.Errorf("the batch gave %v", err)
			}
			equal(t, "the saga after a lane", w.get(id), before)

			w.belated(id)
			before = w.get(id)
			k := w.keeper(KeeperConfig{})
			for range maxLost - 1 {
				w.alive()
				if err := k.scanDeadlines(t.Context()); err == nil {
					t.Error("it was ended at its deadline")
				}
			}
			equal(t, "the saga after its deadline", w.get(id), before)

			o := &operator{w, &s}
			_, err = o.operate(id, Operation{Verb: VerbCancel})
			if _, ok := errors.AsType[*HookError](err); err == nil || ok {
				t.Errorf("the operator got %v", err)
			}
			s.on("compensated", nil)
			w.scan(k)
			equal(t, "status in the end", w.get(id).Status, Compensated)
			equal(t, "connections counted", len(k.broke), 0)
		})
	}
}

// One that loses its connection again and again to a database that is up is to blame in the end.
func TestHookThatLosesItsConnection(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Deadline(time.Minute)))...))
	w.upFor(24 * time.Hour)
	id := w.start("x")
	s.on("compensated", refused("2013"))
	w.belated(id)
	k := w.keeper(KeeperConfig{})
	for range maxLost {
		equal(t, "noted", len(w.get(id).Actions), 0)
		w.alive()
		if err := k.scanDeadlines(t.Context()); err == nil {
			t.Error("it was ended at its deadline")
		}
	}
	equal(t, "noted", one(t, "actions", w.get(id).Actions).Action, "deadline failed")
}

// One that never has room, as a table in memory that is full, is its saga's trouble in the end.
func TestHookThatNeverHasRoom(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Deadline(time.Minute)))...))
	w.upFor(24 * time.Hour)
	id := w.start("x")
	s.on("compensated", refused("1114"))
	w.belated(id)
	k := w.keeper(KeeperConfig{})
	for range maxLost {
		equal(t, "reason", w.get(id).LastError, "")
		w.alive()
		_ = k.scanDeadlines(t.Context()) // it says what it could not end
	}
	d := w.get(id)
	if !strings.Contains(d.LastError, "1114") {
		t.Errorf("it is %s: %q", d.Status, d.LastError)
	}
}
