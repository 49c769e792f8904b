package message

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"time"
	"unicode/utf8"
)

// The outbox keeps properties and headers as JSON objects that a writer in any language can
// build: null, true, "text" and 42 mean nil, bool, string and int64. Everything JSON cannot
// say is an object with one member naming its AMQP type, the value as text:
//
//	{"$int32":"42"}  {"$float64":"0.5"}  {"$bytes":"aGk="}  {"$text":"/w=="}  {"$time":"2026-11-29T12:00:00Z"}
//	{"$decimal":"2,1999"}  {"$table":{…}}  {"$list":[…]}
//
// $bytes and $text are base64; $text is a string that is not valid UTF-8.

// EncodeHeaders returns h in the outbox's typed encoding. The error names the header whose
// value AMQP cannot carry.
func EncodeHeaders(h Headers) ([]byte, error) {
	v, err := encodeTable(h)
	if err != nil {
		return nil, err
	}
	return json.Marshal(v)
}

// DecodeHeaders reads what EncodeHeaders wrote. Empty input is an empty table.
func DecodeHeaders(b []byte) (Headers, error) {
	if len(bytes.TrimSpace(b)) == 0 {
		return Headers{}, nil
	}
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(b, &raw); err != nil {
		return nil, fmt.Errorf("decode headers: %w", err)
	}
	return decodeTable(raw)
}

func encodeTable(h Headers) (map[string]any, error) {
	out := make(map[string]any, len(h))
	for k, v := range h {
		if !utf8.ValidString(k) {
			return nil, fmt.Errorf("header name %q is not valid UTF-8", k)
		}
		e, err := encodeValue(v)
		if err != nil {
			return nil, fmt.Errorf("header %q: %w", k, err)
		}
		out[k] = e
	}
	return out, nil
}

func tagged(tag, v string) (any, error) { return map[string]string{tag: v}, nil }

func encodeValue(v any) (any, error) {
	switch v := v.(type) {
	case nil, bool, int64:
		return v, nil
	case int:
		return int64(v), nil
	case string:
		if utf8.ValidString(v) {
			return v, nil
		}
		return tagged("$text", base64.StdEncoding.EncodeToString([]byte(v)))
	case []byte:
		return tagged("$bytes", base64.StdEncoding.EncodeToString(v))
	case int8, int16, int32, uint8, uint16, uint32:
		return tagged(fmt.Sprintf("$%T", v), fmt.Sprint(v))
	case float32:
		return tagged("$float32", strconv.FormatUint(uint64(math.Float32bits(v)), 16))
	case float64:
		return tagged("$float64", strconv.FormatFloat(v, 'g', -1, 64))
	case time.Time:
		return tagged("$time", v.UTC().Format(time.RFC3339Nano))
	case Decimal:
		return tagged("$decimal", fmt.Sprintf("%d,%d", v.Scale, v.Value))
	case Headers:
		t, err := encodeTable(v)
		return map[string]any{"$table": t}, err
	case []any:
		list := make([]any, len(v))
		for i := range v {
			e, err := encodeValue(v[i])
			if err != nil {
				return nil, err
			}
			list[i] = e
		}
		return map[string]any{"$list": list}, nil
	}
	return nil, fmt.Errorf("type %T has no AMQP field type", v)
}

func decodeTable(raw map[string]json.RawMessage) (Headers, error) {
	h := make(Headers, len(raw))
	for k, r := range raw {
		v, err := decodeValue(r)
		if err != nil {
			return nil, fmt.Errorf("header %q: %w", k, err)
		}
		h[k] = v
	}
	return h, nil
}

func decodeValue(r json.RawMessage) (any, error) {
	r = bytes.TrimSpace(r)
	if len(r) > 0 && r[0] == '{' {
		return decodeTagged(r)
	}
	dec := json.NewDecoder(bytes.NewReader(r))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return nil, err
	}
	switch v := v.(type) {
	case json.Number:
		if n, err := v.Int64(); err == nil {
			return n, nil
		}
		return v.Float64()
	case []any:
		return nil, fmt.Errorf(`a list is written {"$list":[…]}`)
	}
	return v, nil
}

