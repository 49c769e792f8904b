package inbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
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

func park(reason string) func(context.Context, *sqltx.Tx, *message.Message) message.Outcome {
	return func(context.Context, *sqltx.Tx, *message.Message) message.Outcome {
		return message.Park("%s", reason)
	}
}

// parkOne runs one message through a lane that parks it, and returns the copy.
func parkOne(t *testing.T, m message.Message, reason string) row {
	t.Helper()
	db := database(t)
	b := newBroker("q", m)
	l := run(t, db, b, Config{Queue: "q", Handler: &effects{OutcomeFunc: park(reason)}})
	eventually(t, "it is acked", b.settled(1))
	equal(t, "acked", b.ackedIDs(), []string{m.MessageID})
	if n := number(t, db, `SELECT COUNT(*) FROM inbox_messages`); n != 0 {
		t.Errorf("%d inbox rows, want none: its replay would be taken for a duplicate", n)
	}
	equal(t, "parked", l.stats.Parked.Load(), int64(1))
	return one(t, "outbox rows", outboxRows(t, db, "TRUE"))
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
	db := database(t)
	long := strings.Repeat("é", 100_000) + "\xff"
	outcome := map[string]message.Outcome{
		"park": message.Park("%s", long), "defer": {Kind: message.Deferred, Reason: long, After: time.Hour}, "retry": {Kind: message.Retry, Reason: long},
	}
	b := newBroker("q", msg("park"), msg("defer"), msg("retry"))
	h := &effects{OutcomeFunc: func(_ context.Context, _ *sqltx.Tx, m *message.Message) message.Outcome { return outcome[m.MessageID] }}
	run(t, db, b, Config{Queue: "q", Handler: h, RetryBase: time.Hour, RetryMax: time.Hour})
	eventually(t, "all are acked", b.settled(3))
	if n := len(h.calls()); n > 3 {
		t.Errorf("the handler was called %d times, want 3 at most: a reason was refused", n)
	}
	reasons := []string{one(t, "outbox rows", outboxRows(t, db, "TRUE")).Headers.String(message.HeaderParkedReason)}
	for _, r := range scheduledRows(t, db) {
		reasons = append(reasons, r.reason)
	}
	for _, r := range reasons {
		if len(r) > 5000 || !strings.HasPrefix(r, "éééé") {
			t.Errorf("reason of %d bytes: %.20s…", len(r), r)
		}
	}
	equal(t, "reasons", len(reasons), 3)
}

func TestDeferred(t *testing.T) {
	t.Parallel()
	db := database(t)
	m := full()
	m.Headers[message.HeaderOrderingKey] = "saga-1"
	m.UserID, m.Expiration = "somebody", "60000"
	b := newBroker("q", m)
	h := &effects{OutcomeFunc: func(context.Context, *sqltx.Tx, *message.Message) message.Outcome {
		return message.Outcome{Kind: message.Deferred, Reason: "not yet", After: time.Hour}
	}}
	l := run(t, db, b, Config{Queue: "q", Handler: h, DeferLimit: time.Minute})
	eventually(t, "it is acked", b.settled(1))
	r := one(t, "scheduled rows", scheduledRows(t, db))
	if r.Exchange != message.CommandsExchange || r.RoutingKey != "q" || !r.Mandatory || r.OrderingKey != "saga-1" || r.reason != "not yet" {
		t.Errorf("comes back to %q %q, mandatory %t, key %q, because %q", r.Exchange, r.RoutingKey, r.Mandatory, r.OrderingKey, r.reason)
	}
	if r.due < 59*time.Minute || r.due > time.Hour {
		t.Errorf("due in %s, want an hour", r.due)
	}
	since := r.Headers.String(message.HeaderDeferredSince)
	if at, err := time.Parse(time.RFC3339Nano, since); err != nil || time.Since(at) > time.Minute {
		t.Errorf("deferred since %q", since)
	}
	m.UserID, m.Expiration = "", ""
	equal(t, "properties", r.Properties, m.Properties) // the id too
	m.Headers[message.HeaderDeferredSince] = since
	equal(t, "headers", r.Headers, m.Headers)
	if recorded(t, db, "q", m.MessageID) {
		t.Error("it is recorded: when it comes back it is a duplicate")
	}

	// It comes back, and is not a duplicate; the first time stays.
	b.put(r.Message)
	eventually(t, "it is acked", b.settled(2))
	equal(t, "deferred since", scheduledRows(t, db)[1].Headers.String(message.HeaderDeferredSince), since)

	// After the limit it is parked.
	r.Headers[message.HeaderDeferredSince] = time.Now().Add(-2 * time.Minute).Format(time.RFC3339Nano)
	b.put(r.Message)
	eventually(t, "it is acked", b.settled(3))
	parked := one(t, "outbox rows", outboxRows(t, db, "TRUE"))
	if got := parked.Headers.String(message.HeaderParkedReason); got != "not yet, for longer than 1m0s" || parked.MessageID != "order/17 ? " {
		t.Errorf("parked %q because %q", parked.MessageID, got)
	}
	if s := l.stats.Snapshot(); s.Deferred != 2 || s.Parked != 1 || s.Duplicates != 0 {
		t.Errorf("stats %+v, want 2 deferred and 1 parked", s)
	}
}

