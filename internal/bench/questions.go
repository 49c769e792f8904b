package bench

import (
	"context"
	"fmt"

	"backstep/internal/sqltx"
)

// Questions returns how many statements the server has been sent so far, by all its clients.
// Asking is one of them.
func Questions(ctx context.Context, q sqltx.Querier) (n int64, err error) {
	var name string
	if err := q.QueryRowContext(ctx, `SHOW GLOBAL STATUS LIKE 'Questions'`).Scan(&name, &n); err != nil {
		return 0, fmt.Errorf("count statements: %w", err)
	}
	return n, nil
}
