package saga

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"backstep/internal/sqltx"
)

// One statement for all instances of a batch. STRAIGHT_JOIN: the values come first, each
// finds its row by primary key, already locked.
const (
	updateInstancesSQL = `
UPDATE (%s) v
       STRAIGHT_JOIN saga_instances i ON i.id = v.id
   SET i.status = v.status, i.direction = v.direction, i.current_step = v.current_step,
       i.attempt = v.attempt, i.command_id = v.command_id, i.last_error = v.last_error, i.rescues = 0,
       i.awaited_since = IF(v.command_id IS NULL, NULL, NOW(6)),
       i.finished_at = IF(v.status IN ('COMPLETED', 'COMPENSATED'), NOW(6), NULL),
       i.updated_at = NOW(6)`

	firstValuesSQL = `SELECT ? AS id, ? AS status, ? AS direction, ? AS current_step, ? AS attempt, ? AS command_id, ? AS last_error`
	moreValuesSQL  = ` UNION ALL SELECT ?, ?, ?, ?, ?, ?, ?`

	// Few instances have one of these, or are written though they await what they awaited before: only
	// what is new has never been lost. A single-table UPDATE assigns from left to right (MySQL
	// manual, UPDATE), so deadline_at is made of the new saga_deadline_at.
	updateWideSQL = `
UPDATE saga_instances
   SET skipped = ?, cancel_reason = ?, undo_reason = ?, call_open = ?, rescues = ?,
       saga_deadline_at = IF(?, NULL, saga_deadline_at),
       deadline_at = CASE ?
           WHEN 'keep' THEN deadline_at
           WHEN 'none' THEN NULL
           ELSE COALESCE(LEAST(NOW(6) + INTERVAL ? MICROSECOND, saga_deadline_at), NOW(6) + INTERVAL ? MICROSECOND, saga_deadline_at)
       END,
       again_at = CASE ? WHEN 'keep' THEN again_at WHEN 'none' THEN NULL ELSE NOW(6) + INTERVAL ? MICROSECOND END
 WHERE id = ?`
)

func updateInstances(ctx context.Context, tx *sqltx.Tx, instances []*instance) error {
	if len(instances) == 0 {
		return nil
	}
	args := make([]any, 0, 7*len(instances))
	for _, in := range instances {
		args = append(args, []byte(in.id), string(in.status), string(in.direction), in.current, in.attempt,
			nullable(in.commandID), nullText(in.lastError))
	}
	values := firstValuesSQL + strings.Repeat(moreValuesSQL, len(instances)-1)
	if _, err := tx.Exec(ctx, fmt.Sprintf(updateInstancesSQL, values), args...); err != nil {
		return fmt.Errorf("update %d sagas: %w", len(instances), err)
	}
	for _, in := range instances {
		if in.wide {
			if err := in.updateWide(ctx, tx); err != nil {
				return err
			}
		}
	}
	return nil
}

// updateWide writes what only few instances have.
func (in *instance) updateWide(ctx context.Context, tx *sqltx.Tx) error {
	mode, after, again := cmp.Or(in.deadline.mode, keepDeadline), any(nil), any(nil)
	switch {
	case in.commandID == "" || in.status == ManualAction:
		mode = noDeadline // it starts anew when it goes on
	case mode == setDeadline && in.deadline.after > 0:
		down, err := downtime(ctx, tx)
		if err != nil {
			return err
		}
		after, again = (in.deadline.after - down).Microseconds(), deadlineIn(in.deadline.again, down)
	}
	againMode := mode
	if in.unlimited && mode == setDeadline && in.commandID == in.waits {
		againMode = keepDeadline // it is the same command
	}
	committed := in.status != Running && in.status != ManualAction || in.pastPivot() || in.unlimited
	if _, err := tx.Exec(ctx, updateWideSQL, in.skipped, nullText(in.cancelReason), nullText(in.undoReason), in.callOpen, in.rescues,
		committed, string(mode), after, after, string(againMode), again, []byte(in.id)); err != nil {
		return fmt.Errorf("update saga %s: %w", in.id, err)
	}
	return nil
}
