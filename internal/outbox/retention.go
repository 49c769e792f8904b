package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"time"

	"backstep/internal/sqltx"
)

const (
	// Served by ix_outbox_retention (status, published_at), which is forced: a server scans a
	// table that is small. It locks nothing: it would wait for rows others are adding.
	selectOldSQL = `
SELECT id
  FROM outbox_events FORCE INDEX (ix_outbox_retention)
 WHERE status = 'PUBLISHED'
   AND published_at < NOW(6) - INTERVAL ? SECOND
 ORDER BY published_at
 LIMIT ?`

	// Each id finds its row by the primary key. One that was published again meanwhile stays.
	deleteOldSQL = `
DELETE e
  FROM outbox_events e FORCE INDEX (PRIMARY)
 WHERE e.status = 'PUBLISHED'
   AND `
)

// Sweep deletes at most limit rows that were published longer than the retention ago, and
// returns how many it deleted.
func Sweep(ctx context.Context, db *sql.DB, retention time.Duration, limit int) (n int64, err error) {
	err = sqltx.WithTx(ctx, db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		n, err = sweep(ctx, tx, retention, limit)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("sweep outbox: %w", err)
	}
	return n, nil
}

func sweep(ctx context.Context, tx *sqltx.Tx, retention time.Duration, limit int) (int64, error) {
	ids, err := selectIDs(ctx, tx, selectOldSQL, int64(retention.Seconds()), limit)
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	slices.Sort(ids)
	condition, args := among(ids)
	res, err := tx.Exec(ctx, deleteOldSQL+condition, args...)
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}
