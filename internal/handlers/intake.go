package handlers

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

// OrderCreateType is the type of the message that asks for a new order.
const OrderCreateType = "order.create"

// OrderCreate handles order.create: one transaction makes the order, its lines, the
// order.created event and the saga. The request's id is unique among orders, so a replay,
// even after the inbox has forgotten it, creates nothing. Bad input is parked, and
// order.rejected says why.
type OrderCreate struct{ log *slog.Logger }

// NewOrderCreate returns the handler.
func NewOrderCreate(log *slog.Logger) *OrderCreate { return &OrderCreate{log: log} }

// HandleBatch creates the orders of all messages with one statement a table. If that fails
// they are created one by one, and one that fails undoes only its own writes.
func (h *OrderCreate) HandleBatch(ctx context.Context, tx *sqltx.Tx, msgs []message.Message) []message.Outcome {
	out := make([]message.Outcome, len(msgs))
	var good []request
	var bad []message.Message
	for i := range msgs {
		m := &msgs[i]
		r := request{ctx: tracing.Extract(ctx, m.Headers), message: m, out: &out[i]}
		switch err := r.decode(); {
		case m.Failure != "":
			out[i] = message.Outcome{Kind: message.Retry, Reason: m.Failure}
		case err != nil:
			out[i] = message.Park("%v", err)
			e := rejected(m, err.Error())
			tracing.Carry(r.ctx, &e)
			bad = append(bad, e)
		default:
			good = append(good, r)
		}
	}
	if err := outbox.Add(ctx, tx, bad...); err != nil {
		tx.Fail(err) // the lane tries one by one
		return out
	}
	h.create(ctx, tx, good)
	return out
}

// request is an order.create that can be fulfilled.
type request struct {
	ctx     context.Context // of its span, not of the batch
	message *message.Message
	order   Order
	out     *message.Outcome
}

func (r *request) decode() error {
	body, err := decode(r.message.Body)
	if err != nil {
		return err
	}
	if n := len(r.message.RequestID()); n > message.MaxIDBytes {
		return fmt.Errorf("x-request-id has %d bytes; %d is the limit", n, message.MaxIDBytes)
	}
	r.order = Order{ID: message.NewID(), CreateOrder: body}
	return nil
}

// create makes the orders of requests, together if that can be done.
func (h *OrderCreate) create(ctx context.Context, tx *sqltx.Tx, requests []request) {
	if len(requests) == 0 {
		return
	}
	sp := tx.Savepoint()
	err := insertAll(ctx, tx, requests)
	if err == nil {
		sp.Release()
		return // the outcome Done is the zero one
	}
	if tx.Err() != nil || sp.Rollback(ctx) != nil {
		return // the lane runs the batch again
	}
	if len(requests) > 1 {
		for i := range requests {
			if h.create(requests[i].ctx, tx, requests[i:i+1]); tx.Err() != nil {
				return
			}
		}
		return
	}
	r := requests[0]
	if sqltx.Classify(err) == sqltx.Duplicate {
		h.log.Info("order exists already", "message_id", r.message.MessageID, "request_id", r.message.RequestID())
		return
	}
	*r.out = message.Outcome{Kind: message.Retry, Reason: err.Error()}
}

func insertAll(ctx context.Context, tx *sqltx.Tx, requests []request) error {
	if err := insertOrders(ctx, tx, requests); err != nil {
		return err
	}
	starts := make([]saga.Beginning, len(requests))
	events := make([]message.Message, len(requests))
	for i, r := range requests {
		starts[i] = saga.Beginning{Context: r.ctx, CorrelationID: r.order.ID, Input: r.order, ID: message.NewID()}
		events[i] = event("order.created", r.order.ID, map[string]any{
			"customer": r.order.Customer, "total_cents": r.order.TotalCents, "items": r.order.Items,
			// By which who asked for the order knows it, and can cancel it.
			"request_id": strings.ToValidUTF8(r.message.RequestID(), "\uFFFD"), "saga_id": starts[i].ID,
		})
		tracing.Carry(r.ctx, &events[i])
	}
	return saga.StartAll(ctx, tx, PlaceOrder, starts, events...)
}

// rejected has no order to be about; the request is its key, or the message if the request's
// id is what is wrong.
func rejected(m *message.Message, reason string) message.Message {
	id := m.RequestID()
	if len(id) > message.MaxIDBytes {
		id = m.MessageID
	}
	request := strings.ToValidUTF8(id, "\uFFFD")
	e := event("order.rejected", request, map[string]any{"request_id": request, "reason": strings.ToValidUTF8(reason, "\uFFFD")})
	e.CorrelationID, e.OrderingKey, e.AggregateID = id, id, id
	return e
}
