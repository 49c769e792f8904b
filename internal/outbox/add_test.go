package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"go.opentelemetry.io/otel/trace"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

func TestAddKeepsOrderInOneInsert(t *testing.T) {
	t.Parallel()
	db := database(t)
	want := names("m", 500)
	var msgs []message.Message
	for _, id := range want {
		msgs = append(msgs, command("q", id))
	}
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		if err := outbox.Add(ctx, tx); err != nil || len(tx.Writes()) != 0 {
			t.Errorf("adding nothing: %v, %d statements", err, len(tx.Writes()))
		}
		err := outbox.Add(ctx, tx, msgs...)
		if n := len(tx.Writes()); n != 1 {
			t.Errorf("%d statements for %d messages, want 1", n, len(msgs))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "ids in the table's order", column(t, db, `SELECT message_id FROM outbox_events ORDER BY id`), want)
}

// column returns what a query for one column gives.
func column(t testing.TB, db *sql.DB, query string, args ...any) (out []string) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), query, args...)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var s sql.NullString
		if err := rows.Scan(&s); err != nil {
			t.Fatal(err)
		}
		out = append(out, s.String)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestAddRollsBackWithTheCaller(t *testing.T) {
	t.Parallel()
	db := database(t)
	boom := errors.New("boom")
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		return errors.Join(boom, outbox.Add(ctx, tx, command("q", "a")),
			outbox.Schedule(ctx, tx, outbox.Delayed{Message: command("q", "b")}))
	})
	if !errors.Is(err, boom) || len(strings.Split(err.Error(), "\n")) != 1 {
		t.Fatalf("the transaction gave %v", err)
	}
	if n := number(t, db, `SELECT (SELECT COUNT(*) FROM outbox_events) + (SELECT COUNT(*) FROM scheduled_messages)`); n != 0 {
		t.Errorf("%d rows of a transaction that was rolled back", n)
	}
}

