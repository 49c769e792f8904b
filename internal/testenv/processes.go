package testenv

import (
	"context"
	"database/sql"
	"errors"

	"github.com/go-sql-driver/mysql"
)

// cannotConvert is MySQL's ER_CANNOT_CONVERT_STRING: 9.7 cannot list a statement that has just a 4-byte
// character in it.
const cannotConvert = 3854

// Processes returns the ids of the other connections to db's server of which this holds, a condition on the
// columns of information_schema.processlist.
func Processes(ctx context.Context, db *sql.DB, where string, args ...any) ([]int, error) {
	for {
		ids, err := listProcesses(ctx, db, where, args)
		if refused, ok := errors.AsType[*mysql.MySQLError](err); ok && refused.Number == cannotConvert && ctx.Err() == nil {
			continue
		}
		return ids, err
	}
}

func listProcesses(ctx context.Context, db *sql.DB, where string, args []any) (ids []int, err error) {
	rows, err := db.QueryContext(ctx, `SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND `+where, args...) //nolint:gosec // the condition is its test's own
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var id int
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}
