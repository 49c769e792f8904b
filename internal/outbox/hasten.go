package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"backstep/internal/sqltx"
)

// Both are served by ix_scheduled_message. A relay that promotes the row has it locked: they wait,
// and then it is gone.
const (
	hastenSQL = `
UPDATE scheduled_messages
   SET due_at = NOW(6)
 WHERE message_id = ?
   AND due_at > NOW(6)`

	unscheduleSQL = `DELETE FROM scheduled_messages WHERE message_id = ?`
)

// Served by the indexes on message_id. The newest row of the outbox is the one that counts.
const whereNowSQL = `
SELECT status FROM (
    (SELECT 'SCHEDULED' AS status FROM scheduled_messages WHERE message_id = ? LIMIT 1)
    UNION ALL
    (SELECT status FROM outbox_events WHERE message_id = ? ORDER BY id DESC LIMIT 1)
) AS places
LIMIT 1`

// Hasten makes a scheduled message due at once, and reports whether it waited for its time. If it
// did not, status is where it is: PENDING, PUBLISHED, PARKED, SCHEDULED if it is due, or "" if it is
// in no table.
func Hasten(ctx context.Context, tx *sqltx.Tx, messageID string) (hastened bool, status string, err error) {
	res, err := tx.Exec(ctx, hastenSQL, []byte(messageID))
	if err != nil {
		return false, "", fmt.Errorf("hasten message %q: %w", messageID, err)
	}
	if n, err := res.RowsAffected(); err != nil || n > 0 {
		return n > 0, "", err
	}
	err = tx.QueryRow(ctx, whereNowSQL, []any{[]byte(messageID), []byte(messageID)}, &status)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return false, "", fmt.Errorf("find message %q: %w", messageID, err)
	}
	return false, status, nil
}

// Unschedule deletes a message that waits for its time and that nobody waits for any more. One that
// has been promoted is published, and is its receiver's to drop.
func Unschedule(ctx context.Context, tx *sqltx.Tx, messageID string) error {
	if _, err := tx.Exec(ctx, unscheduleSQL, []byte(messageID)); err != nil {
		return fmt.Errorf("unschedule message %q: %w", messageID, err)
	}
	return nil
}
