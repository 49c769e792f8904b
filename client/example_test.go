package client_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"

	"backstep/client"
)

// pool is the service's own; TestExample gives the example a database.
var pool *sql.DB

// A cart is closed and its order asked for in one transaction: both happen, or neither.
func ExampleSubmit() {
	checkOut := func(ctx context.Context, cart int) error {
		tx, err := pool.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }() // after Commit it does nothing
		if _, err := tx.ExecContext(ctx, `UPDATE carts SET state = 'ordered' WHERE id = ?`, cart); err != nil {
			return err
		}
		if _, err := client.Submit(ctx, tx, client.Command{
			Queue: "orders", Type: "order.create", OrderingKey: fmt.Sprintf("cart-%d", cart),
			Body: []byte(`{"customer":"Ada","items":[{"sku":"SKU-0001","quantity":1,"price_cents":995}],"total_cents":995}`),
		}); err != nil {
			return err
		}
		return tx.Commit()
	}
	fmt.Println(checkOut(context.Background(), 17))
}

// It has no "Output:" comment because it needs a database: this runs it on one.
func TestExample(t *testing.T) {
	pool = open(t)
	ExampleSubmit()
	if got := rows(t, pool); got != 1 {
		t.Errorf("%d commands after checking out, want 1", got)
	}
}
