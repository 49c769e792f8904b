package handlers

import (
	"context"
	"fmt"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// Shipment is what create-shipment made.
type Shipment struct {
	ID string `json:"id"`
}

const (
	insertShipmentSQL = `INSERT INTO shipments (id, order_id, status) VALUES (?, ?, 'CREATED')`

	cancelShipmentSQL = `
UPDATE shipments
   SET status = 'CANCELLED', cancelled_at = NOW(6)
 WHERE id = ?
   AND status = 'CREATED'`
)

// createShipment ships what was reserved and confirms the order.
func createShipment(ctx context.Context, tx *sqltx.Tx, o Order) (Shipment, error) {
	if o.ShipTo.Country == "ZZ" {
		return Shipment{}, saga.Fail("no carrier ships to country ZZ")
	}
	s := Shipment{ID: message.NewID()}
	if _, err := tx.Exec(ctx, insertShipmentSQL, []byte(s.ID), []byte(o.ID)); err != nil {
		return Shipment{}, fmt.Errorf("create shipment of order %s: %w", o.ID, err)
	}
	for _, l := range sumBySKU(o.Items) {
		ok, err := moveStock(ctx, tx, shipSQL, l)
		if err != nil {
			return Shipment{}, err
		}
		if !ok {
			return Shipment{}, saga.Fail("reserved stock of %s is less than the %d to ship", l.SKU, l.Quantity)
		}
	}
	if err := setStatus(ctx, tx, o.ID, "CONFIRMED", ""); err != nil {
		return Shipment{}, err
	}
	return s, outbox.Add(ctx, tx,
		event("order.shipment_created", o.ID, map[string]any{"shipment_id": s.ID}),
		event("order.confirmed", o.ID, map[string]any{"shipment_id": s.ID, "total_cents": o.TotalCents}),
	)
}

// cancelShipment takes a shipment back when an operator reverses a completed order.
func cancelShipment(ctx context.Context, tx *sqltx.Tx, o Order, done Shipment) error {
	res, err := tx.Exec(ctx, cancelShipmentSQL, []byte(done.ID))
	if err != nil {
		return fmt.Errorf("cancel shipment %s: %w", done.ID, err)
	}
	if n, err := res.RowsAffected(); err != nil {
		return fmt.Errorf("cancel shipment %s: %w", done.ID, err)
	} else if n == 0 {
		return saga.Fail("shipment %s of order %s is not open, so it cannot be cancelled", done.ID, o.ID)
	}
	for _, l := range sumBySKU(o.Items) {
		ok, err := moveStock(ctx, tx, unshipSQL, l)
		if err != nil {
			return err
		}
		if !ok {
			return saga.Fail("shipped stock of %s is less than the %d to take back", l.SKU, l.Quantity)
		}
	}
	return outbox.Add(ctx, tx, event("order.shipment_cancelled", o.ID, map[string]any{"shipment_id": done.ID}))
}
