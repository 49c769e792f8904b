package saga

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"

	"backstep/internal/sqltx"
)

// Served by ix_saga_status (status, updated_at), one look for each status, and then by the primary
// key, and of actions by ix_actions_saga (saga_id, id). All are forced, and the ids make a table: a
// server scans one that is small, or of which many rows are meant, and waits for the sagas that are
// at work. The first locks nothing: it would wait for the saga that comes next in the index.
const (
	selectFinishedSQL = `
SELECT id
  FROM saga_instances FORCE INDEX (ix_saga_status)
 WHERE status = ?
   AND updated_at < NOW(6) - INTERVAL ? SECOND
 ORDER BY updated_at
 LIMIT ?`

	// An operator may reverse a saga that is completed.
	lockFinishedSQL = `
SELECT i.id
  FROM (%s) AS old
       STRAIGHT_JOIN saga_instances AS i FORCE INDEX (PRIMARY) ON i.id = old.id
 WHERE i.status = ?
   FOR UPDATE`

	deleteStepsSQL     = `DELETE s FROM (%s) AS old STRAIGHT_JOIN saga_steps AS s FORCE INDEX (PRIMARY) ON s.saga_id = old.id`
	deleteActionsSQL   = `DELETE a FROM (%s) AS old STRAIGHT_JOIN saga_actions AS a FORCE INDEX (ix_actions_saga) ON a.saga_id = old.id`
	deleteCallsSQL     = `DELETE c FROM (%s) AS old STRAIGHT_JOIN saga_calls AS c FORCE INDEX (PRIMARY) ON c.saga_id = old.id`
	deleteInstancesSQL = `DELETE i FROM (%s) AS old STRAIGHT_JOIN saga_instances AS i FORCE INDEX (PRIMARY) ON i.id = old.id`
)

// Sweep deletes at most limit sagas that ended longer than the retention ago, with their steps,
// calls and actions, and returns how many it deleted. The retention must be longer than the
// inbox's, or a late copy of a request could start its saga again.
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
	err = sqltx.WithTx(ctx, db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		n, err = sweepTx(ctx, tx, status, retention, limit)
		return err
	})
	return n, err
}

func sweepTx(ctx context.Context, tx *sqltx.Tx, status Status, retention time.Duration, limit int) (int64, error) {
	ids, err := selectIDs(ctx, tx, selectFinishedSQL, string(status), int64(retention.Seconds()), limit)
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	ids, err = selectIDs(ctx, tx, fmt.Sprintf(lockFinishedSQL, idList(len(ids))), append(ids, string(status))...)
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	for _, query := range []string{deleteStepsSQL, deleteActionsSQL, deleteCallsSQL, deleteInstancesSQL} {
		if _, err := tx.Exec(ctx, fmt.Sprintf(query, idList(len(ids))), ids...); err != nil {
			return 0, err
		}
	}
	return int64(len(ids)), nil
}

// idList is n ids as a table.
func idList(n int) string { return "SELECT ? AS id" + strings.Repeat(" UNION ALL SELECT ?", n-1) }

func selectIDs(ctx context.Context, tx *sqltx.Tx, query string, args ...any) (ids []any, err error) {
	rows, err := tx.Query(ctx, query, args...)
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
