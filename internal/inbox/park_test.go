package inbox

import (
	"context"
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// full is a message with everything AMQP can carry.
func full() message.Message {
	return message.Message{
		Properties: message.Properties{
			ContentType: "application/x-thing", ContentEncoding: "gzip", DeliveryMode: 2, Priority: 7,
			CorrelationID: "about \xff", ReplyTo: "replies", MessageID: "order/17 \xfe ", Timestamp: time.Now().UTC().Truncate(time.Second),
			Type: "test", AppID: "a client",
		},
		Headers: message.Headers{
			"nil": nil, "bool": true, "int8": int8(-8), "int32": int32(-32), "int64": int64(math.MinInt64), "uint16": uint16(16),
			"float64": 0.1, "text": "grüße 😀", "not utf-8": "\xff\xfe", "bytes": []byte{0, 255}, "decimal": message.Decimal{Scale: 2, Value: -1999},
			"time": time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC), "table": message.Headers{"list": []any{int64(1), message.Headers{"a": "b"}}},
			message.HeaderTraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		},
		Body: []byte("\x00any \xff bytes"),
	}
}

// parkOne runs one message through a lane that parks it, and returns the copy.
func parkOne(t *testing.T, m message.Message, reason string) row {
	t.Helper()
	s := stage(t, Config{Handler: always(message.Park("%s", reason))}, m)
	s.settles(1)
	equal(t, "acked", s.b.ackedIDs(), []string{m.MessageID})
	if n := number(t, s.db, `SELECT COUNT(*) FROM inbox_messages`); n != 0 {
		t.Errorf("%d inbox rows, want none: its replay would be taken for a duplicate", n)
	}
	equal(t, "parked", s.stats.Parked.Load(), int64(1))
	r, _ := s.parked()
	return r
}

// parkedHeaders returns the headers of a parked copy without those that parking added.
func parkedHeaders(t *testing.T, r row, reason string) message.Headers {
	t.Helper()
	h := r.Headers
	if got := h.String(message.HeaderParkedReason); got != reason {
		t.Errorf("reason %q, want %q", got, reason)
	}
	if at, err := time.Parse(time.RFC3339Nano, h.String(message.HeaderParkedAt)); err != nil || time.Since(at) > time.Minute {
		t.Errorf("parked at %q", h.String(message.HeaderParkedAt))
	}
	if h.String(message.HeaderParkedFrom) != "q" {
		t.Errorf("parked from %q", h.String(message.HeaderParkedFrom))
	}
	for _, name := range []string{message.HeaderParkedReason, message.HeaderParkedAt, message.HeaderParkedFrom, message.HeaderParkedAdded, message.HeaderOrderingKey} {
		delete(h, name) // the outbox adds the key to every message without one
	}
	return h
}

// keptAside returns, and takes away, the properties that a parked copy could not have.
func keptAside(t *testing.T, r row) message.Properties {
	t.Helper()
	kept, err := message.DecodeProperties([]byte(r.Headers.String(message.HeaderParkedProperties)))
	if err != nil {
		t.Fatal(err)
	}
	delete(r.Headers, message.HeaderParkedProperties)
	return kept
}

// legible is full's properties as the management UI can show them.
func legible(p message.Properties) message.Properties {
	p.MessageID, p.CorrelationID = "order/17 ? ", "about ?"
	return p
}

func TestParkedCopy(t *testing.T) {
	t.Parallel()
	m := full()
	r := parkOne(t, m, "why \xff not")
	if r.Exchange != message.ParkedExchange || r.RoutingKey != "q" || !r.Mandatory {
		t.Errorf("goes to %q %q, mandatory %t", r.Exchange, r.RoutingKey, r.Mandatory)
	}
	equal(t, "properties", r.Properties, legible(m.Properties))
	equal(t, "properties kept aside", keptAside(t, r), m.Properties)
	equal(t, "body", r.Body, m.Body)
	equal(t, "headers", parkedHeaders(t, r, "why \uFFFD not"), m.Headers)
}

