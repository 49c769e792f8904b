package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// farFutureSQL is historySQL for messages that are due in a year.
const farFutureSQL = `
INSERT INTO scheduled_messages
       (due_at, message_id, ordering_key, aggregate_type, aggregate_id, event_type,
        exchange, routing_key, mandatory, properties, headers, payload)
SELECT NOW(6) + INTERVAL 365 DAY, CONCAT(?, '-', n), CONCAT('far-', n), '', '', 'far-future', ?, ?, TRUE, ?, ?, ?
  FROM ` + numbersSQL + `
 WHERE n < ?`

// AddFarFuture schedules n messages like m that are due in a year, and commits now and then. It
// is for benchmarks: what waits must not slow down what is due.
func AddFarFuture(ctx context.Context, db *sql.DB, m message.Message, n int, added func(int)) error {
	return addMany(ctx, db, farFutureSQL, m, n, added)
}

// Served by ix_scheduled_message.
const dueAtSQL = `SELECT due_at FROM scheduled_messages WHERE message_id = ?`

// DueAt returns when a message that was scheduled is due, by the database's clock.
func DueAt(ctx context.Context, tx *sqltx.Tx, messageID string) (at time.Time, err error) {
	if err := tx.QueryRow(ctx, dueAtSQL, []any{[]byte(messageID)}, &at); err != nil {
		return at, fmt.Errorf("look when message %q is due: %w", messageID, err)
	}
	return at, nil
}