func TestAddInvalid(t *testing.T) {
	t.Parallel()
	db := database(t)
	long := strings.Repeat("x", 256)
	tests := []struct {
		name string
		set  func(*message.Message)
		says string
	}{
		{"no exchange", func(m *message.Message) { m.Exchange = "" }, "no exchange"},
		{"message id", func(m *message.Message) { m.MessageID = long }, "message_id has 256 bytes"},
		{"ordering key", func(m *message.Message) { m.OrderingKey = long }, "ordering key has 256 bytes"},
		{"aggregate type", func(m *message.Message) { m.AggregateType = long }, "aggregate type"},
		{"aggregate id", func(m *message.Message) { m.AggregateID = long }, "aggregate id"},
		{"type", func(m *message.Message) { m.Type = long }, "type has"},
		{"exchange", func(m *message.Message) { m.Exchange = long }, "exchange has"},
		{"routing key", func(m *message.Message) { m.RoutingKey = long }, "routing key has"},
		{"idempotency key", func(m *message.Message) { m.IdempotencyKey = long }, "idempotency key"},
		{"correlation id", func(m *message.Message) { m.CorrelationID = long }, "correlation_id"},
		{"reply to", func(m *message.Message) { m.ReplyTo = long }, "reply_to"},
		{"app id", func(m *message.Message) { m.AppID = long }, "app_id"},
		{"user id", func(m *message.Message) { m.UserID = long }, "user_id"},
		{"expiration", func(m *message.Message) { m.Expiration = long }, "expiration"},
		{"content type", func(m *message.Message) { m.ContentType = long }, "content_type"},
		{"content encoding", func(m *message.Message) { m.ContentEncoding = long }, "content_encoding"},
		{"body", func(m *message.Message) { m.Body = make([]byte, 8<<20+1) }, "body has 8388609 bytes"}, // B19
		{"header type", func(m *message.Message) { m.Headers = message.Headers{"n": uint64(1)} }, `header "n": type uint64`},
		{"nested header", func(m *message.Message) {
			m.Headers = message.Headers{"t": message.Headers{"l": []any{struct{}{}}}}
		}, `header "l"`},
		// B20: never a row that is committed and cannot be sent.
		{"a header table over 64 KiB", func(m *message.Message) {
			m.Headers = message.Headers{"big": strings.Repeat("x", 200_000)}
		}, "the limit is 65536"},
		{"number that is none", func(m *message.Message) { m.Headers = message.Headers{"n": math.NaN()} }, `NaN (header "n")`},
		{"long header name", func(m *message.Message) { m.Headers = message.Headers{long: 1} }, "header name has 256 bytes"},
		{"long list", func(m *message.Message) { m.Headers = message.Headers{"l": make([]any, 8193)} }, `8193 entries`},
		{"header name", func(m *message.Message) { m.Headers = message.Headers{"\xff": "x"} }, "not valid UTF-8"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := command("q", "bad")
			tt.set(&m)
			err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
				for what, err := range map[string]error{
					"Add":      outbox.Add(ctx, tx, command("q", "good"), m),
					"Schedule": outbox.Schedule(ctx, tx, outbox.Delayed{Message: command("q", "good")}, outbox.Delayed{Message: m}),
				} {
					if !errors.Is(err, outbox.ErrInvalid) {
						t.Errorf("%s = %v, want ErrInvalid", what, err)
						continue
					}
					contains(t, what+"'s error", err.Error(), tt.says)
				}
				if n := len(tx.Writes()); n != 0 {
					t.Errorf("%d statements, want none: nothing is added", n)
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// What is invalid is found before anything is written, however many statements it takes.
func TestAddInvalidAmongLargeOnes(t *testing.T) {
	t.Parallel()
	db := database(t)
	large := command("q", "large")
	large.Body = make([]byte, 8<<20) // of zeros, which take two bytes each in a statement
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		if err := outbox.Add(ctx, tx, large, large, to("", "q", "bad")); !errors.Is(err, outbox.ErrInvalid) {
			t.Errorf("Add = %v, want ErrInvalid", err)
		}
		if n := len(tx.Writes()); n != 0 {
			t.Errorf("%d statements, want none: nothing is added", n)
		}
		return outbox.Add(ctx, tx, large, large, command("q", "small"))
	})
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "ids", column(t, db, `SELECT message_id FROM outbox_events ORDER BY id`), []string{"large", "large", "small"})
}

func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	db := database(t)
	with := func(id, key string) message.Message {
		m := command("q", id)
		m.IdempotencyKey = key
		return m
	}
	add(t, db, with("a", "k1"))
	add(t, db, with("b", "k1"), with("c", "k2"), command("q", "d"), with("e", "k2"))
	equal(t, "ids", column(t, db, `SELECT message_id FROM outbox_events ORDER BY id`), []string{"a", "c", "d"})

	// Another fault of the same statement is not hidden.
	exec(t, db, `ALTER TABLE outbox_events ADD CONSTRAINT ck_test CHECK (message_id <> 'g')`)
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		return outbox.Add(ctx, tx, with("f", "k1"), with("g", "k3"))
	})
	if sqltx.Classify(err) != sqltx.Permanent {
		t.Errorf("a row that breaks a constraint: %v, want the server's error", err)
	}
	exec(t, db, `DELETE FROM outbox_events WHERE message_id = 'a'`)
	add(t, db, with("h", "k1"))
	equal(t, "ids", column(t, db, `SELECT message_id FROM outbox_events ORDER BY id`), []string{"c", "d", "h"})
}

func TestShardColumn(t *testing.T) {
	t.Parallel()
	db := database(t)
	keys := []string{"\x00", "\xff\xfe", "a", "a ", "A", "é😀", strings.Repeat("k", 255), "it's \\ \"quoted\"", "0194f1a4-5c00-7000-8000-000000000001"}
	keys = append(keys, names("key", 200)...)
	for i, k := range keys {
		add(t, db, keyed(command("q", fmt.Sprint(i)), k))
	}
	got := column(t, db, `SELECT shard FROM outbox_events ORDER BY id`)
	for i, k := range keys {
		if want := fmt.Sprint(message.Shard(k)); got[i] != want {
			t.Errorf("shard of %q: the table says %s, message.Shard %s", k, got[i], want)
		}
	}
	equal(t, "keys come back as they were", column(t, db, `SELECT ordering_key FROM outbox_events ORDER BY id`), keys)
}

// everything has each property and each type of header there is.
func everything() message.Message {
	return message.Message{
		Properties: message.Properties{
			ContentType: "text/plain", ContentEncoding: "identity", DeliveryMode: 1, Priority: 7,
			CorrelationID: "corr\xff", ReplyTo: "replies", Expiration: "3600000",
			MessageID: "id \xff\xfe 😀", Timestamp: time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC),
			Type: "test.everything", UserID: "guest", AppID: "tests",
		},
		Headers: message.Headers{
			"nil": nil, "true": true, "int8": int8(-8), "int16": int16(-16), "int32": int32(-32), "int64": int64(-64),
			"uint8": uint8(8), "uint16": uint16(16), "uint32": uint32(32), "float32": float32(0.1), "float64": 0.2,
			"text": "é😀 '\\\"\x00", "not utf-8": "\xff\xfe", "bytes": []byte{0, 1, 0xff}, "empty": "",
			"time": time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), "decimal": message.Decimal{Scale: 2, Value: -1999},
			"table": message.Headers{"a": int64(1), "b": message.Headers{}}, "list": []any{int32(1), "two", nil, []any{true}},
			"x-ordering-key": "k\xfe",
		},
		Body:     []byte{0, 0xff, '\'', '\\'},
		Exchange: message.CommandsExchange, RoutingKey: "q", Mandatory: true, OrderingKey: "k\xfe",
	}
}

