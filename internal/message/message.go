package message

import (
	"encoding/binary"
	"hash/crc32"
	"strconv"
	"time"

	"github.com/google/uuid"
)

// Exchanges of the broker contract (docs/messages.md).
const (
	// CommandsExchange is direct; the routing key is the queue's name. It has no alternate
	// exchange and no catch-all binding, so an unroutable command is returned, never lost.
	CommandsExchange = "backstep.commands"
	// EventsExchange is topic; nobody listening is normal, so nothing is mandatory here.
	EventsExchange = "backstep.events"
	// ParkedExchange is direct; it carries messages a human must look at to <queue>.parked.
	ParkedExchange = "backstep.parked"
	// WakeExchange is a transient fanout: the relays' doorbell.
	WakeExchange = "backstep.wake"
)

// Header names of the message contract.
const (
	HeaderRequestID   = "x-request-id"
	HeaderSagaID      = "x-saga-id"
	HeaderSagaType    = "x-saga-type"
	HeaderSagaVersion = "x-saga-version"
	HeaderStep        = "x-step"
	HeaderDirection   = "x-direction"
	HeaderAttempt     = "x-attempt"
	HeaderOrderingKey = "x-ordering-key"
	HeaderTraceParent = "traceparent"
	HeaderTraceState  = "tracestate"

	HeaderParkedReason = "x-parked-reason"
	HeaderParkedAt     = "x-parked-at"
	HeaderParkedFrom   = "x-parked-from"
	// HeaderParkedProperties keeps the original properties that cannot be set on the parked
	// copy: the broker checks user_id, and an expiration would drop the evidence.
	HeaderParkedProperties = "x-parked-properties"
	// HeaderParkedEnvelope says that the body of a parked copy is an envelope with the original
	// headers and body.
	HeaderParkedEnvelope = "x-parked-envelope"
	// HeaderParkedAdded names headers that the original has not, and the copy may have.
	HeaderParkedAdded = "x-parked-added"
	// HeaderParkedPrefix begins all headers that only parked copies have.
	HeaderParkedPrefix = "x-parked-"
	// HeaderDeferredSince is when a message was first handed back for another worker.
	HeaderDeferredSince = "x-deferred-since"
	// HeaderDeferredFor is for how long it was handed back in all, as time.Duration prints it.
	HeaderDeferredFor = "x-deferred-for"
	// HeaderUnhandledFor is that for the times when it was handed back because what follows from it had
	// failed, which HeaderDeferredFor does not count.
	HeaderUnhandledFor = "x-unhandled-for"
)

// MaxIDBytes is the longest message_id AMQP's short string, and our tables, can hold.
const MaxIDBytes = 255

// Properties are the AMQP 0-9-1 basic properties of a message. Zero values are "not set".
type Properties struct {
	ContentType     string    `json:"content_type,omitempty"`
	ContentEncoding string    `json:"content_encoding,omitempty"`
	DeliveryMode    uint8     `json:"delivery_mode,omitempty"` // 2 is persistent
	Priority        uint8     `json:"priority,omitempty"`
	CorrelationID   string    `json:"correlation_id,omitempty"`
	ReplyTo         string    `json:"reply_to,omitempty"`
	Expiration      string    `json:"expiration,omitempty"`
	MessageID       string    `json:"message_id,omitempty"` // any bytes, 1 to MaxIDBytes
	Timestamp       time.Time `json:"timestamp,omitzero"`   // whole seconds on the wire
	Type            string    `json:"type,omitempty"`
	UserID          string    `json:"user_id,omitempty"`
	AppID           string    `json:"app_id,omitempty"`
}

// Message is one AMQP message and where it goes. Strings may hold any bytes: foreign
// clients put what they like into them.
type Message struct {
	Properties
	Headers Headers
	Body    []byte

	Exchange   string
	RoutingKey string
	Mandatory  bool // the broker must return it when no queue is bound

	// OrderingKey serialises publishing: messages of one key are published one at a time in
	// the order they were added. Empty means MessageID.
	OrderingKey string

	// AggregateType and AggregateID name what the message is about, for operators.
	AggregateType, AggregateID string
	// IdempotencyKey, when not empty, makes adding the same key again a no-op for as long as
	// the first row exists.
	IdempotencyKey string

	// Failure is set by the lane on a message whose last try in this process did not end: it
	// panicked, or the connection died under it again and again. A handler counts a failed
	// attempt for it and does not run it.
	Failure string

	// Answer is set by the lane on a message whose Outcome was Outside: what its Call returned.
	Answer any
}

// NewID returns a new message id: a UUIDv7, so ids sort by time and carry their age.
func NewID() string { return uuid.Must(uuid.NewV7()).String() }

// Time returns when the message was made: from its id when that is a UUIDv7, else from the
// timestamp property. The zero time means it does not say.
func (m *Message) Time() time.Time {
	if u, err := uuid.Parse(m.MessageID); err == nil && u.Version() == 7 {
		ms := binary.BigEndian.Uint64(append([]byte{0, 0}, u[:6]...))
		return time.UnixMilli(int64(ms)).UTC()
	}
	return m.Timestamp
}

// Key returns the ordering key, or the message id if none was given.
func (m *Message) Key() string {
	if m.OrderingKey != "" {
		return m.OrderingKey
	}
	return m.MessageID
}

// Attempt returns the x-attempt header: which try this is, from 1.
func (m *Message) Attempt() int {
	n, ok := m.Headers.Int(HeaderAttempt)
	if !ok || n < 1 {
		return 1
	}
	return n
}

// DeferredFor returns for how long the message has been handed back in all, by the header that counts it. How
// long it took to come back does not count, or an outage or a backlog would park what only few have met.
func (m *Message) DeferredFor(counter string) time.Duration {
	whole, err := time.ParseDuration(m.Headers.String(counter))
	if err != nil { // it was not, or somebody else wrote that
		return 0
	}
	return max(0, whole)
}

// RequestID returns the first id of this message's chain of attempts.
func (m *Message) RequestID() string {
	if id := m.Headers.String(HeaderRequestID); id != "" {
		return id
	}
	return m.MessageID
}

// Shards is how many parts the outbox is split into by ordering key.
const Shards = 16

// Shard returns the shard of an ordering key, 0 ≤ shard < Shards. It is the same function
// as the generated column outbox_events.shard: CRC32(ordering_key) MOD 16 (IEEE polynomial).
func Shard(key string) int { return int(crc32.ChecksumIEEE([]byte(key)) % Shards) }

// Headers is an AMQP field table. Values are nil, bool, int8…int64, uint8, uint16, uint32,
// float32, float64, string, []byte, time.Time, Decimal, Headers or []any of these.
type Headers map[string]any

// Decimal is AMQP's decimal: Value / 10^Scale.
type Decimal struct {
	Scale uint8
	Value int32
}

// String returns a text header; a table may carry it as string or bytes.
func (h Headers) String(name string) string {
	switch v := h[name].(type) {
	case string:
		return v
	case []byte:
		return string(v)
	}
	return ""
}

// Int returns an integer header of any width, or decimal text (typed by hand in a form).
func (h Headers) Int(name string) (int, bool) {
	switch v := h[name].(type) {
	case int:
		return v, true
	case int8:
		return int(v), true
	case int16:
		return int(v), true
	case int32:
		return int(v), true
	case int64:
		return int(v), true
	case uint8:
		return int(v), true
	case uint16:
		return int(v), true
	case uint32:
		return int(v), true
	case float64:
		if n := int(v); float64(n) == v {
			return n, true
		}
		return 0, false
	}
	n, err := strconv.Atoi(h.String(name))
	return n, err == nil
}
