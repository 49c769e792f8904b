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

// HandleBatch creates one order a message; one that fails undoes only its own writes.
func (h *OrderCreate) HandleBatch(ctx context.Context, tx *sqltx.Tx, msgs []message.Message) []message.Outcome {
	out := make([]message.Outcome, len(msgs))
	for i := range msgs {
		out[i] = h.handle(tracing.Extract(ctx, msgs[i].Headers), tx, &msgs[i])
		if tx.Err() != nil {
			break // the lane runs the batch again
		}
	}
	return out
}

func (h *OrderCreate) handle(ctx context.Context, tx *sqltx.Tx, m *message.Message) message.Outcome {
	if m.Failure != "" {
		return message.Outcome{Kind: message.Retry, Reason: m.Failure}
	}
	body, err := decode(m.Body)
	if n := len(m.RequestID()); err == nil && n > message.MaxIDBytes {
		err = fmt.Errorf("x-request-id has %d bytes; %d is the limit", n, message.MaxIDBytes)
	}
	if err != nil {
		if aerr := outbox.Add(ctx, tx, rejected(m, err.Error())); aerr != nil {
			return message.Outcome{Kind: message.Retry, Reason: aerr.Error()}
		}
		return message.Park("%v", err)
	}
	sp := tx.Savepoint()
	err = h.create(ctx, tx, Order{ID: message.NewID(), CreateOrder: body}, m.RequestID())
	if err == nil {
		sp.Release()
		return message.Outcome{Kind: message.Done}
	}
	if tx.Err() != nil {
		return message.Outcome{}
	}
	if rerr := sp.Rollback(ctx); rerr != nil {
		return message.Outcome{}
	}
	if sqltx.Classify(err) == sqltx.Duplicate {
		h.log.Info("order exists already", "message_id", m.MessageID, "request_id", m.RequestID())
		return message.Outcome{Kind: message.Done}
	}
	return message.Outcome{Kind: message.Retry, Reason: err.Error()}
}

func (h *OrderCreate) create(ctx context.Context, tx *sqltx.Tx, o Order, requestID string) error {
	if err := insertOrder(ctx, tx, o, requestID); err != nil {
		return err
	}
	if err := outbox.Add(ctx, tx, event("order.created", o.ID, map[string]any{
		"customer": o.Customer, "total_cents": o.TotalCents, "items": o.Items,
	})); err != nil {
		return err
	}
	_, _, err := saga.Start(ctx, tx, PlaceOrder, o.ID, o)
	return err
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
