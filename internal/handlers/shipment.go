package handlers

import (
	"context"
	"fmt"

	"backstep/internal/message"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// Shipment is what create-shipment made.
type Shipment struct {
	ID string `json:"id"`
}

const (
	insertShipmentsSQL = `INSERT INTO shipments (id, order_id, status) VALUES `

	cancelShipmentsSQL = `
UPDATE shipments
   SET status = 'CANCELLED', cancelled_at = NOW(6)
 WHERE id IN (%s)
   AND status = 'CREATED'`

	confirmOrdersSQL = `
UPDATE orders
   SET status = 'CONFIRMED', reason = NULL, updated_at = NOW(6)
 WHERE id IN (%s)`
)

func linesToShip(c *saga.Call[Order, Shipment]) []Reserved { return sumBySKU(c.In.Items) }

// createShipment ships what was reserved and confirms the orders.
func createShipment(ctx context.Context, tx *sqltx.Tx, calls []*saga.Call[Order, Shipment]) error {
	calls = accepted(calls, func(c *saga.Call[Order, Shipment]) error {
		if c.In.ShipTo.Country == "ZZ" {
			return saga.Fail("no carrier ships to country ZZ")
		}
		return nil
	})
	err := transfer(ctx, tx, reserved, shipped, calls, linesToShip,
		func(c *saga.Call[Order, Shipment], short Reserved, have int64, _ bool) {
			c.Fail(saga.Fail("reserved stock of %s is %d, less than the %d to ship", short.SKU, have, short.Quantity))
		})
	if err != nil {
		return err
	}
	var shipments, ids []any
	for _, c := range calls {
		if c.Failed() {
			continue
		}
		c.Result = Shipment{ID: message.NewID()}
		shipments = append(shipments, []byte(c.Result.ID), []byte(c.In.ID), "CREATED")
		ids = append(ids, []byte(c.In.ID))
		c.Emit(
			event("order.shipment_created", c.In.ID, map[string]any{"shipment_id": c.Result.ID}),
			event("order.confirmed", c.In.ID, map[string]any{"shipment_id": c.Result.ID, "total_cents": c.In.TotalCents}),
		)
	}
	if len(ids) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, insertShipmentsSQL+sqltx.Tuples(len(ids), 3), shipments...); err != nil {
		return fmt.Errorf("create shipment of %s: %w", ordersOf(calls), err)
	}
	if err := change(ctx, tx, fmt.Sprintf(confirmOrdersSQL, sqltx.Placeholders(len(ids))), ids...); err != nil {
		return fmt.Errorf("confirm %s: %w", ordersOf(calls), err)
	}
	return nil
}

// cancelShipment takes shipments back when an operator reverses completed orders.
func cancelShipment(ctx context.Context, tx *sqltx.Tx, calls []*saga.Call[Order, Shipment]) error {
	ids := make([]any, len(calls))
	for i, c := range calls {
		ids[i] = []byte(c.Result.ID)
	}
	err := change(ctx, tx, fmt.Sprintf(cancelShipmentsSQL, sqltx.Placeholders(len(ids))), ids...)
	if err = refused(calls, err, "cancel the shipment of", func(c *saga.Call[Order, Shipment]) error {
		return saga.Fail("shipment %s of order %s is not open, so it cannot be cancelled", c.Result.ID, c.In.ID)
	}); err != nil {
		return err
	}
	err = transfer(ctx, tx, shipped, reserved, calls, linesToShip,
		func(c *saga.Call[Order, Shipment], short Reserved, have int64, _ bool) {
			c.Fail(saga.Fail("shipped stock of %s is %d, less than the %d to take back", short.SKU, have, short.Quantity))
		})
	for _, c := range calls {
		if c.Failed() && len(calls) > 1 {
			return errUnchanged // its shipment is cancelled: one by one
		}
		c.Emit(event("order.shipment_cancelled", c.In.ID, map[string]any{"shipment_id": c.Result.ID}))
	}
	return err
}

// accepted returns the calls that check has nothing against; the others fail.
func accepted[R any](calls []*saga.Call[Order, R], check func(c *saga.Call[Order, R]) error) []*saga.Call[Order, R] {
	kept := make([]*saga.Call[Order, R], 0, len(calls))
	for _, c := range calls {
		if err := check(c); err != nil {
			c.Fail(err)
			continue
		}
		kept = append(kept, c)
	}
	return kept
}
