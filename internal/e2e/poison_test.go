package e2e

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"
	"unicode/utf16"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/message"
)

// poisoned is a message nobody can process. It is told by its app_id, which every copy keeps.
type poisoned struct {
	name   string
	amqp   *amqp091.Publishing // published by a client, or
	typed  *typed              // typed into the management UI
	reason string              // part of it
	kept   string              // part of what must be shown besides the body, if anything
	dead   bool                // dead-lettered by the broker, as it was; the log has the reason
}

// TestPoisonIsReadable: B46, B47: whatever is wrong with a message, it is parked on its first
// delivery with reason and time, the management UI shows it whole, and its neighbours go on.
func TestPoisonIsReadable(t *testing.T) {
	t.Parallel()
	w := newWheel(t)
	w.apply()
	all := append(badBodies(), badMessages(t)...)
	msgs, want := orders(len(all))
	for i, p := range all {
		w.submit(msgs[i])
		if p.amqp != nil {
			p.amqp.AppId = p.name
			w.submit(*p.amqp)
			continue
		}
		p.typed.RoutingKey = handlers.OrdersQueue
		p.typed.Properties["app_id"] = p.name
		w.publishForm(*p.typed)
	}
	worker := w.start("worker")
	w.start("relay")
	w.rest(want.total(), 60*time.Second)
	w.verify(want)
	if s := worker.stats(); int(s.Parked) != len(all) || s.Retried > 0 {
		t.Errorf("stats %+v, want %d parked and none retried", s, len(all))
	}
	shown := map[string]typed{}
	for _, m := range w.getForm("orders.parked", 2*len(all)) {
		name, _ := m.Properties["app_id"].(string)
		shown[name] = m
	}
	for _, p := range all {
		m, ok := shown[p.name]
		if !ok {
			t.Errorf("%s: the management UI does not show it", p.name)
			continue
		}
		if p.dead && !strings.Contains(worker.text(), p.reason) {
			t.Errorf("%s: the log does not say %q", p.name, p.reason)
		}
		if err := p.readable(m); err != nil {
			t.Errorf("%s: %v", p.name, err)
		}
	}
	worker.stop()
}

// readable says what an operator misses in a parked copy.
func (p *poisoned) readable(m typed) error {
	headers := m.headers()
	var errs []error
	why, want, at := headers[message.HeaderParkedReason], p.reason, time.Time{}
	if p.dead {
		why, want, at = headers["x-first-death-reason"], "rejected", diedAt(headers)
	} else if text, ok := headers[message.HeaderParkedAt].(string); ok {
		at, _ = time.Parse(time.RFC3339Nano, text) // if it is none, the year says so
	}
	if reason, _ := why.(string); !strings.Contains(reason, want) {
		errs = append(errs, fmt.Errorf("parked because %q, want %q", reason, want))
	}
	if time.Since(at) > 10*time.Minute {
		errs = append(errs, fmt.Errorf("parked at %s", at))
	}
	body, err := m.body()
	if headers["x-parked-envelope"] == true {
		var e struct{ Body []byte }
		err = json.Unmarshal(body, &e)
		body = e.Body
	}
	sent, serr := p.body()
	if !bytes.Equal(body, sent) {
		errs = append(errs, fmt.Errorf("the body is %.40q, want %.40q", body, sent))
	}
	errs = append(errs, err, serr)
	if all := m.Payload + fmt.Sprint(m.Properties); !strings.Contains(all, p.kept) {
		errs = append(errs, fmt.Errorf("it does not say %.40q: %.500s", p.kept, all))
	}
	return errors.Join(errs...)
}

// diedAt returns when the broker dead-lettered a message for the first time.
func diedAt(headers map[string]any) time.Time {
	deaths, _ := headers["x-death"].([]any)
	if len(deaths) != 1 {
		return time.Time{}
	}
	death, _ := deaths[0].(map[string]any)
	seconds, _ := death["time"].(float64)
	return time.Unix(int64(seconds), 0)
}

func (m *typed) body() ([]byte, error) {
	if m.Encoding == "base64" {
		return base64.StdEncoding.DecodeString(m.Payload)
	}
	return []byte(m.Payload), nil
}

