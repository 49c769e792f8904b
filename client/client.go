// Package client is for Go services that share the database with Backstep: they add a command
// to their own transaction, and it is sent if, and only if, that transaction commits. Services
// that do not share the database publish it over AMQP; docs/messages.md is the contract.
package client

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// ErrInvalid means a command cannot be sent as it is: no queue or type, an id, key or header
// that AMQP cannot carry. Nothing was added.
var ErrInvalid = outbox.ErrInvalid

// Command asks the workers of a queue to do something.
type Command struct {
	Queue string // the queue's name, such as "orders"
	Type  string // such as "order.create"
	Body  []byte // JSON

	ID             string         // message id, 1 to 255 bytes; default a new UUIDv7
	CorrelationID  string         // optional: what ties it to what caused it
	OrderingKey    string         // commands of one key are published in commit order; default the id
	IdempotencyKey string         // optional: a second command with it is a no-op while the first's row exists
	Headers        map[string]any // optional: bool, integers, floats, string, []byte, time.Time
}

// Submit adds c to tx and returns its message id. An order gets its own id, and that of its saga, when a
// worker takes it in: the event order.created has them beside the message id (request_id). The trace context of ctx goes with it. The
// broker is not needed: a relay publishes the command after the commit. Rolled back, it never
// was.
func Submit(ctx context.Context, tx *sql.Tx, c Command) (id string, err error) {
	if c.Queue == "" || c.Type == "" {
		return "", fmt.Errorf("submit command: %w: %w", ErrInvalid, errors.New("it needs a queue and a type"))
	}
	if c.ID == "" {
		c.ID = message.NewID()
	}
	err = outbox.Add(ctx, sqltx.Join(tx), message.Message{
		Properties: message.Properties{MessageID: c.ID, Type: c.Type, CorrelationID: c.CorrelationID},
		Headers:    message.Headers(c.Headers),
		Body:       c.Body,
		Exchange:   message.CommandsExchange, RoutingKey: c.Queue, Mandatory: true,
		OrderingKey: c.OrderingKey, AggregateType: "command", AggregateID: c.ID,
		IdempotencyKey: c.IdempotencyKey,
	})
	if err != nil {
		return "", fmt.Errorf("submit command: %w", err)
	}
	return c.ID, nil
}
