package outbox

import (
	"context"
	"database/sql"
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
func (r *Relay) runSchedule(ctx context.Context) {
	var trouble trouble
	for ctx.Err() == nil {
		wait := r.cfg.PollMax
		if r.Leads() {
			due, err := r.untilDue(ctx)
			if err == nil && due <= 0 {
				err = r.promote(ctx)
				due = r.cfg.PollMin
			}
			if ctx.Err() != nil {
				return
			}
			trouble.report(r.cfg.Log, "scheduled messages not promoted; trying again", err)
			if err == nil {
				wait = max(due, r.cfg.PollMin)
			}
		}
		pause(ctx, min(wait, r.cfg.PollMax)) // another may be added meanwhile
	}
}

// untilDue returns how long no message is due, PollMax if there is none.
func (r *Relay) untilDue(ctx context.Context) (time.Duration, error) {
	var us sql.NullInt64
	if err := r.db.QueryRowContext(ctx, nextDueSQL).Scan(&us); err != nil {
		return 0, fmt.Errorf("look for due messages: %w", err)
	}
	if !us.Valid {
		return r.cfg.PollMax, nil
	}
	return time.Duration(us.Int64) * time.Microsecond, nil
}

// promote moves one batch of due messages.
func (r *Relay) promote(ctx context.Context) error {
	err := sqltx.WithTx(ctx, r.db, func(ctx context.Context, tx *sqltx.Tx) error {
		ids, err := dueIDs(ctx, tx)
		if err != nil || len(ids) == 0 {
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
		return fmt.Errorf("promote scheduled messages: %w", err)
	}
	r.Wake(AllShards)
	return nil
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