func TestRetry(t *testing.T) {
	t.Parallel()
	db := database(t)
	m := full()
	first := m.MessageID
	b := newBroker("q", m)
	h := &effects{OutcomeFunc: func(context.Context, *sqltx.Tx, *message.Message) message.Outcome {
		return message.Outcome{Kind: message.Retry, Reason: "not now"}
	}}
	l := run(t, db, b, Config{Queue: "q", Handler: h, MaxAttempts: 3, RetryBase: time.Hour, RetryMax: time.Hour})
	for attempt := 2; attempt <= 3; attempt++ {
		eventually(t, "it is acked", b.settled(attempt-1))
		if !recorded(t, db, "q", m.MessageID) {
			t.Errorf("the failed attempt %d is not recorded", attempt-1)
		}
		r := one(t, "scheduled rows", scheduledRows(t, db))
		exec(t, db, `DELETE FROM scheduled_messages`)
		if r.MessageID == m.MessageID || r.RequestID() != first || r.Attempt() != attempt || r.reason != "not now" {
			t.Errorf("next attempt: id %q, request %q, attempt %d, reason %q", r.MessageID, r.RequestID(), r.Attempt(), r.reason)
		}
		if r.due > time.Hour || r.RoutingKey != "q" || r.Exchange != message.CommandsExchange || !r.Mandatory {
			t.Errorf("due in %s at %q %q", r.due, r.Exchange, r.RoutingKey)
		}
		equal(t, "body", r.Body, m.Body)
		m = r.Message
		b.put(m)
	}
	eventually(t, "it is acked", b.settled(3))
	parked := one(t, "outbox rows", outboxRows(t, db, "TRUE"))
	if got := parked.Headers.String(message.HeaderParkedReason); got != "failed 3 times: not now" || parked.MessageID != m.MessageID {
		t.Errorf("parked %q because %q", parked.MessageID, got)
	}
	if recorded(t, db, "q", m.MessageID) {
		t.Error("the parked attempt is recorded")
	}
	if s := l.stats.Snapshot(); s.Retried != 2 || s.Parked != 1 {
		t.Errorf("stats %+v, want 2 retried and 1 parked", s)
	}
}

// What comes back goes to the queue it came from and to no other, whatever its headers say.
func TestComesBackToOneQueue(t *testing.T) {
	t.Parallel()
	db := database(t)
	m := msg("m")
	m.Headers = message.Headers{"CC": []any{"payment"}, "BCC": []any{"shipping"}, message.HeaderOrderingKey: strings.Repeat("k", 300)}
	b := newBroker("q", m)
	h := &effects{OutcomeFunc: func(context.Context, *sqltx.Tx, *message.Message) message.Outcome {
		return message.Outcome{Kind: message.Retry, Reason: "not now"}
	}}
	run(t, db, b, Config{Queue: "q", Handler: h})
	eventually(t, "it is acked", b.settled(1))
	r := one(t, "scheduled rows", scheduledRows(t, db))
	if r.Headers["CC"] != nil || r.Headers["BCC"] != nil {
		t.Errorf("headers %v: the broker would send copies to other queues", r.Headers)
	}
}

