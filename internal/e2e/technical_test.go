package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// mishap is the input of a saga whose second step meets it a few times, and then succeeds.
type mishap struct{ Kind string }

// mishaps are what a step can meet that says nothing about the business.
var mishaps = map[string]func(ctx context.Context, tx *sqltx.Tx) error{
	"deadlock": func(ctx context.Context, tx *sqltx.Tx) error {
		_, err := tx.Exec(ctx, `SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'Deadlock found'`)
		return err
	},
	"lock wait": func(ctx context.Context, tx *sqltx.Tx) error {
		_, err := tx.Exec(ctx, `SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1205, MESSAGE_TEXT = 'Lock wait timeout exceeded'`)
		return err
	},
	"lost connection": func(ctx context.Context, tx *sqltx.Tx) error {
		_, err := tx.Exec(ctx, `KILL CONNECTION_ID()`)
		return err
	},
	"panic":        func(context.Context, *sqltx.Tx) error { panic("boom") },
	"time-out":     func(ctx context.Context, _ *sqltx.Tx) error { <-ctx.Done(); return ctx.Err() },
	"any error":    func(context.Context, *sqltx.Tx) error { return errors.New("no idea") },
	"late success": func(context.Context, *sqltx.Tx) error { return errors.New("five times") },
	"refusal":      func(context.Context, *sqltx.Tx) error { return saga.Fail("card declined") },
}

// B99, B98: each technical error, three times or five, and then success: nothing is compensated, each
// attempt can lock its saga at once. A refusal is one try, and what came before it is undone.
func TestTechnicalErrorsCompensateNothing(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex // guards met
	met := map[string]int{}
	write := func(ctx context.Context, tx *sqltx.Tx, in mishap, what string) error {
		_, err := tx.Exec(ctx, `INSERT INTO effects VALUES (?, ?)`, in.Kind, what)
		return err
	}
	def := saga.Define("mishaps", 1,
		saga.Step("first", handlers.InventoryQueue,
			func(ctx context.Context, tx *sqltx.Tx, in mishap) (int, error) { return 1, write(ctx, tx, in, "first") },
			func(ctx context.Context, tx *sqltx.Tx, in mishap, _ int) error { return write(ctx, tx, in, "undone") }),
		saga.Step("second", handlers.PaymentQueue, func(ctx context.Context, tx *sqltx.Tx, in mishap) (int, error) {
			if err := write(ctx, tx, in, "second"); err != nil {
				return 0, err
			}
			mu.Lock()
			met[in.Kind]++
			n := met[in.Kind]
			mu.Unlock()
			times := 3
			if in.Kind == "late success" {
				times = 5
			}
			if n <= times {
				return 0, mishaps[in.Kind](ctx, tx)
			}
			return 2, nil
		}, nil, saga.Retry(6, 10*time.Millisecond), saga.Timeout(500*time.Millisecond)),
	)
	w := newWheel(t)
	w.exec(`CREATE TABLE effects (kind VARCHAR(32) NOT NULL, what VARCHAR(32) NOT NULL)`)
	w.start("relay")
	w.ownWorker(def, saga.KeeperConfig{}, 1, handlers.InventoryQueue, handlers.PaymentQueue)
	for kind := range mishaps {
		w.begin(def, kind, mishap{kind})
	}
	w.eventually(60*time.Second, "all sagas have ended", func() error {
		if n := w.count(`SELECT COUNT(*) FROM saga_instances WHERE status NOT IN ('COMPLETED', 'COMPENSATED')`); n > 0 {
			return fmt.Errorf("%d have not", n)
		}
		return nil
	})
	for kind := range mishaps {
		status, effects, tries := "COMPLETED", "first, second", 4
		switch kind {
		case "refusal":
			status, effects, tries = "COMPENSATED", "first, undone", 1
		case "late success":
			tries = 6
		}
		list, _, err := saga.List(t.Context(), w.db, saga.Filter{Type: "mishaps", Limit: 100})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list {
			if s.CorrelationID == kind && string(s.Status) != status {
				t.Errorf("%s: the saga is %s: %s; want %s", kind, s.Status, s.LastError, status)
			}
		}
		if got := w.text(`SELECT GROUP_CONCAT(what ORDER BY what SEPARATOR ', ') FROM effects WHERE kind = ?`, kind); got != effects {
			t.Errorf("%s: effects %s, want %s", kind, got, effects)
		}
		mu.Lock()
		if met[kind] != tries {
			t.Errorf("%s: the step ran %d times, want %d", kind, met[kind], tries)
		}
		mu.Unlock()
	}
	w.nothingParked()
}

func (w *wheel) text(query string, args ...any) string {
	w.t.Helper()
	var s string
	if err := w.db.QueryRowContext(w.t.Context(), query, args...).Scan(&s); err != nil {
		w.t.Fatalf("%s: %v", query, err)
	}
	return strings.TrimSpace(s)
}
