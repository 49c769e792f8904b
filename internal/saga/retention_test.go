package saga

import (
	"context"
	"testing"
	"time"

	"backstep/internal/sqltx"
)

// Sweep deletes sagas that ended longer ago than the retention, with all that belongs to them.
// What has not ended stays, however old it is.
func TestSweep(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a", "b"))
	s.fail("b", nil, Fail("no"), Fail("no"))
	s.fail("undo a", nil, Fail("never"))
	for _, name := range []string{"completed", "compensated", "manual action"} {
		w.start(name)
		w.run()
	}
	w.start("running")
	young := w.start("young")
	w.run()
	w.exec(`UPDATE saga_instances SET updated_at = NOW(6) - INTERVAL 31 DAY WHERE id <> ?`, []byte(young))
	w.exec(`UPDATE saga_instances SET status = 'RUNNING', finished_at = NULL WHERE correlation_id = 'running'`)
	w.exec(`INSERT INTO saga_actions (saga_id, action, actor, reason) SELECT id, 'retry', 'me', 'test' FROM saga_instances`)
	w.exec(`INSERT INTO saga_calls (saga_id, step_order, direction, calls) SELECT id, 0, 'execute', 1 FROM saga_instances`)
	for _, want := range []struct{ swept, left int }{{1, 4}, {1, 3}, {0, 3}} {
		n, err := Sweep(t.Context(), w.db, 30*24*time.Hour, 1)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "swept", int(n), want.swept)
		equal(t, "sagas left", w.number(`SELECT COUNT(*) FROM saga_instances`), want.left)
	}
	equal(t, "sagas left that matter", w.number(`
SELECT COUNT(*) FROM saga_instances WHERE correlation_id IN ('manual action', 'running', 'young')`), 3)
	for _, table := range []string{"saga_steps", "saga_actions", "saga_calls"} {
		equal(t, table+" without a saga", w.number(`SELECT COUNT(*) FROM `+table+` WHERE saga_id NOT IN (SELECT id FROM saga_instances)`), 0)
	}
}

// What an operator has reversed between the look and the lock stays, with its steps.
func TestSweepLooksAgain(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := &operator{newWorld(t, s.define("a")), s}
	id := o.start("x")
	o.run()
	o.exec(`UPDATE saga_instances SET updated_at = NOW(6) - INTERVAL 31 DAY`)
	swept := make(chan int64, 1)
	o.must(sqltx.Once(t.Context(), o.db, func(ctx context.Context, tx *sqltx.Tx) error {
		b := &batch{Engine: o.engine, tx: tx}
		if _, err := b.operate(ctx, id, Operation{Verb: VerbCompensate, By: ops}); err != nil {
			return err
		}
		if err := b.write(ctx); err != nil {
			return err
		}
		go func() {
			n, err := Sweep(t.Context(), o.db, 30*24*time.Hour, 10)
			if err != nil {
				t.Error(err)
			}
			swept <- n
		}()
		return o.waitsForLock(ctx, locking)
	}))
	equal(t, "swept", int(<-swept), 0)
	o.run()
	d := o.get(id)
	equal(t, "status, steps", []any{d.Status, d.steps()}, []any{Compensated, []string{"a COMPENSATED"}})
}

// What a sweep has locked no worker waits for, nor does it wait for a saga that another
// transaction has locked, however many go at once.
func TestSweepHoldsUpNoSaga(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a", "b"))
	old := w.start("old")
	w.run()
	w.exec(`
INSERT INTO saga_instances (id, type, version, correlation_id, status, payload, updated_at, finished_at)
WITH d AS (SELECT 0 n UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4
           UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9)
SELECT CONCAT(age.name, x.n, y.n, z.n), i.type, i.version, CONCAT(age.name, x.n, y.n, z.n), age.status, i.payload,
       NOW(6) - INTERVAL age.days DAY, NOW(6) - INTERVAL age.days DAY
  FROM saga_instances i, (SELECT 's' AS name, 'COMPLETED' AS status, 31 AS days UNION ALL SELECT 'young', 'RUNNING', 29) age, d x, d y, d z
 WHERE i.id = ?`, []byte(old))
	w.exec(`DELETE FROM saga_instances WHERE id = ?`, []byte(old))
	w.exec(`DELETE FROM saga_steps`)
	w.exec(`INSERT INTO saga_steps (saga_id, step_order, name, status) SELECT id, 0, 'a', 'COMPLETED' FROM saga_instances`)
	w.exec(`INSERT INTO saga_actions (saga_id, action, actor, reason) SELECT id, 'retry', 'me', 'test' FROM saga_instances`)

	w.exec(`ANALYZE TABLE saga_instances, saga_steps, saga_actions`) // by what it believes the server chooses its indexes
	busy := w.start("busy")
	holds, err := w.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer holds.Rollback() //nolint:errcheck // it is open to the end of the test
	for _, query := range []string{
		// It comes right after those that have ended, by status and time.
		`UPDATE saga_instances SET attempt = attempt + 1, updated_at = NOW(6) - INTERVAL 40 DAY WHERE id = ?`,
		`INSERT INTO saga_steps (saga_id, step_order, name, status) VALUES (?, 1, 'b', 'RUNNING')`,
		`INSERT INTO saga_actions (saga_id, action, actor, reason) VALUES (?, 'retry', 'me', 'test')`,
	} {
		if _, err := holds.ExecContext(t.Context(), query, []byte(busy)); err != nil {
			t.Fatal(err)
		}
	}
	err = sqltx.Once(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		n, err := sweepTx(ctx, tx, Completed, 30*24*time.Hour, 2000)
		equal(t, "swept", int(n), 1000)
		if err != nil {
			return err
		}
		for _, name := range []string{"one", "two"} {
			w.start(name)
		}
		w.done(w.commands()[1:]...) // all but the busy one's
		w.run()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "sagas left", w.number(`SELECT COUNT(*) FROM saga_instances`), 1003)
	equal(t, "steps of sagas that went", w.number(`SELECT COUNT(*) FROM saga_steps WHERE saga_id LIKE 's%'`), 0)
}
