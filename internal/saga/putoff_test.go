package saga

import (
	"context"
	"testing"
	"time"

	"backstep/internal/sqltx"
)

// dueNow returns what a look at deadlines finds.
func (w *world) dueNow(k *Keeper) (page []*dueSaga, p pulse) {
	w.t.Helper()
	p = w.pulse()
	page, _, err := k.nextDue(w.t.Context(), selectAtDeadlineSQL, &k.due, p)
	w.must(err)
	return page, p
}

func (w *world) putOff(page []*dueSaga, p pulse) {
	w.t.Helper()
	w.must(sqltx.WithTx(w.t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		_, err := putOff(ctx, tx, page, p)
		return err
	}))
}

// What a saga awaits may have become something else between the look and the time it is given: that has
// its own deadline. So has what is awaited anew.
func TestPutOffLooksAgain(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, timed(&s))
	for name, meanwhile := range map[string]string{
		"it awaits another command": `UPDATE saga_instances SET command_id = 'other'`,
		"it awaits it anew":         `UPDATE saga_instances SET awaited_since = NOW(6), deadline_at = NOW(6) + INTERVAL 1 MINUTE`,
	} {
		t.Run(name, func(t *testing.T) {
			for _, table := range []string{"saga_instances", "saga_steps", "outbox_events"} {
				w.exec(`DELETE FROM ` + table)
			}
			w.upFor(24 * time.Hour)
			id := w.start("x")
			w.done(w.command())
			w.commands()
			w.belated(id)
			w.exec(`UPDATE outbox_events SET published_at = NOW(6) - INTERVAL 30 SECOND`)
			page, p := w.dueNow(w.keeper(KeeperConfig{}))
			one(t, "sagas at their deadline", page)
			w.exec(meanwhile)
			before := w.get(id)
			w.putOff(page, p)
			equal(t, "the saga", w.get(id), before)
		})
	}
}

// A step whose command is late gets no time that its saga does not have.
func TestPutOffUntilTheSagasDeadline(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, timed(&s))
	w.upFor(24 * time.Hour)
	id := w.start("x")
	w.done(w.command())
	w.commands()
	w.belated(id)
	w.exec(`UPDATE outbox_events SET status = 'PENDING' WHERE status = 'PUBLISHED'`)
	w.exec(`UPDATE saga_instances SET saga_deadline_at = NOW(6) + INTERVAL 20 SECOND`)
	w.scan(w.keeper(KeeperConfig{}))
	d := w.get(id)
	equal(t, "status", d.Status, Running)
	equal(t, "deadline", d.DeadlineAt, d.SagaDeadline)
}
