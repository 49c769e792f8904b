package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"backstep/internal/sqltx"
)

// A new generation: a late mark of an earlier copy does not count, the row is published anew.
const sendAgainSQL = `
UPDATE outbox_events FORCE INDEX (PRIMARY)
   SET status = 'PENDING', generation = generation + 1, attempts = 0,
       last_error = NULL, next_attempt_at = NULL, published_at = created_at
 WHERE id IN (`

// Requeue makes those of the rows that are PARKED pending again, with the attempts at 0, in
// one transaction. A saga that stands still because its command was parked moves on by itself
// when that arrives. It returns all of the rows as they were; repeating it is harmless.
func Requeue(ctx context.Context, db *sql.DB, ids []uint64, op Operator) ([]Item, error) {
	found, err := sendAgain(ctx, db, ids, actionRequeue, op, func(i Item) bool { return i.Status == StatusParked })
	if err != nil {
		return nil, fmt.Errorf("requeue %d outbox rows: %w", len(ids), err)
	}
	return found, nil
}

// Republish makes those of the rows that are PUBLISHED pending again if they were last
// published before that time, in one transaction, and returns how many. They go out with the
// ids they had, so whoever has processed one drops the copy. Repeating it does nothing.
func Republish(ctx context.Context, db *sql.DB, ids []uint64, before time.Time, op Operator) (n int, err error) {
	again := func(i Item) bool { return i.Status == StatusPublished && i.PublishedAt.Before(before) }
	found, err := sendAgain(ctx, db, ids, actionRepublish, op, again)
	if err != nil {
		return 0, fmt.Errorf("republish %d outbox rows: %w", len(ids), err)
	}
	for _, i := range found {
		if again(i) {
			n++
		}
	}
	return n, nil
}

// sendAgain makes the rows pending again that are as they should be, and returns all of them
// as they were.
func sendAgain(ctx context.Context, db *sql.DB, ids []uint64, action string, op Operator, chosen func(Item) bool) (found []Item, err error) {
	err = sqltx.WithTx(ctx, db, func(ctx context.Context, tx *sqltx.Tx) error {
		found, err = sendAgainTx(ctx, tx, ids, action, op, chosen)
		return err
	})
	return found, err
}

func sendAgainTx(ctx context.Context, tx *sqltx.Tx, ids []uint64, action string, op Operator, chosen func(Item) bool) ([]Item, error) {
	found, err := lockItems(ctx, tx, ids)
	if err != nil {
		return nil, err
	}
	var again []Item
	var args []any
	for _, i := range found {
		if chosen(i) {
			again, args = append(again, i), append(args, i.ID)
		}
	}
	if len(again) == 0 {
		return found, nil
	}
	if _, err := tx.Exec(ctx, sendAgainSQL+sqltx.Placeholders(len(args))+")", args...); err != nil {
		return nil, err
	}
	return found, op.record(ctx, tx, action, again, itself)
}
