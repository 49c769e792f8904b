package amqp

import (
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
)

// publishing returns m as amqp091 writes it, persistent unless m says otherwise. It shares
// m's headers where they need no conversion. The error wraps ErrRefused.
func publishing(m *message.Message, frameMax int) (amqp091.Publishing, error) {
	if err := check(m, frameMax); err != nil {
		return amqp091.Publishing{}, err
	}
	mode := m.DeliveryMode
	if mode == 0 {
		mode = amqp091.Persistent
	}
	return amqp091.Publishing{
		Headers:         toTable(m.Headers),
		ContentType:     m.ContentType,
		ContentEncoding: m.ContentEncoding,
		DeliveryMode:    mode,
		Priority:        m.Priority,
		CorrelationId:   m.CorrelationID,
		ReplyTo:         m.ReplyTo,
		Expiration:      m.Expiration,
		MessageId:       m.MessageID,
		Timestamp:       m.Timestamp,
		Type:            m.Type,
		UserId:          m.UserID,
		AppId:           m.AppID,
		Body:            m.Body,
	}, nil
}

// delivery returns d, which came from queue, in our terms. It takes d's headers over.
func delivery(d *amqp091.Delivery, queue string) message.Delivery {
	ts := d.Timestamp
	if !ts.IsZero() {
		ts = ts.UTC()
	}
	why, unreadable := d.Headers[unreadableHeader].(string)
	if unreadable {
		d.Headers = nil
	}
	return message.Delivery{
		Unreadable: why,
		Message: message.Message{
			Properties: message.Properties{
				ContentType:     d.ContentType,
				ContentEncoding: d.ContentEncoding,
				DeliveryMode:    d.DeliveryMode,
				Priority:        d.Priority,
				CorrelationID:   d.CorrelationId,
				ReplyTo:         d.ReplyTo,
				Expiration:      d.Expiration,
				MessageID:       d.MessageId,
				Timestamp:       ts,
				Type:            d.Type,
				UserID:          d.UserId,
				AppID:           d.AppId,
			},
			Headers:    fromTable(d.Headers),
			Body:       d.Body,
			Exchange:   d.Exchange,
			RoutingKey: d.RoutingKey,
		},
		Queue:       queue,
		Tag:         d.DeliveryTag,
		Redelivered: d.Redelivered,
	}
}

// toTable returns h as a field table, h itself if no value needs conversion. check has found
// every value carriable.
func toTable(h message.Headers) amqp091.Table {
	for _, v := range h {
		if foreign(v) {
			t := make(amqp091.Table, len(h))
			for k, v := range h {
				t[k] = toField(v)
			}
			return t
		}
	}
	return amqp091.Table(h)
}

// foreign reports whether amqp091 would write v otherwise than we mean it.
func foreign(v any) bool {
	switch v.(type) {
	case int, message.Decimal, message.Headers, []any:
		return true
	}
	return false
}

func toField(v any) any {
	switch v := v.(type) {
	case int:
		return int64(v) // amqp091 would cut it to 32 bits
	case message.Decimal:
		return amqp091.Decimal(v)
	case message.Headers:
		return toTable(v)
	case []any:
		list := make([]any, len(v))
		for i := range v {
			list[i] = toField(v[i])
		}
		return list
	}
	return v
}

// fromTable turns t into headers in place.
func fromTable(t amqp091.Table) message.Headers {
	for k, v := range t {
		if f, changed := fromField(v); changed {
			t[k] = f
		}
	}
	return message.Headers(t)
}

func fromField(v any) (_ any, changed bool) {
	switch v := v.(type) {
	case amqp091.Table:
		return fromTable(v), true
	case amqp091.Decimal:
		return message.Decimal(v), true
	case time.Time:
		return v.UTC(), true
	case []any:
		if v == nil {
			return []any{}, true
		}
		for i := range v {
			if f, changed := fromField(v[i]); changed {
				v[i] = f
			}
		}
	}
	return v, false
}
