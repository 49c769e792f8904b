package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// MaxViolations is the most violations of one rule that Verify reports.
const MaxViolations = 1000

const (
	// Served by ix_outbox_retention (status, published_at): nothing else is read of it.
	pendingSQL = `
SELECT id, CONCAT('to ', exchange, ' ', routing_key, ', pending for ', TIMESTAMPDIFF(SECOND, created_at, NOW(6)), ' s',
       IF(last_error IS NULL, '', CONCAT(': ', last_error)))
  FROM outbox_events
 WHERE status = 'PENDING'
 LIMIT ?`

	scheduledSQL = `
SELECT id, CONCAT('to ', exchange, ' ', routing_key, ', due in ', TIMESTAMPDIFF(SECOND, NOW(6), due_at), ' s',
       IF(last_error IS NULL, '', CONCAT(': ', last_error)))
  FROM scheduled_messages
 ORDER BY due_at, id
 LIMIT ?`
)

// Verify checks at a moment of rest that nothing waits in the outbox or for its time.
func Verify(ctx context.Context, q sqltx.Querier) ([]sqltx.Violation, error) {
	pending, err := sqltx.Check(ctx, q, "every outbox row is published or parked", pendingSQL, MaxViolations)
	if err != nil {
		return nil, err
	}
	scheduled, err := sqltx.Check(ctx, q, "no message is still scheduled", scheduledSQL, MaxViolations)
	if err != nil {
		return nil, err
	}
	return append(pending, scheduled...), nil
}

// Counts returns how many outbox rows have each status.
func Counts(ctx context.Context, q sqltx.Querier) (map[string]int, error) {
	return sqltx.Count[string](ctx, q, "outbox rows", `SELECT status, COUNT(*) FROM outbox_events GROUP BY status`)
}

// Published is a command that a relay has published.
type Published struct {
	RowID     uint64
	MessageID string
	Queue     string
}

// A page in id order: the whole table is read once, a page at a time, and no page sorts.
const publishedSQL = `
SELECT id, message_id, routing_key
  FROM outbox_events FORCE INDEX (PRIMARY)
 WHERE id > ?
   AND status = 'PUBLISHED'
   AND exchange = ?
   AND published_at > NOW(6) - INTERVAL ? MICROSECOND
 ORDER BY id
 LIMIT ?`

// PublishedCommands returns at most limit rows to backstep.commands that were published
// within age, in the order of their ids, beginning behind row after.
func PublishedCommands(ctx context.Context, q sqltx.Querier, after uint64, age time.Duration, limit int) ([]Published, error) {
	rows, err := q.QueryContext(ctx, publishedSQL, after, []byte(message.CommandsExchange), age.Microseconds(), limit)
	if err != nil {
		return nil, fmt.Errorf("read published outbox rows: %w", err)
	}
	defer rows.Close()
	var page []Published
	for rows.Next() {
		var p Published
		var id, queue []byte
		if err := rows.Scan(&p.RowID, &id, &queue); err != nil {
			return nil, fmt.Errorf("read published outbox rows: %w", err)
		}
		p.MessageID, p.Queue = string(id), string(queue)
		page = append(page, p)
	}
	return page, rows.Err()
}

// Served by ix_outbox_message (message_id).
const parkedCopiesSQL = `
SELECT message_id, headers
  FROM outbox_events
 WHERE exchange = ?
   AND routing_key = ?
   AND message_id IN (`

// ParkedCopies returns which of ids have been parked from queue by a worker, and when, as each of the
// copies says.
func ParkedCopies(ctx context.Context, q sqltx.Querier, queue string, ids []string) (map[string][]time.Time, error) {
	parked := map[string][]time.Time{}
	if len(ids) == 0 {
		return parked, nil
	}
	args := []any{[]byte(message.ParkedExchange), []byte(queue)}
	original := map[string]string{} // id by that of its copy
	for _, id := range ids {
		args = append(args, []byte(message.Legible(id)))
		original[message.Legible(id)] = id
	}
	rows, err := q.QueryContext(ctx, parkedCopiesSQL+sqltx.Placeholders(len(ids))+")", args...)
	if err != nil {
		return nil, fmt.Errorf("read parked copies: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var id, headers []byte
		if err := rows.Scan(&id, &headers); err != nil {
			return nil, fmt.Errorf("read parked copies: %w", err)
		}
		var at time.Time // zero: it does not say
		if h, err := message.DecodeHeaders(headers); err == nil {
			at, _ = time.Parse(time.RFC3339Nano, h.String(message.HeaderParkedAt)) // nor then
		}
		parked[original[string(id)]] = append(parked[original[string(id)]], at)
	}
	return parked, rows.Err()
}

// Place is where a copy of a message is on its way to the broker.
type Place struct {
	Status     string        `json:"status"` // PENDING, PUBLISHED, PARKED or SCHEDULED
	Exchange   string        `json:"exchange"`
	RoutingKey string        `json:"routing_key"`
	Attempts   int           `json:"attempts,omitempty"` // refusals by the broker
	LastError  string        `json:"last_error,omitempty"`
	Deferred   time.Time     `json:"deferred_since,omitzero"` // when a worker first handed it back as not its own to handle
	At         time.Time     `json:"at"`                      // since when it is there; if SCHEDULED, until when
	Age        time.Duration `json:"-"`                       // since At by the database's clock; negative if it is to come
}

// Both parts are served by an index on message_id.
const findSQL = `
SELECT status, exchange, routing_key, attempts, last_error, IF(status = 'PUBLISHED', published_at, created_at),
       TIMESTAMPDIFF(MICROSECOND, IF(status = 'PUBLISHED', published_at, created_at), NOW(6)), headers
  FROM outbox_events
 WHERE message_id = ?
 UNION ALL
SELECT 'SCHEDULED', exchange, routing_key, 0, last_error, due_at, TIMESTAMPDIFF(MICROSECOND, due_at, NOW(6)), headers
  FROM scheduled_messages
 WHERE message_id = ?`

// Find returns where the copies of a message are: most often one, none if it was never here
// or has been swept.
func Find(ctx context.Context, q sqltx.Querier, messageID string) ([]Place, error) {
	rows, err := q.QueryContext(ctx, findSQL, []byte(messageID), []byte(messageID))
	if err != nil {
		return nil, fmt.Errorf("find message %q: %w", messageID, err)
	}
	defer rows.Close()
	var places []Place
	for rows.Next() {
		var p Place
		var exchange, routingKey, headers []byte
		var lastError sql.NullString
		var age int64
		if err := rows.Scan(&p.Status, &exchange, &routingKey, &p.Attempts, &lastError, &p.At, &age, &headers); err != nil {
			return nil, fmt.Errorf("find message %q: %w", messageID, err)
		}
		p.Exchange, p.RoutingKey, p.LastError = string(exchange), string(routingKey), lastError.String
		p.Age = time.Duration(age) * time.Microsecond
		if h, err := message.DecodeHeaders(headers); err == nil { // else nobody of us wrote it, nor handed it back
			p.Deferred, _ = time.Parse(time.RFC3339Nano, h.String(message.HeaderDeferredSince)) // zero: it has none
		}
		places = append(places, p)
	}
	return places, rows.Err()
}
