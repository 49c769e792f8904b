package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"

	"backstep/internal/sqltx"
)

// promoteBatch is how many due messages one transaction moves.
const promoteBatch = 500

// A message may be added that is due before all others, and soon. It is late by one poll at most,
// which, with what publishing takes, has to stay below 100 ms. Our writers ring for it; one in
// another language does not, and a ring may be lost. What an idle relay costs grows with how often
// it wakes up, so it polls less often where nothing has waited here for a while.
const (
	ringPause     = 20 * time.Millisecond // after a ring; under load there are a thousand a second
	schedulePoll  = 80 * time.Millisecond
	scheduleRest  = 250 * time.Millisecond
	scheduleQuiet = 10 * time.Second // is a while
)

// One relay promotes, the leader. Another, which was paused and still believes that it leads,
// waits for the rows that the first has locked, and then finds that they are gone: no message is
// promoted twice.
const (
	// Served by ix_scheduled_due (due_at, id). It locks nothing: it would wait for what others
	// are scheduling, for as long as their transactions are open.
	selectDueSQL = `
SELECT id
  FROM scheduled_messages FORCE INDEX (ix_scheduled_due)
 WHERE due_at <= NOW(6)
 ORDER BY due_at, id
 LIMIT ?`

	// Each id finds its row by the primary key. With IN, a server whose table is small scans it,
	// and waits for those rows all the same.
	lockDueSQL = `
SELECT s.id
  FROM (%s) AS due
       STRAIGHT_JOIN scheduled_messages AS s FORCE INDEX (PRIMARY) ON s.id = due.id
   FOR UPDATE`

	promoteSQL = `
INSERT INTO outbox_events
       (message_id, ordering_key, aggregate_type, aggregate_id, event_type,
        exchange, routing_key, mandatory, properties, headers, payload, idempotency_key)
SELECT message_id, ordering_key, aggregate_type, aggregate_id, event_type,
       exchange, routing_key, mandatory, properties, headers, payload, idempotency_key
  FROM scheduled_messages
 WHERE id IN (%s)
 ORDER BY due_at, id`

	deleteDueSQL = `
DELETE s
  FROM (%s) AS due
       STRAIGHT_JOIN scheduled_messages AS s FORCE INDEX (PRIMARY) ON s.id = due.id`

	// How long until the next one is due, in microseconds.
	nextDueSQL = `
SELECT TIMESTAMPDIFF(MICROSECOND, NOW(6), MIN(due_at))
  FROM scheduled_messages`
)

// runSchedule moves due messages to the outbox while this relay leads.
func (r *Relay) runSchedule(ctx context.Context) {
	var trouble trouble
	var last time.Time // that any waited
	for ctx.Err() == nil {
		wait := r.cfg.idle.next()
		if r.Leads() {
			due, some, err := r.untilDue(ctx)
			if err == nil && some && due <= 0 {
				err = r.promote(ctx)
			}
			if ctx.Err() != nil {
				return
			}
			trouble.report(r.cfg.Log, "scheduled messages not promoted; trying again", err)
			if err == nil {
				wait = r.scheduleWait(&last, due, some)
			}
		}
		r.awaitRing(ctx, wait)
	}
}

// scheduleWait returns how long to wait until the next look.
func (r *Relay) scheduleWait(last *time.Time, due time.Duration, some bool) time.Duration {
	wait := min(r.cfg.scheduleRest, r.cfg.idle.next())
	if some {
		*last = time.Now()
		wait = max(due, r.cfg.PollMin)
	}
	if time.Since(*last) < scheduleQuiet {
		wait = min(wait, r.cfg.schedulePoll)
	}
	return wait
}

// awaitRing waits for d, or until shortly after a ring.
func (r *Relay) awaitRing(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	case <-r.rung:
		pause(ctx, min(d, ringPause))
	}
}

// untilDue returns how long no message is due, and whether any is scheduled.
func (r *Relay) untilDue(ctx context.Context) (due time.Duration, some bool, err error) {
	var us sql.NullInt64
	if err := r.db.QueryRowContext(ctx, nextDueSQL).Scan(&us); err != nil {
		return 0, false, fmt.Errorf("look for due messages: %w", err)
	}
	return time.Duration(us.Int64) * time.Microsecond, us.Valid, nil
}

// promote moves one batch of due messages.
func (r *Relay) promote(ctx context.Context) error {
	err := sqltx.WithTx(ctx, r.db, func(ctx context.Context, tx *sqltx.Tx) error {
		due, err := selectIDs(ctx, tx, selectDueSQL, promoteBatch)
		if err != nil || len(due) == 0 {
			return err
		}
		locked, err := selectIDs(ctx, tx, fmt.Sprintf(lockDueSQL, idList(len(due))), anys(due)...)
		if err != nil || len(locked) == 0 {
			return err
		}
		ids := anys(locked)
		insert := fmt.Sprintf(promoteSQL, sqltx.Placeholders(len(ids))) + onDuplicateSelectSQL
		if _, err := tx.Exec(ctx, insert, ids...); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, fmt.Sprintf(deleteDueSQL, idList(len(ids))), ids...)
		return err
	})
	if err != nil {
		return fmt.Errorf("promote scheduled messages: %w", err)
	}
	r.wakePump(AllShards)
	r.cfg.Promoted()
	return nil
}

// onDuplicateSelectSQL is onDuplicateSQL for INSERT … SELECT.
const onDuplicateSelectSQL = ` ON DUPLICATE KEY UPDATE outbox_events.idempotency_key = outbox_events.idempotency_key`

// idList is n ids as a table.
func idList(n int) string { return "SELECT ? AS id" + strings.Repeat(" UNION ALL SELECT ?", n-1) }

func selectIDs(ctx context.Context, tx *sqltx.Tx, query string, args ...any) (ids []uint64, err error) {
	rows, err := tx.Query(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var id uint64
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}