func TestRetryDelay(t *testing.T) {
	for _, base := range []time.Duration{1, time.Millisecond, time.Second, time.Minute, 24 * time.Hour, math.MaxInt64} {
		l := NewLane(nil, nil, Config{RetryBase: base, RetryMax: 5 * time.Minute}, nil)
		for _, n := range []int{1, 2, 10, 29, 30, 31, 62, 63, 64, 65, 1000, math.MaxInt} {
			limit := time.Duration(min(float64(5*time.Minute), float64(base)*math.Pow(2, float64(n-1))))
			var longest time.Duration
			for range 200 {
				d := l.retryDelay(n)
				if d < 0 || d >= max(limit, 1) {
					t.Fatalf("base %s, attempt %d: %s, want less than %s", base, n, d, limit)
				}
				longest = max(longest, d)
			}
			if longest < limit/2 {
				t.Errorf("base %s, attempt %d: never longer than %s of %s", base, n, longest, limit)
			}
		}
	}
}

// uuidv7 returns an id that was made at t.
func uuidv7(t time.Time) string {
	ms := t.UnixMilli()
	return fmt.Sprintf("%08x-%04x-7000-8000-%012x", ms>>16, ms&0xffff, ms)
}

func TestUnfit(t *testing.T) {
	t.Parallel()
	const retention = 24 * time.Hour
	old, ahead := time.Now().Add(-retention-time.Minute), time.Now().Add(14*time.Hour)
	with := func(id string, at time.Time, body int) message.Message {
		return message.Message{Properties: message.Properties{MessageID: id, Timestamp: at, Type: "test"}, Body: bytes.Repeat([]byte("b"), body)}
	}
	tests := []struct {
		name string
		m    message.Message
		want string // part of the reason; "": processed
	}{
		{"fits", with("a", time.Now(), 1000), ""},
		{"no timestamp", with("b", time.Time{}, 1), ""},
		{"almost too old", with("c", time.Now().Add(-retention+time.Minute), 1), ""},
		{"longest id", with(strings.Repeat("i", 255), time.Now(), 1), ""},
		{"an hour ahead", with("d", time.Now().Add(time.Hour), 1), ""},
		{"no id", with("", time.Now(), 1), "no message_id"},
		{"id too long", with(strings.Repeat("i", 256), time.Now(), 1), "message_id of 256 bytes"},
		{"body too large", with("e", time.Now(), 1001), "body of 1001 bytes; 1000 is the limit"},
		{"old by timestamp", with("f", old, 1), "longer ago than duplicates are known (24h0m0s)"},
		{"old by id", with(uuidv7(old), time.Now(), 1), "longer ago than duplicates are known"},
		{"young by id", with(uuidv7(time.Now()), old, 1), ""},
		// Its record would be swept while it is still young.
		{"of the future by timestamp", with("g", ahead, 1), "in the future"},
		{"of the future by id", with(uuidv7(ahead), time.Now(), 1), "in the future"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			db := database(t)
			neighbour := msg("neighbour")
			b := newBroker("q", tt.m, neighbour)
			h := &effects{}
			l := run(t, db, b, Config{Queue: "q", Handler: h, MaxBody: 1000, Retention: retention})
			eventually(t, "it and its neighbour are acked", b.settled(2))
			equal(t, "effects of the neighbour", effectsOf(t, db, "neighbour"), 1)
			if tt.want == "" {
				if l.stats.Done.Load() != 2 || !recorded(t, db, "q", tt.m.MessageID) {
					t.Errorf("not processed: %+v", l.stats.Snapshot())
				}
				return
			}
			equal(t, "parked", l.stats.Parked.Load(), int64(1))
			r := one(t, "outbox rows", outboxRows(t, db, "TRUE"))
			if got := r.Headers.String(message.HeaderParkedReason); !strings.Contains(got, tt.want) {
				t.Errorf("parked because %q, want %q", got, tt.want)
			}
			equal(t, "body", r.Body, tt.m.Body)
			properties := r.Properties
			if kept := r.Headers.String(message.HeaderParkedProperties); kept != "" {
				var err error
				if properties, err = message.DecodeProperties([]byte(kept)); err != nil {
					t.Fatal(err)
				}
			}
			equal(t, "id", properties.MessageID, tt.m.MessageID)
			if len(h.calls()) > 1 || recorded(t, db, "q", tt.m.MessageID) {
				t.Errorf("handler called with %v", h.calls())
			}
		})
	}
}