func TestPropertiesAndHeadersReachTheWire(t *testing.T) {
	t.Parallel()
	db, b := database(t), newBroker(t)
	b.queue(t, "q", nil)
	sent := everything()
	plain := command("q", "plain")
	add(t, db, sent, plain)
	start(t, db, b, outbox.Config{})
	s := b.consume(t, "q")
	s.await(t, 2)
	got := s.all()[0]
	want := amqp091.Delivery{
		Headers: amqp091.Table{
			"nil": nil, "true": true, "int8": int8(-8), "int16": int16(-16), "int32": int32(-32), "int64": int64(-64),
			"uint8": uint8(8), "uint16": uint16(16), "uint32": uint32(32), "float32": float32(0.1), "float64": 0.2,
			"text": "é😀 '\\\"\x00", "not utf-8": "\xff\xfe", "bytes": []byte{0, 1, 0xff}, "empty": "",
			"time": sent.Headers["time"], "decimal": amqp091.Decimal{Scale: 2, Value: -1999},
			"table": amqp091.Table{"a": int64(1), "b": amqp091.Table{}}, "list": []any{int32(1), "two", nil, []any{true}},
			"x-ordering-key": "k\xfe",
		},
		ContentType: "text/plain", ContentEncoding: "identity", DeliveryMode: 1, Priority: 7,
		CorrelationId: "corr\xff", ReplyTo: "replies", Expiration: "3600000", MessageId: sent.MessageID,
		Timestamp: sent.Timestamp, Type: "test.everything", UserId: "guest", AppId: "tests",
		Exchange: message.CommandsExchange, RoutingKey: "q", Body: sent.Body,
	}
	got.Acknowledger, got.ConsumerTag, got.DeliveryTag = nil, "", 0
	got.Timestamp = got.Timestamp.UTC()
	got.Headers["time"] = got.Headers["time"].(time.Time).UTC()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("delivered\n%#v\nwant\n%#v", got, want)
	}

	// What a message leaves open is filled in.
	got = s.all()[1]
	if got.DeliveryMode != amqp091.Persistent || got.ContentType != "application/json" || got.AppId != "backstep" {
		t.Errorf("defaults: %+v", got)
	}
	created := number(t, db, `SELECT FLOOR(UNIX_TIMESTAMP(created_at)) FROM outbox_events WHERE message_id = 'plain'`)
	if got.Timestamp.Unix() != int64(created) {
		t.Errorf("timestamp %d, want the row's creation %d", got.Timestamp.Unix(), created)
	}
	if got.Headers[message.HeaderOrderingKey] != "plain" {
		t.Errorf("headers %v, want the id as ordering key", got.Headers)
	}
}

// A message carries the trace context it was added with, and the caller's headers are not
// written to.
func TestTraceContextIsCarried(t *testing.T) {
	t.Parallel()
	db, b := database(t), newBroker(t)
	b.queue(t, "q", nil)
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	id, err := trace.TraceIDFromHex("0af7651916cd43dd8448eb211c80319c")
	if err != nil {
		t.Fatal(err)
	}
	span, err := trace.SpanIDFromHex("b7ad6b7169203331")
	if err != nil {
		t.Fatal(err)
	}
	traced := trace.ContextWithRemoteSpanContext(t.Context(), trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: id, SpanID: span, TraceFlags: trace.FlagsSampled, Remote: true,
	}))
	m := command("q", "traced")
	m.Headers = message.Headers{"mine": "1"}
	err = sqltx.WithTx(traced, db, func(ctx context.Context, tx *sqltx.Tx) error {
		return errors.Join(outbox.Add(ctx, tx, m), outbox.Schedule(ctx, tx, outbox.Delayed{Message: command("q", "scheduled")}))
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Headers) != 1 {
		t.Errorf("the caller's headers became %v", m.Headers)
	}
	start(t, db, b, outbox.Config{})
	s := b.consume(t, "q")
	s.await(t, 2)
	for _, d := range s.all() {
		if d.Headers["traceparent"] != parent {
			t.Errorf("%s: traceparent %v, want %s", d.MessageId, d.Headers["traceparent"], parent)
		}
	}
}

