package sagatest

import (
	"context"
	"database/sql"
	"time"

	"backstep/internal/sqltx"
)

const (
	nextDueSQL = `SELECT MIN(TIMESTAMPDIFF(MICROSECOND, NOW(6), due_at)) FROM scheduled_messages`

	nextDeadlineSQL = `
SELECT MIN(TIMESTAMPDIFF(MICROSECOND, NOW(6), deadline_at)) + COALESCE((SELECT downtime_us FROM saga_pulse WHERE id = 1), 0)
  FROM saga_instances
 WHERE status IN ('RUNNING', 'COMPENSATING')`

	// What was to come later comes sooner, and the clock of deadlines, which an outage sets back,
	// is set forward.
	hastenSQL = `UPDATE scheduled_messages SET due_at = due_at - INTERVAL ? MICROSECOND`

	setForwardSQL = `
INSERT INTO saga_pulse (id, beat_at, up_since, downtime_us)
VALUES (1, NOW(6), NOW(6), ?)
    ON DUPLICATE KEY UPDATE downtime_us = downtime_us + VALUES(downtime_us)`

	overdueSQL = `
SELECT id
  FROM saga_instances
 WHERE deadline_at <= NOW(6) - INTERVAL COALESCE((SELECT downtime_us FROM saga_pulse WHERE id = 1), 0) MICROSECOND
   AND status IN ('RUNNING', 'COMPENSATING')`
)

// Run delivers messages until there are none, and lets the time pass that retries wait for. It does
// not wait for replies: a saga whose step nobody answers stays where it is.
func (w *World) Run() {
	w.t.Helper()
	for range maxMoves {
		w.drain()
		wait, ok := w.until(nextDueSQL)
		if !ok {
			return
		}
		w.Advance(max(wait, 0))
	}
	w.t.Fatalf("sagatest: no end after %d moves; a step past the pivot that always fails?", maxMoves)
}

// maxMoves is more than what a saga needs.
const maxMoves = 1000

// Advance lets time pass. What is due meanwhile is delivered, and deadlines that pass are seen, in
// their order.
func (w *World) Advance(d time.Duration) {
	w.t.Helper()
	w.drain()
	for range maxMoves {
		wait, ok := w.nextMoment()
		if !ok || wait > d {
			break
		}
		d -= max(wait, 0)
		w.pass(wait)
		w.drain()
	}
	w.pass(d)
	w.drain()
}

// drain delivers what can be delivered now.
func (w *World) drain() {
	w.t.Helper()
	for range maxMoves {
		w.collect()
		if len(w.pending) == 0 {
			return
		}
		m := w.pending[0]
		w.pending = w.pending[1:]
		w.deliver(m)
	}
	w.t.Fatalf("sagatest: no end after %d messages", maxMoves)
}

// nextMoment returns how long it is until something happens by itself.
func (w *World) nextMoment() (wait time.Duration, ok bool) {
	w.t.Helper()
	wait, ok = w.until(nextDueSQL)
	deadline, has := w.until(nextDeadlineSQL)
	if has && (!ok || deadline < wait) {
		wait, ok = deadline, true
	}
	return wait, ok
}

func (w *World) until(query string) (time.Duration, bool) {
	w.t.Helper()
	var us sql.NullInt64
	if err := w.db.QueryRowContext(w.t.Context(), query).Scan(&us); err != nil {
		w.t.Fatalf("sagatest: read the clock: %v", err)
	}
	return time.Duration(us.Int64) * time.Microsecond, us.Valid
}

// pass sets the clock forward, has the engine see to deadlines, and publishes what is due. It
// returns how many deadlines have passed.
func (w *World) pass(d time.Duration) int {
	w.t.Helper()
	if us := d.Microseconds(); us > 0 {
		w.Exec(hastenSQL, us)
		w.Exec(setForwardSQL, -us)
	}
	var ids []string
	rows, err := w.db.QueryContext(w.t.Context(), overdueSQL)
	if err != nil {
		w.t.Fatalf("sagatest: look for deadlines: %v", err)
	}
	defer rows.Close()
	for rows.Next() {
		var id []byte
		if err := rows.Scan(&id); err != nil {
			w.t.Fatalf("sagatest: look for deadlines: %v", err)
		}
		ids = append(ids, string(id))
	}
	if err := rows.Err(); err != nil {
		w.t.Fatalf("sagatest: look for deadlines: %v", err)
	}
	if len(ids) > 0 {
		w.tx("see to deadlines", func(ctx context.Context, tx *sqltx.Tx) error { return w.engine.Expire(ctx, tx, ids) })
	}
	w.release()
	return len(ids)
}