// The broker checks user_id against who publishes, and expiration would drop the evidence.
func TestParkedCopyKeepsPropertiesAside(t *testing.T) {
	t.Parallel()
	m := full()
	m.UserID, m.Expiration = "somebody", "60000"
	r := parkOne(t, m, "no")
	equal(t, "properties kept aside", keptAside(t, r), m.Properties)
	m.UserID, m.Expiration = "", ""
	equal(t, "properties", r.Properties, legible(m.Properties))
	equal(t, "headers", parkedHeaders(t, r, "no"), m.Headers)
}

// unwrap reads the envelope of a parked copy.
func unwrap(t *testing.T, r row) (headers json.RawMessage, body []byte) {
	t.Helper()
	if r.Headers["x-parked-envelope"] != true {
		t.Fatalf("no envelope: headers %v", r.Headers)
	}
	var e struct {
		Headers json.RawMessage
		Body    []byte
	}
	if err := json.Unmarshal(r.Body, &e); err != nil {
		t.Fatal(err)
	}
	return e.Headers, e.Body
}

// Headers that would not fit beside what parking adds move into the body, with the headers
// on which a broker acts.
func TestParkedCopyInEnvelope(t *testing.T) {
	t.Parallel()
	for name, more := range map[string]message.Headers{
		"large":   {"large": strings.Repeat("x", 33<<10)},
		"routing": {"CC": []any{"payment", "shipping"}, "BCC": []any{"orders"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := full()
			m.UserID = "somebody"
			for k, v := range more {
				m.Headers[k] = v
			}
			r := parkOne(t, m, "no")
			headers, body := unwrap(t, r)
			equal(t, "body", body, m.Body)
			got, err := message.DecodeHeaders(headers)
			if err != nil {
				t.Fatal(err)
			}
			equal(t, "headers", got, m.Headers)
			equal(t, "properties kept aside", keptAside(t, r), m.Properties)
			m.UserID = ""
			equal(t, "properties", r.Properties, legible(m.Properties))
			parkedHeaders(t, r, "no")
		})
	}
}

// A header name is any bytes; JSON's keys are not. Nothing of such a table is lost.
func TestParkedCopyOfNamesThatAreNotUTF8(t *testing.T) {
	t.Parallel()
	m := message.Message{Properties: message.Properties{MessageID: "x", Type: "test"}, Body: []byte("body")}
	m.Headers = message.Headers{
		"\xff": "one", "plain": int32(7), "table": message.Headers{"\xfe": []any{message.Headers{"\xfd": []byte{1}}}},
	}
	r := parkOne(t, m, "no")
	headers, body := unwrap(t, r)
	equal(t, "body", body, m.Body)
	got, err := message.DecodeHeaders(headers)
	if err != nil {
		t.Fatal(err)
	}
	pair := func(name string, v any) any { return []any{name, v} }
	equal(t, "headers", got, message.Headers{"$pairs": []any{
		pair("plain", int32(7)),
		pair("table", message.Headers{"$pairs": []any{
			pair("\xfe", []any{message.Headers{"$pairs": []any{pair("\xfd", []byte{1})}}}),
		}}),
		pair("\xff", "one"),
	}})
	parkedHeaders(t, r, "no")
}

// A reason can hold whatever a handler puts into it, a header cannot.
func TestReasonsAreBounded(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("é", 100_000) + "\xff"
	outcome := map[string]message.Outcome{
		"park": message.Park("%s", long), "defer": {Kind: message.Deferred, Reason: long, After: time.Hour}, "retry": {Kind: message.Retry, Reason: long},
	}
	h := &effects{OutcomeFunc: func(_ context.Context, _ *sqltx.Tx, m *message.Message) message.Outcome { return outcome[m.MessageID] }}
	s := stage(t, Config{Handler: h, RetryBase: time.Hour, RetryMax: time.Hour}, msg("park"), msg("defer"), msg("retry"))
	s.settles(3)
	if n := len(h.calls()); n > 3 {
		t.Errorf("the handler was called %d times, want 3 at most: a reason was refused", n)
	}
	_, parked := s.parked()
	reasons := []string{parked}
	for _, r := range scheduledRows(t, s.db) {
		reasons = append(reasons, r.reason)
	}
	for _, r := range reasons {
		if len(r) > 5000 || !strings.HasPrefix(r, "éééé") {
			t.Errorf("reason of %d bytes: %.20s…", len(r), r)
		}
	}
	equal(t, "reasons", len(reasons), 3)
}
