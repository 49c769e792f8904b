package amqp

import (
	"bytes"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
	"backstep/internal/testenv"
)

// everyType has each type a header can have, at its limits.
func everyType() message.Headers {
	return message.Headers{
		"nil": nil, "true": true, "false": false,
		"int8": int8(math.MinInt8), "int16": int16(math.MinInt16), "int32": int32(math.MinInt32), "int64": int64(math.MinInt64),
		"uint8": uint8(math.MaxUint8), "uint16": uint16(math.MaxUint16), "uint32": uint32(math.MaxUint32),
		"float32": float32(math.MaxFloat32), "float64": math.SmallestNonzeroFloat64, "minus zero": math.Copysign(0, -1),
		"string": "Grüße, 世界 \U0001f680", "empty": "", "not UTF-8": "\xff\xfe\x00", "bytes": []byte{0, 1, 255}, "no bytes": []byte{},
		"time": time.Unix(1<<33, 0).UTC(), "before 1970": time.Unix(-1, 0).UTC(),
		"decimal": message.Decimal{Scale: 4, Value: -1999},
		"table":   message.Headers{"nested": message.Headers{"decimal": message.Decimal{Scale: 255, Value: math.MaxInt32}}, "none": message.Headers{}},
		"list":    []any{nil, int64(1), "two", []byte("three"), message.Headers{"four": int8(4)}, []any{message.Decimal{Value: 5}}, []any{}},
		"":        "no name", strings.Repeat("n", 255): "long name",
	}
}

func everyProperty() message.Properties {
	return message.Properties{
		ContentType: "application/json", ContentEncoding: "identity", DeliveryMode: 1, Priority: 9,
		CorrelationID: "c\xff", ReplyTo: "replies", Expiration: "3600000", MessageID: strings.Repeat("i", 255),
		Timestamp: time.Unix(1764435600, 0).UTC(), Type: "order.create", AppID: "test@1",
	}
}

// TestRoundTrip sends everything a message can carry through the broker.
func TestRoundTrip(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
	defer ch.Release()
	sub := subscribe(t, c, "orders", 10)

	tests := map[string]message.Message{
		"everything": {Properties: everyProperty(), Headers: everyType(), Body: []byte("body")},
		"nothing":    {},
		"body over several frames": {
			Properties: message.Properties{MessageID: "large"}, Body: bytes.Repeat([]byte("0123456789abcdef"), 1<<16),
		},
	}
	for name, m := range tests {
		t.Run(name, func(t *testing.T) {
			m.Exchange, m.RoutingKey, m.Mandatory = message.CommandsExchange, "orders", true
			publish(t, ch, &m)
			if r := results(t, ch, 1)[0]; r.Kind != message.Confirmed {
				t.Fatalf("result = %+v, want confirmed", r)
			}
			d := receive(t, sub)
			if err := sub.Ack(d.Tag, false); err != nil {
				t.Error(err)
			}
			want := m
			want.Mandatory = false // says how it was published
			if want.DeliveryMode == 0 {
				want.DeliveryMode = 2
			}
			if !bytes.Equal(want.Body, d.Body) {
				t.Errorf("a body of %d bytes came for one of %d, or another", len(d.Body), len(want.Body))
			}
			want.Body, d.Body = nil, nil
			if diff := cmp.Diff(want, d.Message, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("received other than sent (-sent +received):\n%s", diff)
			}
			if d.Queue != "orders" || d.Tag == 0 || d.Redelivered {
				t.Errorf("delivery = queue %q, tag %d, redelivered %t", d.Queue, d.Tag, d.Redelivered)
			}
		})
	}
}

// TestIntKeepsItsValue: amqp091 writes an int as 32 bits.
func TestIntKeepsItsValue(t *testing.T) {
	if got, want := toTable(message.Headers{"n": 1 << 40})["n"], int64(1<<40); got != want {
		t.Errorf("toTable(int) = %v (%T), want %v (%T)", got, got, want, want)
	}
}

func TestToTableLeavesHeadersAlone(t *testing.T) {
	h := everyType()
	h["int"] = 7
	toTable(h)
	want := everyType()
	want["int"] = 7
	if diff := cmp.Diff(want, h); diff != "" {
		t.Errorf("toTable changed the caller's headers:\n%s", diff)
	}
}

// FuzzConvert: to AMQP's types and back is identity, and what check lets pass amqp091 takes.
func FuzzConvert(f *testing.F) {
	seed, err := message.EncodeHeaders(everyType())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte(`{"n":1,"t":{"$table":{"l":{"$list":[{"$decimal":"1,2"},{"$list":[]}]}}}}`))
	f.Fuzz(func(t *testing.T, encoded []byte) {
		h, err := message.DecodeHeaders(encoded)
		if err != nil {
			return
		}
		if check(&message.Message{Headers: h}, 0) != nil {
			return
		}
		table := toTable(h)
		if err := table.Validate(); err != nil {
			t.Fatalf("check passed what amqp091 refuses: %v", err)
		}
		again, err := message.DecodeHeaders(encoded)
		if err != nil {
			t.Fatal(err)
		}
		got := fromTable(cloneTable(table))
		if !same(got, again) {
			t.Errorf("round trip of %s:\n got %#v\nwant %#v", encoded, got, again)
		}
	})
}

// same compares field values, times as instants. cmp.Equal takes exponentially long for
// nested lists.
func same(a, b any) bool {
	switch a := a.(type) {
	case message.Headers:
		b, ok := b.(message.Headers)
		if !ok || len(a) != len(b) {
			return false
		}
		for k, v := range a {
			if w, ok := b[k]; !ok || !same(v, w) {
				return false
			}
		}
		return true
	case []any:
		b, ok := b.([]any)
		return ok && slices.EqualFunc(a, b, same)
	case []byte:
		b, ok := b.([]byte)
		return ok && bytes.Equal(a, b)
	case time.Time:
		b, ok := b.(time.Time)
		return ok && a.Equal(b)
	}
	return a == b
}