const insertForeignSQL = `
INSERT INTO outbox_events (message_id, ordering_key, event_type, exchange, routing_key, properties, headers, payload)
VALUES (?, 'customer-17', 'order.create', 'backstep.commands', 'q', ?, ?, ?)`

// The row for writers in other languages, docs/messages.md.
func TestRowOfAnotherLanguage(t *testing.T) {
	t.Parallel()
	db, b := database(t), newBroker(t)
	b.queue(t, "q", nil)
	start(t, db, b, outbox.Config{})
	exec(t, db, insertForeignSQL, "foreign",
		`{"type":"order.create","content_type":"application/json","delivery_mode":2,"correlation_id":"c","timestamp":1700000000}`,
		`{"x-request-id":"r","n":42,"f":0.5,"small":{"$int8":"-1"},"t":{"$table":{"l":{"$list":[1,null]}}}}`, `{"customer":"Ada"}`)
	exec(t, db, insertForeignSQL, "bare", ``, ``, ``)
	s := b.consume(t, "q")
	equal(t, "arrived", s.await(t, 2), []string{"foreign", "bare"})
	d := s.all()[0]
	want := amqp091.Table{"x-request-id": "r", "n": int64(42), "f": 0.5, "small": int8(-1), "t": amqp091.Table{"l": []any{int64(1), nil}}}
	if !reflect.DeepEqual(d.Headers, want) {
		t.Errorf("headers %#v, want %#v", d.Headers, want)
	}
	if d.Type != "order.create" || d.ContentType != "application/json" || d.DeliveryMode != 2 || d.CorrelationId != "c" ||
		d.Timestamp.Unix() != 1_700_000_000 || string(d.Body) != `{"customer":"Ada"}` {
		t.Errorf("delivered %+v", d)
	}
	if d := s.all()[1]; d.DeliveryMode != amqp091.Persistent || d.Timestamp.IsZero() || len(d.Body) != 0 {
		t.Errorf("delivered %+v", d)
	}
	published(t, db, 2)
}

// B20: a row that cannot be sent is PARKED at once, and its neighbours, also those of its
// key, go out.
func TestUnreadableRowIsParked(t *testing.T) {
	t.Parallel()
	db, b := database(t), newBroker(t)
	b.queue(t, "q", nil)
	type row struct{ id, properties, headers, says string }
	bad := []row{
		{"p0", `{"type":`, `{}`, "properties"},
		{"p1", `[]`, `{}`, `"{" expected: unexpected byte 91 '['`},
		{"p2", `{"priority":300}`, `{}`, "priority"},
		{"p3", `{"timestamp":"noon"}`, `{}`, "timestamp"},
		{"h0", `{}`, `{"a":{"$nope":"1"}}`, "unknown type"},
		{"h1", `{}`, `{"a":[1]}`, "$list"},
		{"h2", `{}`, `{"a":{"$int8":"300"}}`, "value out of range"},
		{"h3", `{}`, "\xff\x00", "not valid UTF-8"},
		{"h4", `{}`, `{"a":{"$float64":"NaN"}}`, "NaN"},
		{"h5", `{}`, `{"` + strings.Repeat("n", 256) + `":1}`, "256 bytes"},
		{"h6", `{}`, `{"big":"` + strings.Repeat("x", 200_000) + `"}`, "the limit is"},
		{"h7", `{}`, `{"` + strings.Repeat("é😀", 70_000) + `":{"$nope":"1"}}`, "é😀"}, // B33: the reason is longer than its column
		{"l0", `{"type":"` + strings.Repeat("t", 256) + `"}`, `{}`, "type has 256 bytes"},
	}
	var good []string
	for i, r := range bad {
		exec(t, db, insertForeignSQL, r.id, r.properties, r.headers, "")
		good = append(good, fmt.Sprintf("good%d", i))
		exec(t, db, insertForeignSQL, good[i], `{}`, `{}`, "")
	}
	start(t, db, b, outbox.Config{})
	s := b.consume(t, "q")
	equal(t, "arrived", s.await(t, len(good)), good)
	eventually(t, "nothing is pending", func() bool { return having(t, db, "PENDING") == 0 })
	for _, r := range bad {
		var status, why string
		var attempts int
		if err := db.QueryRowContext(t.Context(), `SELECT status, last_error, attempts FROM outbox_events WHERE message_id = ?`,
			r.id).Scan(&status, &why, &attempts); err != nil {
			t.Fatal(err)
		}
		if status != "PARKED" || attempts != 0 {
			t.Errorf("%s is %s after %d attempts, want PARKED without one", r.id, status, attempts)
		}
		contains(t, "reason of "+r.id, why, r.says)
	}
}
