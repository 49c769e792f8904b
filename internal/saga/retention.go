package saga

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"backstep/internal/sqltx"
)

// Served by ix_saga_status (status, updated_at), one look for each status. What has ended is
// not updated any more.
const (
	selectFinishedSQL = `
SELECT id
  FROM saga_instances
 WHERE status = ?
   AND updated_at < NOW(6) - INTERVAL ? SECOND
 ORDER BY updated_at
 LIMIT ?
   FOR UPDATE`

	deleteStepsSQL     = `DELETE FROM saga_steps WHERE saga_id IN (%s)`
	deleteActionsSQL   = `DELETE FROM saga_actions WHERE saga_id IN (%s)`
	deleteInstancesSQL = `DELETE FROM saga_instances WHERE id IN (%s)`
)

// Sweep deletes at most limit sagas that ended longer than the retention ago, with their steps
// and actions, and returns how many it deleted. The retention must be longer than the inbox's,
// or a late copy of a request could start its saga again.
func Sweep(ctx context.Context, db *sql.DB, retention time.Duration, limit int) (n int64, err error) {
	for _, status := range []Status{Completed, Compensated} {
		m, err := sweepStatus(ctx, db, status, retention, limit-int(n))
		if err != nil {
			return n, fmt.Errorf("sweep sagas: %w", err)
		}
		n += m
	}
	return n, nil
}

func sweepStatus(ctx context.Context, db *sql.DB, status Status, retention time.Duration, limit int) (n int64, err error) {
	if limit <= 0 {
		return 0, nil
	}
	err = sqltx.WithTx(ctx, db, func(ctx context.Context, tx *sqltx.Tx) error {
		ids, err := finished(ctx, tx, status, retention, limit)
		if err != nil || len(ids) == 0 {
			return err
		}
		for _, query := range []string{deleteStepsSQL, deleteActionsSQL, deleteInstancesSQL} {
			if _, err := tx.Exec(ctx, fmt.Sprintf(query, sqltx.Placeholders(len(ids))), ids...); err != nil {
				return err
			}
		}
		n = int64(len(ids))
		return nil
	})
	return n, err
}

func finished(ctx context.Context, tx *sqltx.Tx, status Status, retention time.Duration, limit int) (ids []any, err error) {
	rows, err := tx.Query(ctx, selectFinishedSQL, string(status), int64(retention.Seconds()), limit)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var id []byte
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}
