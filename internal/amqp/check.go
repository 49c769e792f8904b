package amqp

import (
	"fmt"
	"math"
	"time"

	"backstep/internal/message"
)

const (
	maxShort = 255 // bytes of a short string

	// maxHeaders is the largest encoded header table we publish. A frame must hold it; the
	// broker's default frame is 128 KiB, and the parked copy of a message carries more headers.
	maxHeaders = 64 << 10

	// What amqp091 v1.16 reads of a field table (read.go). It cuts the connection over more,
	// that of whoever consumes the message, or ours when the broker returns it.
	maxDepth   = 32
	maxEntries = 8192
)

// check returns an error wrapping ErrRefused if m cannot be written as it is. amqp091 finds
// some of it out only when half a message is written, which costs the connection; the broker
// closes the connection over a frame that is too large.
func check(m *message.Message, frameMax int) error {
	properties := 0
	for i, s := range []struct{ name, value string }{
		{"exchange", m.Exchange},
		{"routing key", m.RoutingKey}, // these two are in a frame of their own
		{"content_type", m.ContentType},
		{"content_encoding", m.ContentEncoding},
		{"correlation_id", m.CorrelationID},
		{"reply_to", m.ReplyTo},
		{"expiration", m.Expiration},
		{"message_id", m.MessageID},
		{"type", m.Type},
		{"user_id", m.UserID},
		{"app_id", m.AppID},
	} {
		if len(s.value) > maxShort {
			return fmt.Errorf("%w: %s has %d bytes, AMQP allows %d", ErrRefused, s.name, len(s.value), maxShort)
		}
		if i > 1 {
			properties += 1 + len(s.value)
		}
	}
	n, err := tableSize(m.Headers, 0)
	if err != nil {
		return err
	}
	if n > maxHeaders {
		return fmt.Errorf("%w: the headers have %d bytes encoded, the limit is %d", ErrRefused, n, maxHeaders)
	}
	// Class, weight, body size, flags; the rest of the properties; the frame around them.
	const fixed = 2 + 2 + 8 + 2 + 1 + 1 + 8 + 8
	if size := fixed + properties + n; frameMax > 0 && size > frameMax {
		return fmt.Errorf("%w: headers and properties have %d bytes encoded, the broker's frames hold %d", ErrRefused, size, frameMax)
	}
	return nil
}

// tableSize returns how many bytes t has on the wire.
func tableSize(t message.Headers, depth int) (int, error) {
	if depth > maxDepth {
		return 0, fmt.Errorf("%w: headers are nested deeper than %d", ErrRefused, maxDepth)
	}
	if len(t) > maxEntries {
		return 0, fmt.Errorf("%w: a header table has %d entries, readers take %d", ErrRefused, len(t), maxEntries)
	}
	size := 4
	for k, v := range t {
		if len(k) > maxShort {
			return 0, fmt.Errorf("%w: a header name has %d bytes, AMQP allows %d", ErrRefused, len(k), maxShort)
		}
		n, err := fieldSize(v, depth)
		if err != nil {
			return 0, fmt.Errorf("%w (header %q)", err, k)
		}
		size += 1 + len(k) + n
	}
	return size, nil
}

// fieldSize returns how many bytes v has on the wire with its type.
func fieldSize(v any, depth int) (int, error) {
	switch v := v.(type) {
	case nil:
		return 1, nil
	case bool, int8, uint8:
		return 1 + 1, nil
	case int16, uint16:
		return 1 + 2, nil
	case int32, uint32:
		return 1 + 4, nil
	case float32:
		return 1 + 4, checkFloat(float64(v))
	case message.Decimal:
		return 1 + 5, nil
	case int, int64, time.Time:
		return 1 + 8, nil
	case float64:
		return 1 + 8, checkFloat(v)
	case string:
		return 1 + 4 + len(v), nil
	case []byte:
		return 1 + 4 + len(v), nil
	case message.Headers:
		n, err := tableSize(v, depth+1)
		return 1 + n, err
	case []any:
		return listSize(v, depth+1)
	}
	return 0, fmt.Errorf("%w: AMQP has no type for %T", ErrRefused, v)
}

// checkFloat refuses what Erlang has no number for: RabbitMQ closes the connection over it
// with 541 INTERNAL_ERROR.
func checkFloat(f float64) error {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return fmt.Errorf("%w: RabbitMQ cannot read the number %v", ErrRefused, f)
	}
	return nil
}

func listSize(list []any, depth int) (int, error) {
	if depth > maxDepth {
		return 0, fmt.Errorf("%w: headers are nested deeper than %d", ErrRefused, maxDepth)
	}
	if len(list) > maxEntries {
		return 0, fmt.Errorf("%w: a list has %d entries, readers take %d", ErrRefused, len(list), maxEntries)
	}
	size := 1 + 4
	for _, v := range list {
		n, err := fieldSize(v, depth)
		if err != nil {
			return 0, err
		}
		size += n
	}
	return size, nil
}
