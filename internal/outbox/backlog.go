package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Both parts are one look into ix_outbox_retention (status, published_at).
const backlogSQL = `
SELECT EXISTS (SELECT 1 FROM outbox_events WHERE status = 'PENDING'),
       (SELECT MAX(published_at) FROM outbox_events WHERE status = 'PUBLISHED')`

// Backlog reports whether rows are pending, and when one was last marked published, by the
// database's clock; the zero time if none was.
func Backlog(ctx context.Context, q sqltx.Querier) (pending bool, last time.Time, err error) {
	rows, err := q.QueryContext(ctx, backlogSQL)
	if err != nil {
		return false, last, fmt.Errorf("look at the outbox's backlog: %w", err)
	}
	defer rows.Close()
	var at sql.NullTime
	for rows.Next() {
		if err := rows.Scan(&pending, &at); err != nil {
			return false, last, fmt.Errorf("look at the outbox's backlog: %w", err)
		}
	}
	return pending, at.Time, rows.Err()
}

// historyRows is how many rows one statement of AddHistory makes at most: all numbers of four
// digits.
const historyRows = 10_000

// A number for each row of the statement; no construct that one of the servers does not have.
const historySQL = `
INSERT INTO outbox_events
       (message_id, ordering_key, aggregate_type, aggregate_id, event_type,
        exchange, routing_key, mandatory, properties, headers, payload, status, published_at)
SELECT CONCAT(?, '-', n), CONCAT('history-', n), '', '', 'history', ?, ?, TRUE, ?, ?, ?, 'PUBLISHED', NOW(6)
  FROM ` + numbersSQL + `
 WHERE n < ?`

const numbersSQL = `(SELECT a.d + 10 * b.d + 100 * c.d + 1000 * e.d AS n
          FROM ` + digitsSQL + ` a, ` + digitsSQL + ` b, ` + digitsSQL + ` c, ` + digitsSQL + ` e) numbers`

const digitsSQL = `(SELECT 0 AS d UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4
                     UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9)`

// AddHistory adds n rows like m that look as if they had been published already, and commits
// now and then. It is for benchmarks: what the table keeps must not slow down what is new.
func AddHistory(ctx context.Context, db *sql.DB, m message.Message, n int, added func(int)) error {
	return addMany(ctx, db, historySQL, m, n, added)
}

// addMany makes n rows like m, historyRows at a time.
func addMany(ctx context.Context, db *sql.DB, query string, m message.Message, n int, added func(int)) error {
	headers, err := message.EncodeHeaders(m.Headers)
	if err != nil {
		return fmt.Errorf("add rows for a benchmark: %w", err)
	}
	properties, err := message.EncodeProperties(m.Properties)
	if err != nil {
		return fmt.Errorf("add rows for a benchmark: %w", err)
	}
	for done := 0; done < n; {
		k := min(historyRows, n-done)
		if _, err := db.ExecContext(ctx, query, []byte(message.NewID()), []byte(m.Exchange), []byte(m.RoutingKey),
			properties, headers, m.Body, k); err != nil {
			return fmt.Errorf("add rows for a benchmark: %w", err)
		}
		done += k
		added(done)
	}
	return nil
}
