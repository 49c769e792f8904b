package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"time"

	"backstep/internal/sqltx"
)

// Status is a row's.
type Status string

// The statuses of a row.
const (
	StatusPending   Status = "PENDING"
	StatusPublished Status = "PUBLISHED"
	StatusParked    Status = "PARKED"
)

// Item is an outbox row at a glance.
type Item struct {
	ID            uint64        `json:"id"`
	MessageID     string        `json:"message_id"`
	Type          string        `json:"type"`
	Key           string        `json:"ordering_key"`
	Shard         int           `json:"shard"`
	Exchange      string        `json:"exchange"`
	RoutingKey    string        `json:"routing_key"`
	Mandatory     bool          `json:"mandatory"`
	Status        Status        `json:"status"`
	Generation    uint32        `json:"generation"` // how often it was requeued or published again
	Attempts      int           `json:"attempts"`   // refusals by the broker
	NextAttemptAt time.Time     `json:"next_attempt_at,omitzero"`
	LastError     string        `json:"last_error,omitempty"`
	CreatedAt     time.Time     `json:"created_at"`
	PublishedAt   time.Time     `json:"published_at,omitzero"`
	Age           time.Duration `json:"-"` // since it was published, else created, by the database's clock
}

// Destination names where the row goes.
func (i *Item) Destination() string {
	return destination{exchange: i.Exchange, routingKey: i.RoutingKey}.String()
}

const (
	itemColumnsSQL = `
SELECT id, message_id, event_type, ordering_key, shard, exchange, routing_key, mandatory, status, generation,
       attempts, next_attempt_at, last_error, created_at, published_at,
       TIMESTAMPDIFF(MICROSECOND, IF(status = 'PUBLISHED', published_at, created_at), NOW(6))`

	// Locked in the order of their ids. The primary key is forced as for a mark.
	lockItemsSQL = itemColumnsSQL + `
  FROM outbox_events FORCE INDEX (PRIMARY)
 WHERE id IN (%s)
 ORDER BY id
   FOR UPDATE`
)

// scan reads the columns of itemColumnsSQL and then those of more.
func (i *Item) scan(scan func(...any) error, more ...any) error {
	var id, typ, key, exchange, routingKey []byte
	var next sql.NullTime
	var published time.Time
	var lastError sql.NullString
	var age int64 // microseconds
	if err := scan(append([]any{
		&i.ID, &id, &typ, &key, &i.Shard, &exchange, &routingKey, &i.Mandatory, &i.Status, &i.Generation,
		&i.Attempts, &next, &lastError, &i.CreatedAt, &published, &age,
	}, more...)...); err != nil {
		return err
	}
	i.MessageID, i.Type, i.Key = string(id), string(typ), string(key)
	i.Exchange, i.RoutingKey = string(exchange), string(routingKey)
	i.NextAttemptAt, i.LastError = next.Time, lastError.String
	if i.Status == StatusPublished {
		i.PublishedAt = published
	}
	i.Age = time.Duration(age) * time.Microsecond
	return nil
}

// lockItems returns the rows with these ids that there are, locked, in id order.
func lockItems(ctx context.Context, tx *sqltx.Tx, ids []uint64) ([]Item, error) {
	query := fmt.Sprintf(lockItemsSQL, sqltx.Placeholders(len(ids)))
	rows, err := tx.Query(ctx, query, anys(ids)...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var items []Item
	for rows.Next() {
		var i Item
		if err := i.scan(rows.Scan); err != nil {
			return nil, err
		}
		items = append(items, i)
	}
	return items, rows.Err()
}

func anys[T any](list []T) []any {
	out := make([]any, len(list))
	for i := range list {
		out[i] = list[i]
	}
	return out
}

const (
	rowExistsSQL = `SELECT id FROM outbox_events WHERE id = ?`
	rowsOfSQL    = `SELECT id FROM outbox_events WHERE message_id = ? ORDER BY id` // served by ix_outbox_message
)

// Resolve returns the ids of the rows a person names: by a row's id, or by a message id, of
// which there may be several. ErrNoRow means there is none, or none any more.
func Resolve(ctx context.Context, q sqltx.Querier, name string) ([]uint64, error) {
	if n, err := strconv.ParseUint(name, 10, 64); err == nil {
		ids, err := scanIDs(ctx, q, rowExistsSQL, n)
		if err != nil {
			return nil, fmt.Errorf("look for outbox row %d: %w", n, err)
		}
		if len(ids) > 0 {
			return ids, nil
		}
	}
	ids, err := scanIDs(ctx, q, rowsOfSQL, []byte(name))
	if err != nil {
		return nil, fmt.Errorf("look for outbox rows of message %q: %w", name, err)
	}
	if len(ids) == 0 {
		return nil, fmt.Errorf("%w: %q", ErrNoRow, name)
	}
	return ids, nil
}

func scanIDs(ctx context.Context, q sqltx.Querier, query string, args ...any) (ids []uint64, err error) {
	err = scan(ctx, q, query, func(rows *sql.Rows) error {
		var id uint64
		if err := rows.Scan(&id); err != nil {
			return err
		}
		ids = append(ids, id)
		return nil
	}, args...)
	return ids, err
}