// cloneTable stands for the wire: fromTable may change what it is given.
func cloneTable(t amqp091.Table) amqp091.Table {
	out := make(amqp091.Table, len(t))
	for k, v := range t {
		out[k] = cloneField(v)
	}
	return out
}

func cloneField(v any) any {
	switch v := v.(type) {
	case amqp091.Table:
		return cloneTable(v)
	case []any:
		out := make([]any, len(v))
		for i := range v {
			out[i] = cloneField(v[i])
		}
		return out
	}
	return v
}

func TestCheck(t *testing.T) {
	deep := func(n int) message.Headers {
		h := message.Headers{}
		for range n {
			h = message.Headers{"t": h}
		}
		return h
	}
	deepList := func(n int) message.Headers {
		l := []any{}
		for range n {
			l = []any{l}
		}
		return message.Headers{"l": l}
	}
	many := message.Headers{}
	for i := range 8192 + 1 {
		many[fmt.Sprint(i)] = nil
	}
	type msg = message.Message
	long := strings.Repeat("x", 256)
	tests := []struct {
		name string
		m    msg
		want string // in the error; empty: accepted
	}{
		{"empty", msg{}, ""},
		{"every type", msg{Properties: everyProperty(), Headers: everyType()}, ""},
		{"long exchange", msg{Exchange: long}, "exchange has 256 bytes"},
		{"long routing key", msg{RoutingKey: long}, "routing key has 256 bytes"},
		{"long message id", msg{Properties: message.Properties{MessageID: long}}, "message_id has 256 bytes"},
		{"long header name", msg{Headers: message.Headers{long: 1}}, "header name has 256 bytes"},
		{"uint64", msg{Headers: message.Headers{"n": uint64(1)}}, `no type for uint64 (header "n")`},
		{"struct in a list in a table", msg{Headers: message.Headers{"t": message.Headers{"l": []any{struct{}{}}}}}, `(header "l") (header "t")`},
		{"table of the library", msg{Headers: message.Headers{"t": amqp091.Table{}}}, "no type for amqp091.Table"},
		{"headers at the limit", msg{Headers: message.Headers{"h": strings.Repeat("x", message.MaxHeaderBytes-4-2-5)}}, ""},
		{"headers over the limit", msg{Headers: message.Headers{"h": strings.Repeat("x", message.MaxHeaderBytes-4-2-5+1)}}, "65537 bytes encoded"},
		{"infinite", msg{Headers: message.Headers{"f": math.Inf(-1)}}, "cannot read the number -Inf"},
		{"not a number", msg{Headers: message.Headers{"f": float32(math.NaN())}}, "cannot read the number NaN"},
		{"as deep as readers go", msg{Headers: deep(32)}, ""},
		{"deeper", msg{Headers: deep(32 + 1)}, "nested deeper"},
		{"lists as deep as readers go", msg{Headers: deepList(32 - 1)}, ""},
		{"deeper lists", msg{Headers: deepList(32)}, "nested deeper"},
		{"too many headers", msg{Headers: many}, "8193 entries"},
		{"too long a list", msg{Headers: message.Headers{"l": make([]any, 8192+1)}}, "8193 entries"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := check(&tt.m, 131072)
			if tt.want == "" {
				if err != nil {
					t.Errorf("check = %v, want nil", err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("check = %v, want an error with %q", err, tt.want)
			}
		})
	}
	if err := check(&msg{Headers: message.Headers{"h": strings.Repeat("x", 5000)}}, 4096); err == nil {
		t.Error("check passed headers that do not fit the broker's frame")
	}
}

// TestCheckKnowsTheFrame: the largest header frame that check lets pass, the broker takes. It
// also takes 8 bytes more (FRAME_SIZE_FUDGE in rabbit_reader.erl), which check does not use.
func TestCheckKnowsTheFrame(t *testing.T) {
	const frame = 8192 // the least RabbitMQ 4 lets a client ask for
	b := testenv.Vhost(t)
	u, err := url.Parse(b.URL)
	if err != nil {
		t.Fatal(err)
	}
	for _, over := range []int{0, 8, 9} {
		conn, err := amqp091.DialConfig(b.URL, amqp091.Config{FrameSize: frame})
		if err != nil {
			t.Fatal(err)
		}
		s := newSession(conn, nil)
		ch, err := openConfirmer(within(t), nil, s, 1)
		if err != nil {
			t.Fatal(err)
		}
		m := &message.Message{Properties: everyProperty(), Headers: everyType(), Exchange: "amq.fanout"}
		m.UserID = u.User.Username() // the broker looks at it
		fits := func(padding int) bool {
			m.Headers["padding"] = strings.Repeat("x", padding)
			return check(m, frame) == nil
		}
		padding := 0
		for fits(padding + 1) {
			padding++
		}
		if got, want := fits(padding+over), over == 0; got != want {
			t.Fatalf("fits with %d bytes too many = %t", over, got)
		}
		p, err := publishing(m, 0)
		if err != nil {
			t.Fatal(err)
		}
		confirm, err := ch.ch.PublishWithDeferredConfirm(m.Exchange, "", false, false, p)
		if err != nil {
			t.Fatal(err)
		}
		if acked, err := confirm.WaitContext(within(t)); err != nil || acked != (over <= 8) {
			t.Errorf("with %d bytes too many acked = %t, %v", over, acked, err)
		}
		_ = conn.Close() // the last one is closed already
	}
}
