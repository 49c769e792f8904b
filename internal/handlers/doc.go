// Package handlers is the order domain: what the messages of this deployment mean. It owns
// orders, order_items, inventory, payments, payment_idempotency and shipments.
//
// order.create makes an order and starts its saga, which reserves stock, charges the payment
// and creates the shipment; a refusal undoes what was done and cancels the order. The payment is a
// row, or a charge at a payment gateway that speaks HTTP (Gateway). To extend
// the system, add a definition with its step functions here and a queue name to Queues.
package handlers
