package message

import (
	"fmt"
	"strings"
	"time"

	"github.com/go-faster/jx"
)

// textProperties are the AMQP properties that are text, by their names.
var textProperties = []struct {
	name  string
	field func(p *Properties) *string
}{
	{"app_id", func(p *Properties) *string { return &p.AppID }},
	{"content_encoding", func(p *Properties) *string { return &p.ContentEncoding }},
	{"content_type", func(p *Properties) *string { return &p.ContentType }},
	{"correlation_id", func(p *Properties) *string { return &p.CorrelationID }},
	{"expiration", func(p *Properties) *string { return &p.Expiration }},
	{"message_id", func(p *Properties) *string { return &p.MessageID }},
	{"reply_to", func(p *Properties) *string { return &p.ReplyTo }},
	{"type", func(p *Properties) *string { return &p.Type }},
	{"user_id", func(p *Properties) *string { return &p.UserID }},
}

// Legible returns p with question marks for what is not UTF-8.
func (p Properties) Legible() Properties {
	for _, t := range textProperties {
		f := t.field(&p)
		*f = Legible(*f)
	}
	return p
}

// Legible returns text with question marks for what is not UTF-8. It is no longer than before.
func Legible(text string) string { return strings.ToValidUTF8(text, "?") }

// EncodeProperties returns p in the outbox's typed encoding: the AMQP property names.
func EncodeProperties(p Properties) ([]byte, error) {
	var e jx.Encoder
	e.ObjStart()
	for _, t := range textProperties {
		if v := *t.field(&p); v != "" {
			e.FieldStart(t.name)
			if err := encodeValue(&e, v); err != nil {
				return nil, fmt.Errorf("%s: %w", t.name, err)
			}
		}
	}
	if p.DeliveryMode != 0 {
		e.FieldStart("delivery_mode")
		e.UInt8(p.DeliveryMode)
	}
	if p.Priority != 0 {
		e.FieldStart("priority")
		e.UInt8(p.Priority)
	}
	if !p.Timestamp.IsZero() {
		e.FieldStart("timestamp")
		if err := encodeValue(&e, p.Timestamp); err != nil {
			return nil, fmt.Errorf("timestamp: %w", err)
		}
	}
	e.ObjEnd()
	return e.Bytes(), nil
}

// DecodeProperties reads what EncodeProperties wrote, or what a writer in another language
// did: delivery_mode and priority are numbers, timestamp is {"$time":…} or Unix seconds. A name
// that is no property is an error: most likely it is a misspelt one.
func DecodeProperties(b []byte) (Properties, error) {
	var p Properties
	err := decodeObject(b, func(d *jx.Decoder, name string) error {
		v, err := decodeValue(d)
		if err == nil && v != nil {
			err = p.set(name, v)
		}
		return err
	})
	if err != nil {
		return Properties{}, fmt.Errorf("properties: %w", err)
	}
	return p, nil
}

func (p *Properties) set(name string, v any) error {
	switch name {
	case "delivery_mode", "priority":
		n, ok := v.(int64)
		if !ok || n < 0 || n > 255 {
			return fmt.Errorf("%s %v is not a number from 0 to 255", name, v)
		}
		if name == "priority" {
			p.Priority = uint8(n)
		} else {
			p.DeliveryMode = uint8(n)
		}
		return nil
	case "timestamp":
		switch v := v.(type) {
		case time.Time:
			p.Timestamp = v
		case int64:
			p.Timestamp = time.Unix(v, 0).UTC()
		default:
			return fmt.Errorf("timestamp %v is neither {\"$time\":…} nor Unix seconds", v)
		}
		return nil
	}
	for _, t := range textProperties {
		if t.name != name {
			continue
		}
		switch v := v.(type) {
		case string:
			*t.field(p) = v
		case []byte:
			*t.field(p) = string(v)
		default:
			return fmt.Errorf("%s %v is not text", name, v)
		}
		return nil
	}
	return fmt.Errorf("%q is no property", name)
}
