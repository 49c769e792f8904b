package handlers

import (
	"context"
	"fmt"
	"strings"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// Payment is what charge-payment made.
type Payment struct {
	ID          string `json:"id"`
	AmountCents int64  `json:"amount_cents"`
}

const (
	insertPaymentSQL = `
INSERT INTO payments (id, order_id, amount_cents, status)
VALUES (?, ?, ?, 'CHARGED')`

	insertIdempotencySQL = `INSERT INTO payment_idempotency (idempotency_key, payment_id) VALUES (?, ?)`

	refundSQL = `
UPDATE payments
   SET status = 'REFUNDED', refunded_at = NOW(6)
 WHERE id = ?
   AND status = 'CHARGED'`
)

// chargePayment charges an order once: its idempotency key, and the order in payments, are
// unique.
func chargePayment(ctx context.Context, tx *sqltx.Tx, o Order) (Payment, error) {
	if strings.HasPrefix(o.PaymentToken, "decline") {
		return Payment{}, saga.Fail("payment declined")
	}
	p := Payment{ID: message.NewID(), AmountCents: o.TotalCents}
	key := saga.InfoFrom(ctx).IdempotencyKey()
	if _, err := tx.Exec(ctx, insertIdempotencySQL, []byte(key), []byte(p.ID)); err != nil {
		return Payment{}, fmt.Errorf("record payment key %s: %w", key, err)
	}
	if _, err := tx.Exec(ctx, insertPaymentSQL, []byte(p.ID), []byte(o.ID), p.AmountCents); err != nil {
		return Payment{}, fmt.Errorf("charge order %s: %w", o.ID, err)
	}
	return p, outbox.Add(ctx, tx, event("order.payment_charged", o.ID, map[string]any{
		"payment_id": p.ID, "amount_cents": p.AmountCents,
	}))
}

// refundPayment refunds a charge once.
func refundPayment(ctx context.Context, tx *sqltx.Tx, o Order, done Payment) error {
	res, err := tx.Exec(ctx, refundSQL, []byte(done.ID))
	if err != nil {
		return fmt.Errorf("refund payment %s: %w", done.ID, err)
	}
	if n, err := res.RowsAffected(); err != nil {
		return fmt.Errorf("refund payment %s: %w", done.ID, err)
	} else if n == 0 {
		return saga.Fail("payment %s of order %s is not charged, so it cannot be refunded", done.ID, o.ID)
	}
	return outbox.Add(ctx, tx, event("order.payment_refunded", o.ID, map[string]any{
		"payment_id": done.ID, "amount_cents": done.AmountCents,
	}))
}