func (p *poisoned) body() ([]byte, error) {
	if p.amqp != nil {
		return p.amqp.Body, nil
	}
	return p.typed.body()
}

// badBodies do not decode, or not to an order.
func badBodies() (all []poisoned) {
	add := func(name string, body []byte, reason string) {
		m := raw(body)
		all = append(all, poisoned{name: name, amqp: &m, reason: reason})
	}
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = z.Write([]byte(`{}`)) // into memory
	_ = z.Close()
	var utf16le bytes.Buffer
	for _, u := range append([]uint16{0xfeff}, utf16.Encode([]rune(`{}`))...) {
		utf16le.Write([]byte{byte(u), byte(u >> 8)})
	}
	add("empty", nil, "does not decode")
	add("a brace", []byte(`{`), "does not decode")
	add("no field", []byte(`{}`), "the order has no lines")
	add("null", []byte(`null`), "the order has no lines")
	add("a text for a number", []byte(`{"items":[{"sku":"A","quantity":"two","price_cents":1}]}`), "does not decode")
	add("a list", []byte(`[]`), "does not decode")
	add("two documents", []byte(`{"customer":"a"}{"customer":"b"}`), "does not decode")
	add("deeply nested", bytes.Repeat([]byte(`[`), 100_000), "does not decode")
	add("UTF-16", utf16le.Bytes(), "not valid UTF-8")
	add("gzip", zipped.Bytes(), "not valid UTF-8")
	add("zeros", make([]byte, 1000), "does not decode")
	add("over the limit", bytes.Repeat([]byte(` `), 256<<10+1), "body of 262145 bytes; 262144 is the limit")
	return all
}

// badMessages have a good body.
func badMessages(t *testing.T) (all []poisoned) {
	good := request(t, nil)
	client := func(name, reason, kept string, change func(m *amqp091.Publishing)) {
		m := good
		m.MessageId = message.NewID()
		change(&m)
		all = append(all, poisoned{name: name, amqp: &m, reason: reason, kept: kept})
	}
	form := func(name, reason, kept string, properties map[string]any) {
		all = append(all, poisoned{name: name, reason: reason, kept: kept, typed: &typed{
			Payload: string(good.Body), Encoding: "string", Properties: properties,
		}})
	}
	unknown := func(headers map[string]any) map[string]any {
		return map[string]any{"message_id": message.NewID(), "type": "no.such", "headers": headers}
	}
	form("no property", "no message_id", "", map[string]any{})
	form("an empty id", "no message_id", "order.create", map[string]any{"message_id": "", "type": "order.create"})
	form("no type", `unknown message type ""`, "by-hand-1", map[string]any{"message_id": "by-hand-1"})
	dead := func() { all[len(all)-1].dead = true }
	nested, deepest := nest(30)
	form("nested tables", "unknown message type", deepest, unknown(nested))
	nested, deepest = nest(100)
	form("tables nested deeper than our client reads", "more than 32 tables in each other", deepest, unknown(nested))
	dead()
	form("more headers than a frame holds", "more than a frame holds", "a header of many 7999", unknown(numbered("a header of many ", 8_000)))
	dead()
	form("ten thousand headers", "more than 8192 in one table", "h9999", unknown(numbered("h", 10_000)))
	dead()
	client("eight thousand headers of a client", "unknown message type", "", func(m *amqp091.Publishing) {
		m.Type, m.Headers = "no.such", amqp091.Table{}
		for i := range 8_000 {
			m.Headers[fmt.Sprintf("h%d", i)] = true
		}
	})
	client("a wrong content type", `content_type "application/xml"`, "application/xml", func(m *amqp091.Publishing) { m.ContentType = "application/xml" })
	client("no content type that can be read", `content_type "json"`, "", func(m *amqp091.Publishing) { m.ContentType = "json" })
	client("an unknown type", `unknown message type "no.such"`, "no.such", func(m *amqp091.Publishing) { m.Type = "no.such" })
	client("an id of a year ago", "longer ago than duplicates are known", "0196", func(m *amqp091.Publishing) { m.MessageId = "01960000-0000-7000-8000-000000000000" })
	client("user_id and expiration", "unknown message type", "3600000", func(m *amqp091.Publishing) {
		m.Type, m.UserId, m.Expiration = "no.such", "guest", "3600000"
	})
	client("nothing is UTF-8", "unknown message type", "", func(m *amqp091.Publishing) {
		m.Type, m.CorrelationId, m.ReplyTo = "no.such \xff", "about \xff", "to \xff"
		m.Headers = amqp091.Table{"name \xff": "value", "table": amqp091.Table{"\xfe": "\xfd"}}
	})
	client("values are not UTF-8", "unknown message type", "", func(m *amqp091.Publishing) {
		m.Type, m.MessageId = "no.such", "id \xff"
		m.Headers = amqp091.Table{"name": "value \xff", "table": amqp091.Table{"in": []any{"\xfd"}}, "bytes": []byte{0xff}}
	})
	return all
}

