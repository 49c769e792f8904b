package saga

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// locker records what it was asked to lock.
type locker struct{ asked [][]string }

func (l *locker) take(_ context.Context, _ *sqltx.Tx, keys []string) error {
	l.asked = append(l.asked, slices.Clone(keys))
	return nil
}

// Locks are taken once for the whole batch, before any step runs: the sorted union of what the
// steps name. Steps that name another function lock rows of another kind.
func TestLocks(t *testing.T) { bothForms(t, testLocks) }

func testLocks(t *testing.T, s *script) {
	t.Parallel()
	var rows, other locker
	keysOf := func(in trip) []string { return in.Keys }
	takeRows := func(ctx context.Context, tx *sqltx.Tx, keys []string) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.calls) > 0 {
			t.Errorf("locks are taken after %q", s.calls)
		}
		return rows.take(ctx, tx, keys)
	}
	takeOther := func(ctx context.Context, tx *sqltx.Tx, keys []string) error { return other.take(ctx, tx, keys) }
	at := func(name string, options ...StepOption) Part[trip] {
		return Step(name, "q", func(ctx context.Context, tx *sqltx.Tx, in trip) (booking, error) {
			return booking{}, s.do(ctx, tx, name, "")
		}, nil, options...)
	}
	one := Define("one", 1, at("a", Locks(keysOf, takeRows)), at("b", Locks(keysOf, takeRows)))
	two := Define("two", 1, at("a", Locks(keysOf, takeOther)))
	three := Define("three", 1, at("a"))
	w := newWorld(t, one, two, three)
	start := func(d *Definition, keys ...string) {
		t.Helper()
		err := sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
			_, _, err := Start(ctx, tx, d, message.NewID(), trip{Keys: keys})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	start(one, "c", "a")
	start(two, "z", "y")
	start(one, "b", "a", "c")
	start(one)
	start(two, "x", "z")
	start(three, "never")
	start(one, "failed")
	msgs := w.commands()
	msgs[6].Failure = "panic" // it will not be run
	w.done(msgs...)
	equal(t, "rows", rows.asked, [][]string{{"a", "b", "c"}})
	equal(t, "other", other.asked, [][]string{{"x", "y", "z"}})
}

// An error of take ends the batch like one of a statement.
func TestLocksFail(t *testing.T) { bothForms(t, testLocksFail) }

func testLocksFail(t *testing.T, s *script) {
	t.Parallel()
	fail := true
	take := func(context.Context, *sqltx.Tx, []string) error {
		if fail {
			return errors.New("no locks today")
		}
		return nil
	}
	w := newWorld(t, Define("trip", 1, s.part("a", Locks(func(in trip) []string { return []string{"k"} }, take))))
	id := w.start("x")
	m := w.command()
	if _, err := w.try(m); err == nil || !strings.Contains(err.Error(), "no locks today") {
		t.Errorf("the batch gave %v", err)
	}
	equal(t, "calls", s.called(), []string(nil))
	fail = false
	w.done(m)
	equal(t, "status", w.get(id).Status, Completed)
}
