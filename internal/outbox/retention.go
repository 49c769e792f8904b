package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"backstep/internal/sqltx"
)

// Served by ix_outbox_retention (status, published_at). At READ COMMITTED it locks the rows it
// deletes and no others, and the relay touches no row that is PUBLISHED.
const sweepSQL = `
DELETE FROM outbox_events
 WHERE status = 'PUBLISHED'
   AND published_at < NOW(6) - INTERVAL ? SECOND
 ORDER BY published_at
 LIMIT ?`

// Sweep deletes at most limit rows that were published longer than the retention ago, and
// returns how many it deleted.
func Sweep(ctx context.Context, db *sql.DB, retention time.Duration, limit int) (n int64, err error) {
	err = sqltx.WithTx(ctx, db, func(ctx context.Context, tx *sqltx.Tx) error {
		res, err := tx.Exec(ctx, sweepSQL, int64(retention.Seconds()), limit)
		if err != nil {
			return err
		}
		n, err = res.RowsAffected()
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("sweep outbox: %w", err)
	}
	return n, nil
}