// A message that does not fit must not swallow one with the same id that does.
func TestUnfitIsNoFirstCopy(t *testing.T) {
	t.Parallel()
	db := database(t)
	entered, gate := make(chan struct{}, 100), make(chan struct{})
	h := &effects{BatchFunc: func(context.Context, *sqltx.Tx, []string) { entered <- struct{}{}; <-gate }}
	b := newBroker("q", msg("opener"))
	run(t, db, b, Config{Queue: "q", Handler: h, MaxBody: 1000})
	receive(t, "the opener", entered)
	large := msg("same")
	large.Body = make([]byte, 1001)
	b.put(large, msg("same"))
	close(gate)
	eventually(t, "all are acked", b.settled(3))
	equal(t, "effects", effectsOf(t, db, "same"), 1)
	one(t, "outbox rows", outboxRows(t, db, "TRUE"))
}

// Bodies over 4 MiB are not for an INSERT: the broker dead-letters them whole. Whoever waits
// for them is told all the same.
func TestHugeBodyIsDeadLettered(t *testing.T) {
	t.Parallel()
	db := database(t)
	var told []string
	huge := msg("huge")
	huge.Body = make([]byte, 4<<20+1)
	b := newBroker("q", msg("before"), huge, msg("after"), huge)
	h := &effects{}
	l := run(t, db, b, Config{Queue: "q", Handler: h, Parked: func(_ context.Context, _ *sqltx.Tx, m *message.Message, reason string) error {
		told = append(told, m.MessageID+": "+reason)
		return nil
	}})
	eventually(t, "all are settled", b.settled(4))
	b.look(func() {
		equal(t, "dead-lettered", b.dead, []string{"huge", "huge"})
		equal(t, "acked", b.acked, []string{"before", "after"})
		equal(t, "faults", b.faults, []string(nil))
	})
	equal(t, "outbox rows", outboxRows(t, db, "TRUE"), []row(nil))
	l.stop()
	if len(told) == 0 || !strings.Contains(told[0], "huge: body of 4194305 bytes") {
		t.Errorf("told %q", told)
	}
}

// B69: Sweep never removes the record of a message that a lane would still process.
func TestSweepKeepsWhatALaneAccepts(t *testing.T) {
	t.Parallel()
	db := database(t)
	const retention = time.Hour
	l := NewLane(db, nil, Config{Queue: "q", Retention: retention}, &Stats{})
	// Processed at any time since they were made, made at any time a lane accepts; then the
	// clocks go on until the sweep takes the record.
	type made struct{ at, processed time.Duration } // before now
	var accepted []made
	var records []any
	for at := -20 * time.Hour; at <= 60*time.Hour; at += 5 * time.Hour / 6 {
		for processed := time.Duration(0); processed <= 60*time.Hour; processed += 5 * time.Hour / 4 {
			m := made{at, processed}
			d := func(now time.Duration) *message.Delivery { // as seen that long before now
				return &message.Delivery{Message: msg(uuidv7(time.Now().Add(now - m.at)))}
			}
			if l.unfit(d(m.processed)) != "" {
				continue // it was never processed
			}
			if l.unfit(d(0)) == "" {
				accepted = append(accepted, m)
			}
			records = append(records, fmt.Appendf(nil, "%d/%d", m.at, m.processed), int(m.processed.Seconds()))
		}
	}
	total := len(records) / 2
	exec(t, db, `INSERT INTO inbox_messages (consumer, message_id, processed_at) VALUES `+
		strings.Repeat(`('q', ?, NOW(6) - INTERVAL ? SECOND), `, total-1)+`('q', ?, NOW(6) - INTERVAL ? SECOND)`, records...)
	var swept int64
	for {
		n, err := Sweep(t.Context(), db, retention, 70)
		if err != nil {
			t.Fatal(err)
		}
		if n > 70 {
			t.Fatalf("swept %d at once, 70 is the limit", n)
		}
		if swept += n; n == 0 {
			break
		}
	}
	for _, m := range accepted {
		if !recorded(t, db, "q", fmt.Sprintf("%d/%d", m.at, m.processed)) {
			t.Errorf("made %s ago, processed %s ago: a lane accepts it and its record was swept", m.at, m.processed)
		}
	}
	if len(accepted) == 0 || swept == 0 || int(swept) == total {
		t.Errorf("%d accepted, %d of %d swept: the test shows nothing", len(accepted), swept, total)
	}
}

