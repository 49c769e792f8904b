package saga

import (
	"testing"
	"time"
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
	for _, table := range []string{"saga_steps", "saga_actions"} {
		equal(t, table+" without a saga", w.number(`SELECT COUNT(*) FROM `+table+` WHERE saga_id NOT IN (SELECT id FROM saga_instances)`), 0)
	}
}
