package inbox

import (
	"encoding/base64"
	"maps"
	"slices"
	"strings"
	"time"

	"backstep/internal/message"
)

const (
	// maxParkedHeaders is how many bytes of headers a parked copy may carry; more move into
	// the body's envelope, because a header table must fit one frame.
	maxParkedHeaders = 32 << 10

	// maxParkedBody is the largest body that is parked with an INSERT; a larger one would look
	// like a lost connection. The broker dead-letters such a message whole, to the same queue.
	maxParkedBody = 4 << 20

	maxReason = 4 << 10
)

// parkable reports whether a copy of d can be made. If not, the broker has to dead-letter it.
func parkable(d *message.Delivery) bool { return len(d.Body) <= maxParkedBody && d.Unreadable == "" }

// parkedCopy returns d as it goes to <queue>.parked: original body, properties and headers,
// and why. The properties are kept in a header too if the copy cannot have them, or will have
// more: the broker checks user_id, and an expiration would drop the evidence. Unpark undoes it.
func parkedCopy(d *message.Delivery, reason string, now time.Time) message.Message {
	m := copyOf(d)
	m.Exchange, m.RoutingKey, m.Mandatory = message.ParkedExchange, d.Queue, true
	m.OrderingKey = m.CorrelationID
	if m.OrderingKey == "" {
		m.OrderingKey = d.Queue
	}
	m.AggregateType, m.AggregateID = "queue", d.Queue
	m.DeliveryMode = 2
	h, err := message.EncodeHeaders(m.Headers)
	if err != nil || len(h) > maxParkedHeaders || hasRouting(m.Headers) {
		m = envelope(m, h)
	}
	if len(m.MessageID) > message.MaxIDBytes {
		m.MessageID = "" // the outbox gives it one
	}
	// RabbitMQ 4's management UI shows nothing at all if a property among what it is to show is not
	// UTF-8. The outbox gives a message an id, a content type and an application if it has none.
	m.Properties = m.Legible()
	if m.Properties != d.Properties || m.MessageID == "" || m.ContentType == "" || m.AppID == "" {
		if p, err := message.EncodeProperties(d.Properties); err == nil { // text always encodes
			m.Headers[message.HeaderParkedProperties] = string(p)
		}
	}
	if added := absent(m.Headers, addedByOutbox); len(added) > 0 {
		m.Headers[message.HeaderParkedAdded] = added
	}
	m.Headers[message.HeaderParkedReason] = clip(reason)
	m.Headers[message.HeaderParkedAt] = now.UTC().Format(time.RFC3339Nano)
	m.Headers[message.HeaderParkedFrom] = d.Queue
	return m
}

// addedByOutbox are headers that the outbox gives to a message that has them not.
var addedByOutbox = []string{message.HeaderOrderingKey, message.HeaderTraceParent, message.HeaderTraceState}

// absent returns those names that h has not, as a header's value.
func absent(h message.Headers, names []string) (list []any) {
	for _, name := range names {
		if _, ok := h[name]; !ok {
			list = append(list, name)
		}
	}
	return list
}

// copyOf returns a copy of d that may be published and whose headers may be changed.
func copyOf(d *message.Delivery) message.Message {
	m := d.Message
	m.Headers = maps.Clone(d.Headers)
	if m.Headers == nil {
		m.Headers = message.Headers{}
	}
	m.UserID, m.Expiration = "", ""
	return m
}

// routing are headers with more routing keys: the broker sends a message to those too.
var routing = []string{"CC", "BCC"}

func hasRouting(h message.Headers) bool {
	return slices.ContainsFunc(routing, func(name string) bool { _, ok := h[name]; return ok })
}

// envelope moves headers into the body: {"headers":…,"body":…} with the body as base64.
// encoded is nil if the headers cannot be written with their names as keys.
func envelope(m message.Message, encoded []byte) message.Message {
	if encoded == nil {
		encoded, _ = message.EncodeHeaders(pairs(m.Headers).(message.Headers)) // any text is a value
	}
	body := slices.Concat([]byte(`{"headers":`), encoded, []byte(`,"body":"`))
	body = base64.StdEncoding.AppendEncode(body, m.Body)
	m.Body = append(body, `"}`...)
	m.Headers = message.Headers{message.HeaderParkedEnvelope: true}
	return m
}

// pairs writes each table as {"$pairs":[[name, value], …]}: a name may be any bytes, a key
// in JSON not.
func pairs(v any) any {
	switch v := v.(type) {
	case message.Headers:
		list := make([]any, 0, len(v))
		for _, name := range slices.Sorted(maps.Keys(v)) {
			list = append(list, []any{name, pairs(v[name])})
		}
		return message.Headers{"$pairs": list}
	case []any:
		list := make([]any, len(v))
		for i := range v {
			list[i] = pairs(v[i])
		}
		return list
	}
	return v
}

// clip returns s as valid text, short enough for a header and for our tables.
func clip(s string) string { return clipTo(s, maxReason) }

// clipTo returns s as valid text of not much more than n bytes.
func clipTo(s string, n int) string {
	if len(s) > n {
		s = s[:n] + " …"
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
