package handlers

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// Outcome is what became of a request.
type Outcome struct {
	RequestID string `json:"request_id"`
	OrderID   string `json:"order_id"`
	Status    string `json:"status"`
	Reason    string `json:"reason,omitempty"`
}

// Served by the primary key.
const outcomesSQL = `
SELECT id, request_id, status, reason
  FROM orders
 WHERE id > ?
 ORDER BY id
 LIMIT ?`

// Outcomes returns at most limit orders by id, beginning behind order after.
func Outcomes(ctx context.Context, q sqltx.Querier, after string, limit int) ([]Outcome, error) {
	rows, err := q.QueryContext(ctx, outcomesSQL, []byte(after), limit)
	if err != nil {
		return nil, fmt.Errorf("read orders: %w", err)
	}
	defer rows.Close()
	var list []Outcome
	for rows.Next() {
		var o Outcome
		var id, request []byte
		var reason sql.NullString
		if err := rows.Scan(&id, &request, &o.Status, &reason); err != nil {
			return nil, fmt.Errorf("read orders: %w", err)
		}
		o.OrderID, o.RequestID, o.Reason = string(id), string(request), reason.String
		list = append(list, o)
	}
	return list, rows.Err()
}

// Served by uq_orders_request.
const orderOfRequestSQL = `SELECT id FROM orders WHERE request_id = ?`

// SagaOf returns the id of the saga of the order that a request made, or saga.ErrNotFound.
func SagaOf(ctx context.Context, q sqltx.Querier, requestID string) (string, error) {
	var order []byte
	err := q.QueryRowContext(ctx, orderOfRequestSQL, []byte(requestID)).Scan(&order)
	if errors.Is(err, sql.ErrNoRows) {
		return "", fmt.Errorf("%w: no order was made by request %q", saga.ErrNotFound, requestID)
	}
	if err != nil {
		return "", fmt.Errorf("find order of request %q: %w", requestID, err)
	}
	return saga.Find(ctx, q, PlaceOrder.Type, string(order))
}