func numbered(prefix string, n int) map[string]any {
	h := map[string]any{}
	for i := range n {
		h[fmt.Sprint(prefix, i)] = i
	}
	return h
}

// nest returns a header that is a table in a table, so many times, and what the deepest says.
func nest(depth int) (h map[string]any, deepest string) {
	deepest = "at the bottom"
	h = map[string]any{"table": deepest}
	for range depth {
		h = map[string]any{"table": maps.Clone(h)}
	}
	return h, deepest
}

// TestHugeBody: a body of 20 MB is dead-lettered whole, by the broker: an INSERT of it would look
// like a lost connection. RabbitMQ 4 refuses it unless it is told otherwise (max_message_size), and
// takes 15 MB.
func TestHugeBody(t *testing.T) {
	t.Parallel()
	w := newWheel(t)
	w.apply()
	w.start("relay")
	msgs, want := orders(20)
	w.submit(msgs[:10]...)
	huge := padded(t, 20_000_000)
	huge.Headers = amqp091.Table{"mine": "kept"}
	if err := w.refused(huge); err != nil {
		if !strings.Contains(err.Error(), "PRECONDITION_FAILED") {
			t.Fatal(err)
		}
		t.Logf("the broker: %v", err)
		huge.Body = huge.Body[:15_000_000]
		w.submit(huge)
	}
	w.submit(msgs[10:]...)
	worker := w.start("worker")
	w.rest(want.total(), 60*time.Second)
	w.verify(want)
	if s := worker.stats(); s.Parked != 1 || s.Retried > 0 {
		t.Errorf("stats %+v, want one parked", s)
	}
	worker.stop()
	var shown []typed
	w.eventually(20*time.Second, "the management UI shows it", func() error {
		if shown = w.getForm("orders.parked", 10); len(shown) != 1 {
			return fmt.Errorf("%d messages", len(shown))
		}
		return nil
	})
	m := shown[0]
	headers := m.headers()
	if m.Properties["message_id"] != huge.MessageId || headers["mine"] != "kept" || headers["x-first-death-reason"] != "rejected" ||
		time.Since(diedAt(headers)) > 10*time.Minute || m.Bytes != len(huge.Body) {
		t.Errorf("dead-lettered: %d bytes, %v", m.Bytes, m.Properties)
	}
	if reason := fmt.Sprintf("body of %d bytes; 262144 is the limit", len(huge.Body)); !strings.Contains(worker.text(), reason) {
		t.Errorf("the log does not say %q", reason)
	}
}

// refused publishes a message, and returns what the broker has against it.
func (w *wheel) refused(m amqp091.Publishing) error {
	w.t.Helper()
	conn, err := amqp091.Dial(w.broker.URL)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		w.t.Fatal(err)
	}
	closed := ch.NotifyClose(make(chan *amqp091.Error, 1))
	if err := ch.Confirm(false); err != nil {
		w.t.Fatal(err)
	}
	c, err := ch.PublishWithDeferredConfirm(message.CommandsExchange, handlers.OrdersQueue, true, false, m)
	if err != nil {
		return err
	}
	select {
	case e := <-closed:
		return e
	case <-c.Done():
		if !c.Acked() {
			return errors.New("nacked")
		}
		return nil
	case <-time.After(30 * time.Second):
		return errors.New("no answer")
	}
}
