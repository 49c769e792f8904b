package outbox

import (
	"context"
	"fmt"
	"maps"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

const insertSQL = `
INSERT INTO outbox_events
       (message_id, ordering_key, aggregate_type, aggregate_id, event_type,
        exchange, routing_key, mandatory, properties, headers, payload, idempotency_key)
VALUES `

// A second row with the same idempotency key changes nothing. IGNORE would hide other errors.
const onDuplicateSQL = ` ON DUPLICATE KEY UPDATE idempotency_key = VALUES(idempotency_key)`

// Add makes msgs part of tx: one multi-row INSERT, and their order is kept. A message without
// an id gets one; the trace context of ctx is stored with it. Adding an IdempotencyKey again
// while its row exists is a no-op. ErrInvalid names the message and the fault; nothing is
// added then.
func Add(ctx context.Context, tx *sqltx.Tx, msgs ...message.Message) error {
	in := sqltx.Insert{Head: insertSQL, Tuple: sqltx.Tuples(1, 12)}
	for i := range msgs {
		args, err := encode(ctx, msgs[i])
		if err != nil {
			return fmt.Errorf("add to outbox: %w", err)
		}
		if msgs[i].IdempotencyKey != "" {
			in.Tail = onDuplicateSQL
		}
		in.Append(args...)
	}
	if err := in.Exec(ctx, tx); err != nil {
		return fmt.Errorf("add %d messages to outbox: %w", len(msgs), err)
	}
	noteShards(ctx, msgs)
	return nil
}

// Check says what Add would have against m: ErrInvalid.
func Check(ctx context.Context, m message.Message) error {
	_, err := encode(tracing.Unrecorded(ctx), m)
	return err
}

// Delayed is a message to be published later.
type Delayed struct {
	message.Message
	After  time.Duration // from now, by the database's clock
	Reason string        // why it waits, for operators
}

const scheduleSQL = `
INSERT INTO scheduled_messages
       (message_id, ordering_key, aggregate_type, aggregate_id, event_type,
        exchange, routing_key, mandatory, properties, headers, payload, idempotency_key,
        last_error, due_at)
VALUES `

// Schedule makes msgs part of tx, to be moved to the outbox when they are due. ErrInvalid is
// as for Add.
func Schedule(ctx context.Context, tx *sqltx.Tx, msgs ...Delayed) error {
	in := sqltx.Insert{Head: scheduleSQL, Tuple: "(" + sqltx.Placeholders(13) + ", NOW(6) + INTERVAL ? MICROSECOND)"}
	for i := range msgs {
		args, err := encode(ctx, msgs[i].Message)
		if err != nil {
			return fmt.Errorf("schedule message: %w", err)
		}
		in.Append(append(args, words(msgs[i].Reason), max(0, msgs[i].After.Microseconds()))...)
	}
	if err := in.Exec(ctx, tx); err != nil {
		return fmt.Errorf("schedule %d messages: %w", len(msgs), err)
	}
	return nil
}

// encode checks m, fills in what it leaves open and returns the values of one row.
func encode(ctx context.Context, m message.Message) ([]any, error) {
	if m.MessageID == "" {
		m.MessageID = message.NewID()
	}
	if m.ContentType == "" {
		m.ContentType = "application/json"
	}
	if m.DeliveryMode == 0 {
		m.DeliveryMode = 2
	}
	if m.AppID == "" {
		m.AppID = "backstep"
	}
	if err := validate(&m); err != nil {
		return nil, fmt.Errorf("%w: message %q of type %q: %w", ErrInvalid, m.MessageID, m.Type, err)
	}
	// The caller's map is not ours to write to.
	m.Headers = maps.Clone(m.Headers)
	if m.Headers == nil {
		m.Headers = message.Headers{}
	}
	if _, set := m.Headers[message.HeaderOrderingKey]; !set {
		m.Headers[message.HeaderOrderingKey] = m.Key()
	}
	span := tracing.Create(ctx, &m)
	defer span.End()
	headers, err := message.EncodeHeaders(m.Headers)
	if err != nil {
		return nil, fmt.Errorf("%w: message %q: %w", ErrInvalid, m.MessageID, err)
	}
	if _, err := m.Headers.WireSize(); err != nil {
		return nil, fmt.Errorf("%w: message %q: %w", ErrInvalid, m.MessageID, err)
	}
	properties, err := message.EncodeProperties(m.Properties)
	if err != nil {
		return nil, fmt.Errorf("%w: message %q: %w", ErrInvalid, m.MessageID, err)
	}
	body := m.Body
	if body == nil {
		body = []byte{}
	}
	var idempotency []byte
	if m.IdempotencyKey != "" {
		idempotency = []byte(m.IdempotencyKey)
	}
	return []any{
		[]byte(m.MessageID), []byte(m.Key()), []byte(m.AggregateType), []byte(m.AggregateID), []byte(m.Type),
		[]byte(m.Exchange), []byte(m.RoutingKey), m.Mandatory, properties, headers, body, idempotency,
	}, nil
}

// maxBody is more than any consumer of ours takes, 4 MiB, also in the envelope of a parked copy,
// and less than what brokers (16 MiB since 4.0) and databases (16 MiB, MariaDB) take by default.
const maxBody = 8 << 20

// validate holds what AMQP's short strings and our columns can carry: 255 bytes.
func validate(m *message.Message) error {
	for _, f := range []struct{ name, value string }{
		{"message_id", m.MessageID},
		{"ordering key", m.OrderingKey},
		{"aggregate type", m.AggregateType},
		{"aggregate id", m.AggregateID},
		{"type", m.Type},
		{"exchange", m.Exchange},
		{"routing key", m.RoutingKey},
		{"idempotency key", m.IdempotencyKey},
		{"correlation_id", m.CorrelationID},
		{"reply_to", m.ReplyTo},
		{"app_id", m.AppID},
		{"content_type", m.ContentType},
		{"content_encoding", m.ContentEncoding},
		{"expiration", m.Expiration},
		{"user_id", m.UserID},
	} {
		if len(f.value) > message.MaxIDBytes {
			return fmt.Errorf("%s has %d bytes; %d is the limit", f.name, len(f.value), message.MaxIDBytes)
		}
	}
	if m.Exchange == "" {
		return fmt.Errorf("no exchange")
	}
	if len(m.Body) > maxBody {
		return fmt.Errorf("the body has %d bytes; %d is the limit", len(m.Body), maxBody)
	}
	return nil
}
