package handlers

import (
	"context"
	"database/sql"
	"fmt"

	"backstep/internal/sqltx"
)

// invariants of the order domain at rest. Each query gives the offenders: who, and what is
// there instead.
var invariants = []struct{ rule, query string }{
	{"stock is conserved: initial = available + reserved + shipped, nothing negative", `
SELECT sku, CONCAT('initial ', initial, ', available ', available, ', reserved ', reserved, ', shipped ', shipped)
  FROM inventory
 WHERE initial <> available + reserved + shipped OR available < 0 OR reserved < 0 OR shipped < 0`},
	{"reserved stock is that of orders still open", `
SELECT i.sku, CONCAT('reserved ', i.reserved, ', open orders hold ', COALESCE(o.held, 0))
  FROM inventory i
  LEFT JOIN (SELECT t.sku, SUM(t.quantity) AS held
               FROM orders s JOIN order_items t ON t.order_id = s.id
              WHERE s.status IN ('PENDING', 'NEEDS_ATTENTION')
              GROUP BY t.sku) o ON o.sku = i.sku
 WHERE i.reserved > COALESCE(o.held, 0)`},
	{"shipped stock is that of open shipments", `
SELECT i.sku, CONCAT('shipped ', i.shipped, ', open shipments have ', COALESCE(o.held, 0))
  FROM inventory i
  LEFT JOIN (SELECT t.sku, SUM(t.quantity) AS held
               FROM shipments s JOIN order_items t ON t.order_id = s.order_id
              WHERE s.status = 'CREATED'
              GROUP BY t.sku) o ON o.sku = i.sku
 WHERE i.shipped <> COALESCE(o.held, 0)`},
	{"a confirmed order is charged its total and shipped", `
SELECT o.id, CONCAT('payment ', COALESCE(p.status, 'none'), ' of ', COALESCE(p.amount_cents, 0), ' for ', o.total_cents, ', shipment ', COALESCE(s.status, 'none'))
  FROM orders o
  LEFT JOIN payments p ON p.order_id = o.id
  LEFT JOIN shipments s ON s.order_id = o.id
 WHERE o.status = 'CONFIRMED'
   AND (p.status IS NULL OR p.status <> 'CHARGED' OR p.amount_cents <> o.total_cents OR s.status IS NULL OR s.status <> 'CREATED')`},
	{"an order that is charged and shipped is confirmed", `
SELECT o.id, CONCAT('status ', o.status)
  FROM orders o
  JOIN payments p ON p.order_id = o.id AND p.status = 'CHARGED'
  JOIN shipments s ON s.order_id = o.id AND s.status = 'CREATED'
 WHERE o.status NOT IN ('CONFIRMED', 'NEEDS_ATTENTION')`},
	{"a cancelled order has nothing charged and not refunded, and nothing shipped", `
SELECT o.id, CONCAT('payment ', COALESCE(p.status, 'none'), ', shipment ', COALESCE(s.status, 'none'))
  FROM orders o
  LEFT JOIN payments p ON p.order_id = o.id
  LEFT JOIN shipments s ON s.order_id = o.id
 WHERE o.status = 'CANCELLED'
   AND (p.status = 'CHARGED' OR s.status = 'CREATED')`},
	{"every order has ended", `
SELECT id, CONCAT('status ', status) FROM orders WHERE status = 'PENDING'`},
	{"a payment was charged once, by one idempotency key", `
SELECT p.id, CONCAT(COALESCE(k.n, 0), ' keys')
  FROM payments p
  LEFT JOIN (SELECT payment_id, COUNT(*) AS n FROM payment_idempotency GROUP BY payment_id) k ON k.payment_id = p.id
 WHERE k.n IS NULL OR k.n <> 1`},
}

// Verify checks the order domain's invariants at a moment of rest.
func Verify(ctx context.Context, q sqltx.Querier) ([]sqltx.Violation, error) {
	var all []sqltx.Violation
	for _, inv := range invariants {
		v, err := sqltx.Check(ctx, q, inv.rule, inv.query)
		if err != nil {
			return nil, err
		}
		all = append(all, v...)
	}
	return all, nil
}

// Counts returns how many orders have each status.
func Counts(ctx context.Context, q sqltx.Querier) (map[string]int, error) {
	return sqltx.Count[string](ctx, q, "orders", `SELECT status, COUNT(*) FROM orders GROUP BY status`)
}

// Seed stocks SKU-0001, SKU-0002, … with the same quantity each. What is there stays.
func Seed(ctx context.Context, db *sql.DB, skus int, stock int64) error {
	args := make([]any, 0, 3*skus)
	for i := range skus {
		args = append(args, []byte(SKU(i)), stock, stock)
	}
	return sqltx.WithTx(ctx, db, func(ctx context.Context, tx *sqltx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO inventory (sku, initial, available) VALUES `+sqltx.Tuples(skus, 3)+
			` ON DUPLICATE KEY UPDATE sku = VALUES(sku)`, args...)
		if err != nil {
			return fmt.Errorf("seed %d SKUs: %w", skus, err)
		}
		return nil
	})
}

// SKU returns the name of the i-th seeded SKU, from 0.
func SKU(i int) string { return fmt.Sprintf("SKU-%04d", i+1) }
