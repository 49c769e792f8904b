package amqp

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/testenv"
)

// nested returns tables and lists in each other, so deep.
func nested(depth int) amqp091.Table {
	t := amqp091.Table{"n": int32(depth)}
	for i := range depth {
		if i%2 == 0 {
			t = amqp091.Table{"t": t}
		} else {
			t = amqp091.Table{"l": []any{t}}
		}
	}
	return t
}

func numbered(n int) amqp091.Table {
	t := amqp091.Table{}
	for i := range n {
		t[fmt.Sprintf("h%d", i)] = nil
	}
	return t
}

// TestUnreadableHeaders: headers that end an amqp091 connection come as a reason; up to the very
// limit they come whole, with all that stands beside them, and the session goes on.
func TestUnreadableHeaders(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	sub := subscribe(t, c, "orders", 100)
	ch := channel(t, c)
	list := func(n int) amqp091.Table { return amqp091.Table{"list": make([]any, n)} }
	for _, tt := range []struct {
		name    string
		headers amqp091.Table
		says    string // "": they come
	}{
		{"none", nil, ""},
		{"as many as can be", numbered(maxEntries), ""},
		{"one more", numbered(maxEntries + 1), "more than 8192 in one table"},
		{"ten thousand", numbered(10_000), "more than 8192 in one table"},
		{"a long list", list(maxEntries), ""},
		{"a longer one", list(maxEntries + 1), "more than 8192 in one table"},
		{"as deep as can be", amqp091.Table{"t": nested(21)}, ""}, // of which a third is a list with a table in it
		{"one deeper", amqp091.Table{"t": amqp091.Table{"t": nested(21)}}, "more than 32 tables in each other"},
		{"every type", amqp091.Table{
			"V": nil, "t": true, "B": byte(1), "b": int8(-1), "s": int16(-2), "I": int32(-3), "l": int64(-4), "f": float32(1.5), "d": 2.5,
			"D": amqp091.Decimal{Scale: 1, Value: 2}, "S": "text", "x": []byte{0, 0xce}, "A": []any{"a", int32(1)}, "F": amqp091.Table{"k": "v"},
		}, ""},
	} {
		for _, properties := range []amqp091.Publishing{{}, {ContentType: "application/json", ContentEncoding: "none", CorrelationId: "c", AppId: "a"}} {
			p := properties
			p.MessageId, p.Type, p.Body, p.Headers = "id", tt.name, []byte("\xce body"), tt.headers
			if err := ch.Publish("", "orders", false, false, p); err != nil {
				t.Fatal(err)
			}
			d := receive(t, sub)
			if d.Type != tt.name || d.MessageID != "id" || string(d.Body) != "\xce body" ||
				d.ContentType != p.ContentType || d.ContentEncoding != p.ContentEncoding || d.CorrelationID != p.CorrelationId || d.AppID != p.AppId {
				t.Fatalf("%s: %+v", tt.name, d)
			}
			want := len(tt.headers)
			if tt.says != "" {
				want = 0
			}
			if len(d.Headers) != want || (d.Unreadable == "") != (tt.says == "") || !strings.Contains(d.Unreadable, tt.says) {
				t.Errorf("%s: %d headers, unreadable because %q, want %d and %q", tt.name, len(d.Headers), d.Unreadable, want, tt.says)
			}
		}
	}
	// More than a frame holds can be typed into the management UI.
	m, err := newManagement(b.ManagementURL)
	if err != nil {
		t.Fatal(err)
	}
	for _, large := range []any{strings.Repeat("x", 200_000), make([]int, 200_000)} { // 9 bytes each
		message := map[string]any{
			"routing_key": "orders", "payload": "body", "payload_encoding": "string",
			"properties": map[string]any{"message_id": "large", "content_type": "text/plain", "headers": map[string]any{"large": large}},
		}
		if err := m.call(within(t), http.MethodPost, message, nil, "exchanges", b.Vhost, "amq.default", "publish"); err != nil {
			t.Fatal(err)
		}
		if d := receive(t, sub); d.MessageID != "large" || d.ContentType != "text/plain" ||
			!strings.Contains(d.Unreadable, "more than a frame holds") || string(d.Body) != "body" {
			t.Errorf("%s: unreadable because %q", d.MessageID, d.Unreadable)
		}
	}
	if err := sub.Err(); err != nil {
		t.Error(err)
	}
}

// Whatever comes, in whatever portions, and is no header frame, passes as it is.
func TestReadingPassesWhatItDoesNotKnow(t *testing.T) {
	frame := func(kind byte, payload string) string {
		n := len(payload)
		return string([]byte{kind, 0, 1, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}) + payload + "\xce"
	}
	for name, stream := range map[string]string{
		"frames":                    frame(1, "method") + frame(3, strings.Repeat("\xce", 1000)) + frame(8, "") + frame(2, "no header frame"),
		"another version":           "AMQP\x00\x00\x09\x01",
		"TLS":                       "\x16\x03\x03 and so on",
		"cut":                       frame(2, "abcdefghijklmnopqrst")[:20],
		"a header frame of nothing": frame(2, ""),
		"flags and nothing":         frame(2, strings.Repeat("\x00", 12)+"\xff\xff"),
		"a table that is too long":  frame(2, strings.Repeat("\x00", 12)+"\x20\x00\xff\xff\xff\xff"),
	} {
		for _, r := range []io.Reader{strings.NewReader(stream), iotest.OneByteReader(strings.NewReader(stream))} {
			got, err := io.ReadAll(&reading{in: bufio.NewReader(r), max: func() int { return 4096 }})
			if name == "cut" {
				if err == nil {
					t.Error("cut: no error")
				}
				continue
			}
			if err != nil || string(got) != stream {
				t.Errorf("%s: %q, %v, want %q", name, got, err, stream)
			}
		}
	}
}

// FuzzReadable: nothing a broker sends makes us crash, and what comes out is one frame.
func FuzzReadable(f *testing.F) {
	seed := append(bytes.Repeat([]byte{0}, 12), 0x20, 0, 0, 0, 0, 4, 1, 'a', 't', 1)
	f.Add(seed)
	f.Fuzz(func(t *testing.T, payload []byte) {
		n := len(payload)
		frame := append([]byte{2, 0, 1, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, payload...)
		got := readable(append(frame, frameEnd), 4096)
		size := int(got[3])<<24 | int(got[4])<<16 | int(got[5])<<8 | int(got[6])
		if len(got) != frameHead+size+1 || got[len(got)-1] != frameEnd {
			t.Errorf("a frame of %d bytes says %d", len(got), size)
		}
		if at, size, ok := headersIn(got[frameHead : len(got)-1]); ok && len(got) <= 4096 {
			if err := walk(got[frameHead+at:frameHead+at+size], 0, true); err != nil {
				t.Errorf("what comes out is as bad: %v", err)
			}
		}
	})
}
