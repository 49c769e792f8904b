package handlers

import (
	"context"

	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// PlaceOrder is the saga of an order: reserve, charge, ship; undone in reverse.
var PlaceOrder = saga.Define("place-order", 1,
	saga.BatchStep("reserve-stock", InventoryQueue, reserveStock, releaseStock, saga.Locks(skusOf, lockSKUs)),
	saga.BatchStep("charge-payment", PaymentQueue, chargePayment, refundPayment),
	saga.BatchStep("create-shipment", ShippingQueue, createShipment, cancelShipment, saga.Locks(skusOf, lockSKUs)),
	saga.OnCompensated(cancelOrder),
	saga.OnManualAction(flagOrder),
	saga.OnResumed(unflagOrder),
)

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
