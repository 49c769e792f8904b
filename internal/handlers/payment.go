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
	Gateway     bool   `json:"gateway,omitempty"` // it was charged at the gateway, whose id this is
}

const (
	insertPaymentsSQL    = `INSERT INTO payments (id, order_id, amount_cents, status) VALUES `
	insertIdempotencySQL = `INSERT INTO payment_idempotency (idempotency_key, payment_id) VALUES `
	insertRefundedSQL    = `INSERT INTO payments (id, order_id, amount_cents, status, refunded_at) VALUES (?, ?, ?, 'REFUNDED', NOW(6))`

	refundSQL = `
UPDATE payments
   SET status = 'REFUNDED', refunded_at = NOW(6)
 WHERE id IN (%s)
   AND status = 'CHARGED'`
)

// cashier has the functions of the step charge-payment. Without a gateway a payment is no more than
// its rows.
type cashier struct {
	gateway *Gateway // nil: none
}

// options are those of the step.
func (k cashier) options() []saga.StepOption {
	if k.gateway == nil {
		return nil
	}
	return []saga.StepOption{saga.Prepare(k.gateway.charge), saga.PrepareCompensation(k.gateway.refund)}
}

// charge charges each order once: its idempotency key, and the order in payments, are unique.
func (k cashier) charge(ctx context.Context, tx *sqltx.Tx, calls []*saga.Call[Order, Payment]) error {
	var keys, payments []any
	n := 0
	for _, c := range calls {
		payment, err := k.pay(c)
		if err != nil {
			c.Fail(err)
			continue
		}
		n++
		c.Result = payment
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

func (k cashier) pay(c *saga.Call[Order, Payment]) (Payment, error) {
	switch {
	case k.gateway != nil:
		return saga.Prepared[Payment](c.Context())
	case strings.HasPrefix(c.In.PaymentToken, "decline"):
		return Payment{}, saga.Fail("payment declined")
	}
	return Payment{ID: message.NewID(), AmountCents: c.In.TotalCents}, nil
}

// refund refunds each charge once.
func (k cashier) refund(ctx context.Context, tx *sqltx.Tx, calls []*saga.Call[Order, Payment]) error {
	var ids []any
	for _, c := range calls {
		if c.Unknown || c.Result.Gateway && k.gateway == nil {
			if err := k.refundUnknown(ctx, tx, c); err != nil {
				return err
			}
			continue
		}
		ids = append(ids, []byte(c.Result.ID))
		c.Emit(refunded(c.In, c.Result.ID, c.Result.AmountCents))
	}
	if len(ids) == 0 {
		return nil
	}
	err := change(ctx, tx, fmt.Sprintf(refundSQL, sqltx.Placeholders(len(ids))), ids...)
	return refused(calls, err, "refund", func(c *saga.Call[Order, Payment]) error {
		return saga.Fail("payment %s of order %s is not charged, so it cannot be refunded", c.Result.ID, c.In.ID)
	})
}

func refunded(o Order, id string, cents int64) message.Message {
	return event("order.payment_refunded", o.ID, map[string]any{"payment_id": id, "amount_cents": cents})
}

// refundUnknown records a payment of which only its refund is known, if there was one.
func (k cashier) refundUnknown(ctx context.Context, tx *sqltx.Tx, c *saga.Call[Order, Payment]) error {
	if k.gateway == nil {
		c.Fail(saga.Elsewhere("order %s was charged at a payment gateway, and this worker has no BACKSTEP_PAYMENT_URL", c.In.ID))
		return nil
	}
	r, err := saga.Prepared[Refund](c.Context())
	if err != nil || r.PaymentID == "" {
		return err
	}
	charge := saga.Info{SagaID: c.SagaID, Step: c.Step, Direction: saga.Execute}
	if _, err := tx.Exec(ctx, insertIdempotencySQL+sqltx.Tuples(1, 2), []byte(charge.IdempotencyKey()), []byte(r.PaymentID)); err != nil {
		return fmt.Errorf("record the payment key of order %s: %w", c.In.ID, err)
	}
	if _, err := tx.Exec(ctx, insertRefundedSQL, []byte(r.PaymentID), []byte(c.In.ID), c.In.TotalCents); err != nil {
		return fmt.Errorf("record the refund of order %s: %w", c.In.ID, err)
	}
	c.Emit(refunded(c.In, r.PaymentID, c.In.TotalCents))
	return nil
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
