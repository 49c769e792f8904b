package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Filter chooses rows of one status. Zero fields choose all. The times are those at which a
// PUBLISHED row was published, and at which another was created.
type Filter struct {
	Type       string
	Key        string
	Queue      string // commands to this queue
	RoutingKey string // whatever the exchange
	Since      time.Time
	Before     time.Time
}

// where returns the index that serves f, the conditions, and the order in which that index
// gives the rows: the oldest first.
func (f Filter) where(s Status) (index, conditions, order string, args []any) {
	index, order = "ix_outbox_retention", "published_at%[1]s, id%[1]s"
	conditions, args = "status = ?", []any{string(s)}
	if f.Key != "" {
		index, order = "ix_outbox_relay", "id%[1]s"
		conditions, args = "shard = ? AND status = ? AND ordering_key = ?",
			[]any{message.Shard(f.Key), string(s), []byte(f.Key)}
	}
	and := func(condition string, values ...any) {
		conditions += "\n   AND " + condition
		args = append(args, values...)
	}
	at := "created_at"
	if s == StatusPublished {
		at = "published_at"
	}
	if !f.Since.IsZero() {
		and(at+" >= ?", f.Since.UTC())
	}
	if !f.Before.IsZero() {
		and(at+" < ?", f.Before.UTC())
	}
	if f.Type != "" {
		and("event_type = ?", []byte(f.Type))
	}
	if f.Queue != "" {
		and("exchange = ? AND routing_key = ?", []byte(message.CommandsExchange), []byte(f.Queue))
	}
	if f.RoutingKey != "" {
		and("routing_key = ?", []byte(f.RoutingKey))
	}
	return index, conditions, order, args
}

// query selects columns of the rows that f chooses, in the order of an index: no filesort,
// and with a limit no more is read than it takes to find so many.
func (f Filter) query(columns string, s Status, newestFirst bool, limit int) (query string, args []any) {
	index, conditions, order, args := f.where(s)
	direction := ""
	if newestFirst {
		direction = " DESC"
	}
	query = columns + "\n  FROM outbox_events FORCE INDEX (" + index + ")\n WHERE " + conditions +
		"\n ORDER BY " + fmt.Sprintf(order, direction)
	if limit > 0 {
		query, args = query+"\n LIMIT ?", append(args, limit)
	}
	return query, args
}

// List returns at most limit rows that f chooses with these statuses, and whether there are
// more: status after status, PUBLISHED the last first, of the others the oldest first.
func List(ctx context.Context, q sqltx.Querier, f Filter, limit int, statuses ...Status) (list []Item, more bool, err error) {
	for _, s := range statuses {
		query, args := f.query(itemColumnsSQL, s, s == StatusPublished, limit+1-len(list))
		err := scan(ctx, q, query, func(rows *sql.Rows) error {
			var i Item
			if err := i.scan(rows.Scan); err != nil {
				return err
			}
			list = append(list, i)
			return nil
		}, args...)
		if err != nil {
			return nil, false, fmt.Errorf("list outbox rows: %w", err)
		}
		if len(list) > limit {
			return list[:limit], true, nil
		}
	}
	return list, false, nil
}

// Choose returns the ids of the rows that f chooses with this status, the oldest first, at
// most limit if that is not 0.
func Choose(ctx context.Context, q sqltx.Querier, f Filter, s Status, limit int) ([]uint64, error) {
	query, args := f.query("SELECT id", s, false, limit)
	ids, err := scanIDs(ctx, q, query, args...)
	if err != nil {
		return nil, fmt.Errorf("choose outbox rows: %w", err)
	}
	return ids, nil
}

// Now returns the time by the database's clock, which is the one rows tell.
func Now(ctx context.Context, q sqltx.Querier) (now time.Time, err error) {
	if err := q.QueryRowContext(ctx, `SELECT NOW(6)`).Scan(&now); err != nil {
		return time.Time{}, fmt.Errorf("ask the database for the time: %w", err)
	}
	return now, nil
}
