package saga

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"backstep/internal/sqltx"
)

func TestStartIsIdempotent(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a"))
	var first string
	for i := range 3 {
		err := sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
			// Twice in one transaction, too.
			for range 2 {
				id, started, err := Start(ctx, tx, w.def, "order-1", trip{Name: "x"})
				if err != nil {
					return err
				}
				if first == "" {
					first = id
				} else if started {
					t.Errorf("start %d: started again", i)
				}
				equal(t, "id", id, first)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	w.command() // one
	// Bytes, not text: no collation makes these equal. Another type is another saga.
	for _, other := range []string{"ORDER-1", "order-1 "} {
		if w.start(other) == first {
			t.Errorf("%q is taken for order-1", other)
		}
	}
	w.def = Define("other", 1, s.part("a"))
	if w.start("order-1") == first {
		t.Error("another type is the same saga")
	}
}

// B81: many start the same saga at once, with two payloads, and in some rounds behind one that is killed
// before it can commit. All get the one id and no error; there is one first command, and the payload is
// that of the caller who was told that it started the saga.
func TestConcurrentStarts(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a"))
	const callers, rounds = 50, 80
	w.db.SetMaxOpenConns(callers + 2)
	w.db.SetMaxIdleConns(callers + 2)
	for round := range rounds {
		correlation := fmt.Sprint("order-", round)
		kill := func() {}
		if round%4 == 0 {
			kill = w.startAndHold(correlation)
		}
		ids, started := make([]string, callers), make([]bool, callers)
		begin := make(chan struct{})
		var wg sync.WaitGroup
		for i := range callers {
			wg.Go(func() {
				<-begin
				err := sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
					ids[i], started[i], err = Start(ctx, tx, w.def, correlation, trip{Name: fmt.Sprint(i % 2)})
					return err
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		close(begin)
		kill()
		wg.Wait()
		var starters []int
		for i := range callers {
			if ids[i] != ids[0] || ids[i] == "" {
				t.Errorf("caller %d got %q, caller 0 %q", i, ids[i], ids[0])
			}
			if started[i] {
				starters = append(starters, i)
			}
		}
		starter := one(t, "starters", starters)
		equal(t, "payload", string(w.get(ids[0]).Payload), fmt.Sprintf(`{"Name":"%d","Keys":null}`, starter%2))
	}
	equal(t, "instances", w.number(`SELECT COUNT(*) FROM saga_instances`), rounds)
	equal(t, "commands", len(w.commands()), rounds)
	equal(t, "parked", w.number(`SELECT COUNT(*) FROM outbox_events WHERE status <> 'PENDING'`), 0)
}

// startAndHold starts a saga without committing it. kill kills the connection when somebody waits for it.
func (w *world) startAndHold(correlation string) (kill func()) {
	w.t.Helper()
	conn, err := w.db.Conn(w.t.Context())
	w.must(err)
	var id int
	w.must(conn.QueryRowContext(w.t.Context(), `SELECT CONNECTION_ID()`).Scan(&id))
	tx, err := conn.BeginTx(w.t.Context(), nil)
	w.must(err)
	_, started, err := Start(w.t.Context(), sqltx.Join(tx), w.def, correlation, trip{Name: "killed"})
	if err != nil || !started {
		w.t.Fatalf("started: %t, %v", started, err)
	}
	return func() {
		w.must(w.waitsForLock(w.t.Context(), `%INSERT INTO saga_instances%`))
		w.exec(fmt.Sprintf(`KILL %d`, id))
		if err := tx.Commit(); err == nil {
			w.t.Error("the starter that was killed has committed")
		}
		_ = conn.Close()
	}
}

// Start is part of the caller's transaction.
func TestStartRollsBackWithItsCaller(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a"))
	no := errors.New("no")
	err := sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		if _, _, err := Start(ctx, tx, w.def, "x", trip{}); err != nil {
			return err
		}
		return no
	})
	if !errors.Is(err, no) {
		t.Fatal(err)
	}
	equal(t, "instances", w.number(`SELECT COUNT(*) FROM saga_instances`), 0)
	equal(t, "commands", len(w.commands()), 0)
}

// A caller's own transaction may be REPEATABLE READ, with a snapshot from before the other
// start.
func TestStartInAnOldSnapshot(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a"))
	tx, err := w.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback() //nolint:errcheck // the test is over
	if err := tx.QueryRowContext(t.Context(), `SELECT COUNT(*) FROM saga_instances`).Scan(new(int)); err != nil {
		t.Fatal(err)
	}
	want := w.start("x")
	id, started, err := Start(t.Context(), sqltx.Join(tx), w.def, "x", trip{})
	if err != nil || started || id != want {
		t.Errorf("Start = %q, %t, %v, want %q, false", id, started, err, want)
	}
}

func TestStartRefuses(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a"))
	for name, tt := range map[string]struct {
		correlation string
		input       any
		fault       string
	}{
		"no correlation id":       {"", trip{}, "correlation id"},
		"correlation id too long": {strings.Repeat("x", 256), trip{}, "correlation id"},
		"input JSON cannot say":   {"x", make(chan int), "input"},
		"input of another type":   {"x", map[string]any{"Name": 1}, "input"},
	} {
		err := sqltx.Once(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
			_, _, err := Start(ctx, tx, w.def, tt.correlation, tt.input)
			return err
		})
		if err == nil || !strings.Contains(err.Error(), tt.fault) || !strings.Contains(err.Error(), "trip") {
			t.Errorf("%s: error %v, want one about the %s", name, err, tt.fault)
		}
	}
	equal(t, "instances", w.number(`SELECT COUNT(*) FROM saga_instances`), 0)
}
