package saga

import (
	"context"
	"errors"
	"testing"

	"github.com/go-sql-driver/mysql"

	"backstep/internal/sqltx"
)

// B99, B97: a step that is the victim of a real deadlock, or waits for a lock for longer than the server
// lets it, is run again in place, with its neighbours in the batch. No attempt is charged, nothing is
// compensated, and what it had written is there once.
func TestRealConflicts(t *testing.T) {
	for name, number := range map[string]uint16{"deadlock": 1213, "lock wait": 1205} {
		t.Run(name, func(t *testing.T) {
			bothForms(t, func(t *testing.T, s *script) { testRealConflict(t, s, number) })
		})
	}
}

func testRealConflict(t *testing.T, s *script, number uint16) {
	t.Parallel()
	w := newWorld(t, s.define("a", "b"))
	w.exec(`CREATE TABLE stock (sku INT PRIMARY KEY, n INT NOT NULL)`)
	w.exec(`INSERT INTO stock VALUES (1, 0), (2, 0)`)
	const take = `UPDATE stock SET n = n + 1 WHERE sku = ?`
	// Somebody else has row 2, and has changed so much that the step is the cheaper victim.
	other, err := w.db.BeginTx(t.Context(), nil)
	w.must(err)
	hold := func(query string, args ...any) error {
		_, err := other.ExecContext(t.Context(), query, args...)
		return err
	}
	w.must(hold(take, 2))
	for i := range 100 {
		w.must(hold(`INSERT INTO stock VALUES (?, 0)`, 100+i))
	}
	gone := make(chan error, 1)
	var met error
	ran := false
	s.on("b", func(ctx context.Context, tx *sqltx.Tx) error {
		first := !ran
		ran = true
		if _, err := tx.Exec(ctx, take, 1); err != nil {
			return err
		}
		if first && number == 1213 {
			go func() { gone <- errors.Join(hold(take, 1), other.Commit()) }()
		} else if first {
			if _, err := tx.Exec(ctx, `SET SESSION innodb_lock_wait_timeout = 1`); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, take, 2)
		if first {
			met = err
			if number == 1205 {
				gone <- other.Commit()
			}
			w.must(<-gone)
		}
		return err
	})
	ids := []string{w.start("x"), w.start("y")}
	w.done(w.commands()...)
	w.must(w.lane(w.commands()...))
	if e, ok := errors.AsType[*mysql.MySQLError](met); !ok || e.Number != number {
		t.Errorf("the step met %v, want %d", met, number)
	}
	equal(t, "calls", s.called(), []string{"a", "a", "b", "b", "b", "completed", "completed"})
	for _, id := range ids {
		d := w.get(id)
		equal(t, "status, attempt", []any{d.Status, d.Attempt}, []any{Completed, 1})
		equal(t, "steps", d.steps(), []string{"a COMPLETED", "b COMPLETED"})
	}
	equal(t, "attempts charged", w.number(`SELECT COUNT(*) FROM saga_steps WHERE attempts <> 1`), 0)
	equal(t, "scheduled", w.number(`SELECT COUNT(*) FROM scheduled_messages`), 0)
	equal(t, "effects", w.effects(), []string{"a", "a", "b", "b", "completed", "completed"})
	others := map[uint16]int{1213: 1, 1205: 0}[number]
	equal(t, "row 1, taken by both and somebody", w.number(`SELECT n FROM stock WHERE sku = 1`), 2+others)
	equal(t, "row 2, likewise", w.number(`SELECT n FROM stock WHERE sku = 2`), 3)
}
