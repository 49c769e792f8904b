package outbox

import (
	"context"
	"fmt"
	"time"

	"backstep/internal/sqltx"
)

// promoteBatch is how many due messages one transaction moves.
const promoteBatch = 500

// Served by ix_scheduled_due (due_at, id). The locks make a second relay that believes it
// leads wait, and then find nothing: no message is promoted twice.
const (
	selectDueSQL = `
SELECT id
  FROM scheduled_messages
 WHERE due_at <= NOW(6)
 ORDER BY due_at, id
 LIMIT ?
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

	deleteDueSQL = `DELETE FROM scheduled_messages WHERE id IN (`

	// How long until the next one is due, in microseconds.
	nextDueSQL = `
SELECT TIMESTAMPDIFF(MICROSECOND, NOW(6), MIN(due_at))
  FROM scheduled_messages`
)

// runSchedule moves due messages to the outbox while this relay leads.
func (r *Relay) runSchedule(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		wait := r.cfg.PollMax
		if r.Leads() {
			n, err := r.promote(ctx)
			switch {
			case ctx.Err() != nil:
				return nil
			case err != nil:
				r.cfg.Log.Warn("scheduled messages not promoted", "error", err)
			case n > 0:
				r.Wake()
				wait = 0
			default:
				wait = r.untilDue(ctx)
			}
		}
		timer.Reset(max(wait, r.cfg.PollMin))
	}
}

// untilDue returns how long nothing is due, PollMax at most: another may be added meanwhile.
func (r *Relay) untilDue(ctx context.Context) time.Duration {
	var us *int64
	if err := r.db.QueryRowContext(ctx, nextDueSQL).Scan(&us); err != nil || us == nil {
		return r.cfg.PollMax // the next promote reports what is wrong
	}
	return min(r.cfg.PollMax, max(0, time.Duration(*us)*time.Microsecond))
}

// promote moves one batch of due messages and returns how many they were.
func (r *Relay) promote(ctx context.Context) (int, error) {
	var ids []any
	err := sqltx.WithTx(ctx, r.db, func(ctx context.Context, tx *sqltx.Tx) error {
		var err error
		if ids, err = dueIDs(ctx, tx); err != nil || len(ids) == 0 {
			return err
		}
		marks := sqltx.Placeholders(len(ids))
		if _, err := tx.Exec(ctx, fmt.Sprintf(promoteSQL, marks)+onDuplicateSelectSQL, ids...); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, deleteDueSQL+marks+")", ids...)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("promote scheduled messages: %w", err)
	}
	return len(ids), nil
}

// onDuplicateSelectSQL is onDuplicateSQL for INSERT … SELECT.
const onDuplicateSelectSQL = ` ON DUPLICATE KEY UPDATE outbox_events.idempotency_key = outbox_events.idempotency_key`

func dueIDs(ctx context.Context, tx *sqltx.Tx) ([]any, error) {
	rows, err := tx.Query(ctx, selectDueSQL, promoteBatch)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var ids []any
	for rows.Next() {
		var id uint64
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}
