package handlers

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"backstep/internal/message"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// Payment is what charge-payment made.
type Payment struct {
	ID          string `json:"id"`
	AmountCents int64  `json:"amount_cents"`
}

const (
	insertPaymentsSQL    = `INSERT INTO payments (id, order_id, amount_cents, status) VALUES `
	insertIdempotencySQL = `INSERT INTO payment_idempotency (idempotency_key, payment_id) VALUES `

	refundSQL = `
UPDATE payments
   SET status = 'REFUNDED', refunded_at = NOW(6)
 WHERE id IN (%s)
   AND status = 'CHARGED'`
)

// chargePayment charges each order once: its idempotency key, and the order in payments, are
// unique.
func chargePayment(ctx context.Context, tx *sqltx.Tx, calls []*saga.Call[Order, Payment]) error {
	var keys, payments []any
	n := 0
	for _, c := range calls {
		if strings.HasPrefix(c.In.PaymentToken, "decline") {
			c.Fail(saga.Fail("payment declined"))
			continue
		}
		n++
		c.Result = Payment{ID: message.NewID(), AmountCents: c.In.TotalCents}
		keys = append(keys, []byte(c.IdempotencyKey()), []byte(c.Result.ID))
		payments = append(payments, []byte(c.Result.ID), []byte(c.In.ID), c.Result.AmountCents, "CHARGED")
		c.Emit(event("order.payment_charged", c.In.ID, map[string]any{
			"payment_id": c.Result.ID, "amount_cents": c.Result.AmountCents,
		}))
	}
	if n == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, insertIdempotencySQL+sqltx.Tuples(n, 2), keys...); err != nil {
		return fmt.Errorf("record payment keys of %s: %w", ordersOf(calls), err)
	}
	if _, err := tx.Exec(ctx, insertPaymentsSQL+sqltx.Tuples(n, 4), payments...); err != nil {
		return fmt.Errorf("charge %s: %w", ordersOf(calls), err)
	}
	return nil
}

// refundPayment refunds each charge once.
func refundPayment(ctx context.Context, tx *sqltx.Tx, calls []*saga.Call[Order, Payment]) error {
	ids := make([]any, len(calls))
	for i, c := range calls {
		ids[i] = []byte(c.Result.ID)
		c.Emit(event("order.payment_refunded", c.In.ID, map[string]any{
			"payment_id": c.Result.ID, "amount_cents": c.Result.AmountCents,
		}))
	}
	err := change(ctx, tx, fmt.Sprintf(refundSQL, sqltx.Placeholders(len(ids))), ids...)
	return refused(calls, err, "refund", func(c *saga.Call[Order, Payment]) error {
		return saga.Fail("payment %s of order %s is not charged, so it cannot be refunded", c.Result.ID, c.In.ID)
	})
}

// errUnchanged means that a statement did not change as many rows as it was to.
var errUnchanged = errors.New("rows are not as they should be")

// change runs a statement that must change one row for each of its arguments.
func change(ctx context.Context, tx *sqltx.Tx, query string, args ...any) error {
	res, err := tx.Exec(ctx, query, args...)
	if err != nil {
		return err
	}
	n, err := res.RowsAffected()
	if err == nil && n != int64(len(args)) {
		err = fmt.Errorf("%w: %d of %d changed", errUnchanged, n, len(args))
	}
	return err
}

// refused makes errUnchanged the business failure of the one call there is. Of several nobody
// knows which it was, until the engine makes them one by one.
func refused[R any](calls []*saga.Call[Order, R], err error, verb string, why func(c *saga.Call[Order, R]) error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errUnchanged) && len(calls) == 1:
		return why(calls[0])
	}
	return fmt.Errorf("%s %s: %w", verb, ordersOf(calls), err)
}

// ordersOf names the orders of calls, for errors.
func ordersOf[R any](calls []*saga.Call[Order, R]) string {
	if len(calls) == 1 {
		return "order " + calls[0].In.ID
	}
	return fmt.Sprintf("%d orders", len(calls))
}
