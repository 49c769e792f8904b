package outbox

import (
	"context"
	"fmt"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Whereabouts is what this database knows of a command's way to its queue. The zero value: nothing,
// or nothing any more.
type Whereabouts struct {
	Pending     bool      // in the outbox, not published
	Parked      bool      // in the outbox, for an operator to look at
	Scheduled   bool      // it waits for its time
	PublishedAt time.Time // when it last was, or a little later; zero: it was not, or the row is gone

	row uint64 // of the last copy that was published
}

// Waits reports whether a copy is still to be published.
func (w Whereabouts) Waits() bool { return w.Pending || w.Parked || w.Scheduled }

// Both parts are served by an index on message_id, which is forced: a server scans a table that is
// small. One statement, and so one snapshot: what moves from one table to the other is seen.
const locateSQL = `
SELECT message_id, id, status, published_at
  FROM outbox_events FORCE INDEX (ix_outbox_message)
 WHERE message_id IN (%[1]s)
   AND exchange = ?
 UNION ALL
SELECT message_id, id, 'SCHEDULED', due_at
  FROM scheduled_messages FORCE INDEX (ix_scheduled_message)
 WHERE message_id IN (%[1]s)`

// Locate returns where the commands with these ids are, at most sqltx.MaxIn of them.
func Locate(ctx context.Context, tx *sqltx.Tx, ids []string) (map[string]Whereabouts, error) {
	found := map[string]Whereabouts{}
	if len(ids) == 0 {
		return found, nil
	}
	query, args := locateQuery(ids)
	rows, err := tx.Query(ctx, query, args...)
	if err != nil {
		return nil, fmt.Errorf("locate %d commands: %w", len(ids), err)
	}
	defer rows.Close()
	for rows.Next() {
		var id []byte
		var row uint64
		var status string
		var at time.Time
		if err := rows.Scan(&id, &row, &status, &at); err != nil {
			return nil, fmt.Errorf("locate %d commands: %w", len(ids), err)
		}
		w := found[string(id)]
		switch status {
		case "SCHEDULED":
			w.Scheduled = true
		case string(StatusPending):
			w.Pending = true
		case string(StatusParked):
			w.Parked = true
		case string(StatusPublished):
			if w.row == 0 || at.After(w.PublishedAt) {
				w.row, w.PublishedAt = row, at
			}
		}
		found[string(id)] = w
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("locate %d commands: %w", len(ids), err)
	}
	return found, nil
}

func locateQuery(ids []string) (query string, args []any) {
	args = append(sqltx.Binary(ids), []byte(message.CommandsExchange))
	return fmt.Sprintf(locateSQL, sqltx.Placeholders(len(ids))), append(args, sqltx.Binary(ids)...)
}

// Rescue makes the published rows of lost commands pending again, in the caller's transaction and
// in the order of their ids, and says in the audit why. It returns the ids of those messages; a
// row that is gone, or not published any more, is left out.
func Rescue(ctx context.Context, tx *sqltx.Tx, lost []Whereabouts, why Operator) (ids []string, err error) {
	var rows []uint64
	for _, w := range lost {
		if w.row > 0 {
			rows = append(rows, w.row)
		}
	}
	if len(rows) == 0 {
		return nil, nil
	}
	published := func(i Item) bool { return i.Status == StatusPublished }
	found, err := sendAgainTx(ctx, tx, rows, actionRescue, why, published)
	if err != nil {
		return nil, fmt.Errorf("emit %d outbox rows again: %w", len(rows), err)
	}
	for _, i := range found {
		if published(i) {
			ids = append(ids, i.MessageID)
			noteShards(ctx, []message.Message{{OrderingKey: i.Key}})
		}
	}
	return ids, nil
}
