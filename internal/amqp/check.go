package amqp

import (
	"fmt"

	"backstep/internal/message"
)

const maxShort = 255 // bytes of a short string

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
	n, err := m.Headers.WireSize()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrRefused, err)
	}
	// Class, weight, body size, flags; the rest of the properties; the frame around them.
	const fixed = 2 + 2 + 8 + 2 + 1 + 1 + 8 + 8
	if size := fixed + properties + n; frameMax > 0 && size > frameMax {
		return fmt.Errorf("%w: headers and properties have %d bytes encoded, the broker's frames hold %d", ErrRefused, size, frameMax)
	}
	return nil
}
