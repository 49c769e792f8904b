package bench

import (
	"context"
	"fmt"

	"backstep/internal/sqltx"
)

// Served by uq_orders_request.
const endedSQL = `
SELECT request_id
  FROM orders
 WHERE status <> 'PENDING'
   AND request_id IN (`

// Ended returns those of the requests whose order is no longer open: it is confirmed, or
// cancelled, by the transaction that ends its saga.
func Ended(ctx context.Context, q sqltx.Querier, requests []string) ([]string, error) {
	if len(requests) == 0 {
		return nil, nil
	}
	args := make([]any, len(requests))
	for i, id := range requests {
		args[i] = []byte(id)
	}
	rows, err := q.QueryContext(ctx, endedSQL+sqltx.Placeholders(len(args))+")", args...)
	if err != nil {
		return nil, fmt.Errorf("look which orders have ended: %w", err)
	}
	defer rows.Close()
	var ended []string
	for rows.Next() {
		var id []byte
		if err := rows.Scan(&id); err != nil {
			return nil, fmt.Errorf("look which orders have ended: %w", err)
		}
		ended = append(ended, string(id))
	}
	return ended, rows.Err()
}
