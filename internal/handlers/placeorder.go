package handlers

import (
	"context"
	"fmt"

	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// PlaceOrder is the saga of an order: reserve, charge, ship; undone in reverse.
var PlaceOrder = placeOrder(nil)

// placeOrder makes the one definition for workers that charge at a gateway, and for those that have
// none: an instance may go from the ones to the others.
func placeOrder(gateway *Gateway) *saga.Definition {
	k := cashier{gateway}
	return saga.Define("place-order", 1,
		saga.BatchStep("reserve-stock", InventoryQueue, reserveStock, releaseStock, saga.Locks(skusOf, lockSKUs)),
		saga.BatchStep("charge-payment", PaymentQueue, k.charge, k.refund, k.options()...),
		saga.BatchStep("create-shipment", ShippingQueue, createShipment, cancelShipment, saga.Locks(skusOf, lockSKUs)),
		saga.OnCompensated(cancelOrder),
		saga.OnManualAction(flagOrder),
		saga.OnResumed(unflagOrder),
		saga.OnEndedByHand(endOrder),
	)
}

// cancelOrder ends an order whose saga was undone.
func cancelOrder(ctx context.Context, tx *sqltx.Tx, o Order, reason string) error {
	if err := setStatus(ctx, tx, o.ID, "CANCELLED", reason); err != nil {
		return err
	}
	saga.Emit(ctx, event("order.cancelled", o.ID, map[string]any{"reason": reason}))
	return nil
}

// flagOrder marks an order whose saga waits for an operator.
func flagOrder(ctx context.Context, tx *sqltx.Tx, o Order, reason string) error {
	return setStatus(ctx, tx, o.ID, "NEEDS_ATTENTION", reason)
}

// unflagOrder is flagOrder taken back.
func unflagOrder(ctx context.Context, tx *sqltx.Tx, o Order) error {
	return setStatus(ctx, tx, o.ID, "PENDING", "")
}

// Served by the primary key and the unique keys on order_id.
const orderFactsSQL = `
SELECT EXISTS (SELECT 1 FROM payments WHERE order_id = ? AND status = 'CHARGED'),
       EXISTS (SELECT 1 FROM shipments WHERE order_id = ? AND status = 'CREATED')`

// endOrder makes an order what an operator says it is, if that is so: confirmed ones are charged
// and shipped, cancelled ones are neither.
func endOrder(ctx context.Context, tx *sqltx.Tx, o Order, status saga.Status, _ string) error {
	var charged, shipped bool
	if err := tx.QueryRow(ctx, orderFactsSQL, []any{[]byte(o.ID), []byte(o.ID)}, &charged, &shipped); err != nil {
		return fmt.Errorf("look at order %s: %w", o.ID, err)
	}
	refund, supply := "cancel the shipment", "make the payment"
	switch {
	case charged && shipped:
		refund = "refund the payment and cancel the shipment"
	case charged:
		refund, supply = "refund the payment", "make the shipment"
	case !shipped:
		refund, supply = "", "make the payment and the shipment"
	}
	switch {
	case status == saga.Compensated && (charged || shipped):
		return saga.Fail("order %s cannot be CANCELLED: it is %s; %s first", o.ID, facts(charged, shipped), refund)
	case status == saga.Compensated:
		return nil // cancelOrder was here
	case refund == "":
		return saga.Fail("order %s cannot be CONFIRMED: it is %s; %s first, or resolve it as compensated", o.ID, facts(charged, shipped), supply)
	case !charged || !shipped:
		return saga.Fail("order %s cannot be CONFIRMED: it is %s; %s first, or %s and resolve it as compensated",
			o.ID, facts(charged, shipped), supply, refund)
	}
	if err := setStatus(ctx, tx, o.ID, "CONFIRMED", ""); err != nil {
		return err
	}
	saga.Emit(ctx, event("order.confirmed", o.ID, map[string]any{"total_cents": o.TotalCents}))
	return nil
}

func facts(charged, shipped bool) string {
	not := map[bool]string{false: "not "}
	return not[charged] + "charged and " + not[shipped] + "shipped"
}