func decodeTagged(r json.RawMessage) (any, error) {
	var m map[string]json.RawMessage
	if err := json.Unmarshal(r, &m); err != nil {
		return nil, err
	}
	if len(m) != 1 {
		return nil, fmt.Errorf(`an object needs exactly one member naming its type, like {"$int32":"42"}`)
	}
	for tag, raw := range m {
		switch tag {
		case "$table":
			var t map[string]json.RawMessage
			if err := json.Unmarshal(raw, &t); err != nil {
				return nil, err
			}
			return decodeTable(t)
		case "$list":
			var l []json.RawMessage
			if err := json.Unmarshal(raw, &l); err != nil {
				return nil, err
			}
			list := make([]any, len(l))
			for i := range l {
				v, err := decodeValue(l[i])
				if err != nil {
					return nil, err
				}
				list[i] = v
			}
			return list, nil
		}
		var s string
		if err := json.Unmarshal(raw, &s); err != nil {
			return nil, fmt.Errorf("%s: %w", tag, err)
		}
		v, err := decodeScalar(tag, s)
		if err != nil {
			return nil, fmt.Errorf("%s %q: %w", tag, s, err)
		}
		return v, nil
	}
	panic("unreachable: one member was checked")
}

func decodeScalar(tag, s string) (any, error) {
	switch tag {
	case "$text":
		b, err := base64.StdEncoding.DecodeString(s)
		return string(b), err
	case "$bytes":
		return base64.StdEncoding.DecodeString(s)
	case "$int8":
		n, err := strconv.ParseInt(s, 10, 8)
		return int8(n), err
	case "$int16":
		n, err := strconv.ParseInt(s, 10, 16)
		return int16(n), err
	case "$int32":
		n, err := strconv.ParseInt(s, 10, 32)
		return int32(n), err
	case "$uint8":
		n, err := strconv.ParseUint(s, 10, 8)
		return uint8(n), err
	case "$uint16":
		n, err := strconv.ParseUint(s, 10, 16)
		return uint16(n), err
	case "$uint32":
		n, err := strconv.ParseUint(s, 10, 32)
		return uint32(n), err
	case "$float32":
		n, err := strconv.ParseUint(s, 16, 32)
		return math.Float32frombits(uint32(n)), err
	case "$float64":
		return strconv.ParseFloat(s, 64)
	case "$time":
		return time.Parse(time.RFC3339Nano, s)
	case "$decimal":
		var d Decimal
		_, err := fmt.Sscanf(s, "%d,%d", &d.Scale, &d.Value)
		return d, err
	}
	return nil, fmt.Errorf("unknown type")
}

// EncodeProperties returns p in the outbox's typed encoding: the AMQP property names.
func EncodeProperties(p Properties) ([]byte, error) {
	h := Headers{}
	set := func(name, v string) {
		if v != "" {
			h[name] = v
		}
	}
	set("content_type", p.ContentType)
	set("content_encoding", p.ContentEncoding)
	set("correlation_id", p.CorrelationID)
	set("reply_to", p.ReplyTo)
	set("expiration", p.Expiration)
	set("message_id", p.MessageID)
	set("type", p.Type)
	set("user_id", p.UserID)
	set("app_id", p.AppID)
	if p.DeliveryMode != 0 {
		h["delivery_mode"] = int64(p.DeliveryMode)
	}
	if p.Priority != 0 {
		h["priority"] = int64(p.Priority)
	}
	if !p.Timestamp.IsZero() {
		h["timestamp"] = p.Timestamp
	}
	return EncodeHeaders(h)
}

// DecodeProperties reads what EncodeProperties wrote, or what a writer in another language
// did: delivery_mode and priority are numbers, timestamp is {"$time":…} or Unix seconds.
func DecodeProperties(b []byte) (Properties, error) {
	h, err := DecodeHeaders(b)
	if err != nil {
		return Properties{}, fmt.Errorf("properties: %w", err)
	}
	p := Properties{
		ContentType: h.String("content_type"), ContentEncoding: h.String("content_encoding"),
		CorrelationID: h.String("correlation_id"), ReplyTo: h.String("reply_to"),
		Expiration: h.String("expiration"), MessageID: h.String("message_id"),
		Type: h.String("type"), UserID: h.String("user_id"), AppID: h.String("app_id"),
	}
	for name, dst := range map[string]*uint8{"delivery_mode": &p.DeliveryMode, "priority": &p.Priority} {
		if _, set := h[name]; !set {
			continue
		}
		n, ok := h.Int(name)
		if !ok || n < 0 || n > 255 {
			return Properties{}, fmt.Errorf("properties: %s %v is not a number from 0 to 255", name, h[name])
		}
		*dst = uint8(n)
	}
	switch ts := h["timestamp"].(type) {
	case nil:
	case time.Time:
		p.Timestamp = ts
	case int64:
		p.Timestamp = time.Unix(ts, 0).UTC()
	default:
		return Properties{}, fmt.Errorf("properties: timestamp %v is neither {\"$time\":…} nor Unix seconds", ts)
	}
	return p, nil
}