func TestUnknownTypeIsParked(t *testing.T) {
	t.Parallel()
	db := database(t)
	h, sagas := &effects{}, &effects{}
	known, unknown, saga := msg("known"), msg("unknown"), msg("saga")
	unknown.Type = "no.such\xff"
	saga.Type, saga.Headers = "whatever", message.Headers{message.HeaderSagaID: []byte("s1")}
	entered, gate := make(chan struct{}, 100), make(chan struct{})
	h.BatchFunc = func(context.Context, *sqltx.Tx, []string) { entered <- struct{}{}; <-gate }
	b := newBroker("q", msg("opener"))
	run(t, db, b, Config{Queue: "q", Handler: &Mux{Types: map[string]Handler{"test": h, "test2": h}, Sagas: sagas}})
	receive(t, "the opener", entered)
	known2 := msg("known2")
	known2.Type = "test2"
	b.put(unknown, saga, known, known2)
	close(gate)
	eventually(t, "all are acked", b.settled(5))
	r := one(t, "outbox rows", outboxRows(t, db, "TRUE"))
	if r.MessageID != "unknown" || !strings.Contains(r.Headers.String(message.HeaderParkedReason), `unknown message type "no.such\xff"`) {
		t.Errorf("parked %q because %q", r.MessageID, r.Headers.String(message.HeaderParkedReason))
	}
	equal(t, "to the handler", h.calls(), [][]string{{"opener"}, {"known", "known2"}})
	equal(t, "to the sagas", sagas.calls(), [][]string{{"saga"}})
	// Without a handler for sagas their messages are unknown too.
	out := (&Mux{}).HandleBatch(t.Context(), nil, []message.Message{saga})
	equal(t, "outcome", out[0].Kind, message.Parked)
}

// In a transaction that has ended no other handler is called.
func TestMuxStopsWithItsTransaction(t *testing.T) {
	t.Parallel()
	db := database(t)
	fails, other := &effects{BatchFunc: func(_ context.Context, tx *sqltx.Tx, _ []string) { tx.Fail(errors.New("gone")) }}, &effects{}
	m1, m2 := msg("1"), msg("2")
	m2.Type = "other"
	err := sqltx.Once(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		(&Mux{Types: map[string]Handler{"test": fails, "other": other}}).HandleBatch(ctx, tx, []message.Message{m1, m2})
		return nil
	})
	if err == nil || len(other.calls()) > 0 {
		t.Errorf("error %v, the other handler was called %d times", err, len(other.calls()))
	}
}

// A panic harms no neighbour: they are processed once, and for the culprit a failed attempt
// is counted.
func TestPanic(t *testing.T) {
	t.Parallel()
	db := database(t)
	msgs := newMsgs(9)
	culprit := msgs[4].MessageID
	b := newBroker("q", msgs...)
	h := &effects{OutcomeFunc: func(_ context.Context, _ *sqltx.Tx, m *message.Message) message.Outcome {
		if m.RequestID() == culprit {
			panic("boom")
		}
		return message.Outcome{}
	}}
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 8, MaxAttempts: 2, RetryBase: time.Hour, RetryMax: time.Hour})
	eventually(t, "all are acked", b.settled(9))
	for _, m := range msgs {
		want := 1
		if m.MessageID == culprit {
			want = 0
		}
		if n := effectsOf(t, db, m.MessageID); n != want {
			t.Errorf("%d effects of %s, want %d", n, m.MessageID, want)
		}
	}
	r := one(t, "scheduled rows", scheduledRows(t, db))
	if r.RequestID() != culprit || r.Attempt() != 2 || r.reason != "panic in handler: boom" {
		t.Errorf("next attempt of %q: attempt %d because %q", r.RequestID(), r.Attempt(), r.reason)
	}
	b.put(r.Message)
	eventually(t, "all are acked", b.settled(10))
	parked := one(t, "outbox rows", outboxRows(t, db, "TRUE"))
	if got := parked.Headers.String(message.HeaderParkedReason); got != "failed 2 times: panic in handler: boom" {
		t.Errorf("parked because %q", got)
	}
	if s := l.stats.Snapshot(); s.Done != 8 || s.Retried != 1 || s.Parked != 1 || s.Duplicates != 0 {
		t.Errorf("stats %+v", s)
	}
	equal(t, "faults", b.faults, []string(nil))
}

// A handler that fails on every try, even when it need only count the attempt, has its
// message parked by the lane.
func TestHandlerThatAlwaysFails(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(tx *sqltx.Tx){
		"panic":           func(*sqltx.Tx) { panic("boom") },
		"the transaction": func(tx *sqltx.Tx) { tx.Fail(errors.New("boom")) },
		"a statement": func(tx *sqltx.Tx) {
			_, err := tx.Exec(context.Background(), `INSERT INTO no_such_table VALUES (1)`)
			tx.Fail(fmt.Errorf("boom: %w", err))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := database(t)
			msgs := newMsgs(6)
			culprit := msgs[2].MessageID
			var told []string
			b := newBroker("q", msgs...)
			h := &effects{BatchFunc: func(_ context.Context, tx *sqltx.Tx, ids []string) {
				if slices.Contains(ids, culprit) {
					fail(tx)
				}
			}}
			l := run(t, db, b, Config{Queue: "q", Handler: h, Parked: func(_ context.Context, _ *sqltx.Tx, m *message.Message, reason string) error {
				told = append(told, m.MessageID)
				return nil
			}})
			eventually(t, "all are acked", b.settled(6))
			l.stop()
			r := one(t, "outbox rows", outboxRows(t, db, "TRUE"))
			reason := r.Headers.String(message.HeaderParkedReason)
			if r.MessageID != culprit || !strings.Contains(reason, "boom") || strings.Contains(reason, "goroutine") {
				t.Errorf("parked %s because %q", r.MessageID, reason)
			}
			equal(t, "told", told, []string{culprit})
			equal(t, "effects", number(t, db, `SELECT COUNT(*) FROM effects`), 5)
			equal(t, "records", number(t, db, `SELECT COUNT(*) FROM inbox_messages`), 5)
		})
	}
}

// If a message cannot even be parked because of what is in it, the broker dead-letters it,
// and its neighbours go on.
func TestCannotBeParked(t *testing.T) {
	t.Parallel()
	db := database(t)
	msgs := newMsgs(6)
	culprit := msgs[2].MessageID
	b := newBroker("q", msgs...)
	h := &effects{OutcomeFunc: func(_ context.Context, _ *sqltx.Tx, m *message.Message) message.Outcome {
		if m.MessageID == culprit {
			return message.Park("no")
		}
		return message.Outcome{}
	}}
	run(t, db, b, Config{Queue: "q", Handler: h, MaxAttempts: 1,
		Parked: func(context.Context, *sqltx.Tx, *message.Message, string) error { panic("boom") }})
	eventually(t, "all are settled", b.settled(6))
	b.look(func() {
		equal(t, "dead-lettered", b.dead, []string{culprit})
		equal(t, "acked", len(b.acked), 5)
		equal(t, "faults", b.faults, []string(nil))
	})
	equal(t, "effects", number(t, db, `SELECT COUNT(*) FROM effects`), 5)
}

// A handler that gives the wrong number of outcomes is as good as one that panics.
func TestWrongNumberOfOutcomes(t *testing.T) {
	t.Parallel()
	db := database(t)
	b := newBroker("q", msg("m"))
	run(t, db, b, Config{Queue: "q", Handler: noOutcomes{}})
	eventually(t, "it is acked", b.settled(1))
	r := one(t, "outbox rows", outboxRows(t, db, "TRUE"))
	if got := r.Headers.String(message.HeaderParkedReason); !strings.Contains(got, "0 outcomes for 1 messages") {
		t.Errorf("parked because %q", got)
	}
}

type noOutcomes struct{}

func (noOutcomes) HandleBatch(context.Context, *sqltx.Tx, []message.Message) []message.Outcome {
	return nil
}
