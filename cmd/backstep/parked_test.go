package main

import (
	"bytes"
	"database/sql"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/testenv"
)

// lotOf returns an operator of a database with the schema and a virtual host with the queues.
func lotOf(t *testing.T) (*operator, *sql.DB, *testenv.Broker) {
	t.Helper()
	broker := testenv.Vhost(t)
	o, db := outboxOf(t, "BACKSTEP_AMQP_URL="+broker.URL, "BACKSTEP_AMQP_MANAGEMENT_URL="+broker.ManagementURL)
	o.run("", "topology", "apply").want(exitOK)
	return o, db, broker
}

// parkedCopy is a message as a lane parks it.
func parkedCopy(id, typ, reason string, at time.Time) amqp091.Publishing {
	return amqp091.Publishing{
		MessageId: id, Type: typ, ContentType: "application/json", AppId: "a client", DeliveryMode: 2, Body: []byte(`{"id":"` + id + `"}`),
		Headers: amqp091.Table{
			message.HeaderParkedReason: reason, message.HeaderParkedAt: at.UTC().Format(time.RFC3339Nano),
			message.HeaderParkedFrom: "a queue", "mine": int32(7),
		},
	}
}

// drained takes all messages off a queue and returns their ids, in order.
func drained(t *testing.T, broker *testenv.Broker, queue string) (ids []string) {
	t.Helper()
	for {
		d, ok := broker.Get(t, queue)
		if !ok {
			return ids
		}
		ids = append(ids, d.MessageId)
	}
}

// parkedList is what list --json says.
type parkedList struct {
	Groups []parkedGroup
	Queues []look
	More   bool
}

// parkedAre demands how many messages are parked from a queue.
func parkedAre(t *testing.T, o *operator, queue string, want int) {
	t.Helper()
	var list parkedList
	o.run("", "parked", "list", "--queue", queue, "--json").want(exitOK).decode(&list)
	n := 0
	for _, g := range list.Groups {
		n += g.Count
	}
	if n != want || list.More {
		t.Errorf("%d are parked from %s, want %d: %+v", n, queue, want, list)
	}
}

// replayed is what replay --json and drop --json say.
type replayed struct {
	Counts   map[fate]int
	More     bool
	Messages []parkedFate
}

func (r *replayed) want(t *testing.T, counts map[fate]int) {
	t.Helper()
	if !maps.Equal(r.Counts, counts) {
		t.Errorf("%v became of them, want %v: %+v", r.Counts, counts, r.Messages)
	}
}

var because = []string{"--reason", "cured, ticket 12", "--actor", "ops"}

// parkAll has a worker park messages sent to the orders queue, and ends it.
func parkAll(t *testing.T, o *operator, broker *testenv.Broker, msgs ...amqp091.Publishing) {
	t.Helper()
	worker, relay := o.start("worker"), o.start("relay")
	broker.Publish(t, message.CommandsExchange, handlers.OrdersQueue, msgs...)
	eventually(t, "all are parked", func() error {
		if ready, _ := broker.Queue(t, "orders.parked"); ready != len(msgs) {
			return fmt.Errorf("%d", ready)
		}
		return nil
	})
	for _, b := range []*background{worker, relay} {
		if code := b.stop(syscall.SIGTERM); code != exitOK {
			t.Errorf("exit code %d", code)
		}
	}
}

// TestParkedComesBackAsItWas: what a worker parked, whatever it was, is replayed byte for byte.
func TestParkedComesBackAsItWas(t *testing.T) {
	t.Parallel()
	o, _, broker := lotOf(t)
	at := time.Now().UTC().Truncate(time.Second)
	every := amqp091.Table{
		"nil": nil, "bool": true, "int32": int32(-32), "int64": int64(1) << 60, "text": "grüße 😀", "not utf-8": "\xff\xfe", "bytes": []byte{0, 255},
		"decimal": amqp091.Decimal{Scale: 2, Value: -1999}, "time": at, "float": 0.1,
		"table": amqp091.Table{"list": []any{int64(1), amqp091.Table{"a": "b"}}},
	}
	large := maps.Clone(every)
	large["large"] = strings.Repeat("x", 40<<10)
	names := amqp091.Table{"\xff": amqp091.Table{"\xfe": []any{int32(1)}}, "plain": "x"}
	msgs := []amqp091.Publishing{
		{MessageId: "plain", Type: "order.create", Body: []byte("\x00 no JSON \xff")},
		{MessageId: "full", Type: "order.create", ContentType: "application/x-thing", ContentEncoding: "gzip", DeliveryMode: 2, Priority: 7, CorrelationId: "c",
			ReplyTo: "r", Expiration: "86400000", Timestamp: at, AppId: "a client", Headers: every, Body: []byte("{")},
		{MessageId: "large", Type: "odd", Headers: large, Body: bytes.Repeat([]byte("\xffx"), 50_000), DeliveryMode: 2},
		{MessageId: "names", Type: "odd", Headers: names, Body: nil, DeliveryMode: 2},
	}
	parkAll(t, o, broker, msgs...)
	o.run("", "parked", "show", "full").want(exitOK, "expiration", "86400000", "content_encoding", "grüße 😀", "orders.parked", "a replay cannot help", "backstep parked show full --body | backstep submit -",
		"backstep parked drop full", "payload, 1 byte")
	if a := o.run("", "parked", "show", "large", "--body").want(exitOK); a.stdout != string(msgs[2].Body) {
		t.Errorf("body of %d bytes", len(a.stdout))
	}
	var s shownParked
	o.run("", "parked", "show", "large", "--json").want(exitOK).decode(&s)
	if headers, err := message.DecodeHeaders(s.Headers); err != nil || len(headers) != len(large) || headers.String("large") != large["large"] || s.Verdict != wouldReplay {
		t.Errorf("shown %+v, %v", s.ParkedRecord, err)
	}
	o.run("", append([]string{"parked", "replay", "--all"}, because...)...).want(exitOK, "4 messages replayed")
	parkedAre(t, o, "orders", 0)
	for range msgs {
		d, ok := broker.Get(t, "orders")
		i := slices.IndexFunc(msgs, func(m amqp091.Publishing) bool { return m.MessageId == d.MessageId })
		if !ok || i < 0 {
			t.Fatalf("got %t, %q", ok, d.MessageId)
		}
		was := msgs[i]
		was.DeliveryMode = 2                  // all that is replayed is
		delete(d.Headers, "x-delivery-count") // the broker's
		if at, ok := d.Headers["time"].(time.Time); ok {
			d.Headers["time"] = at.UTC()
		}
		if was.Headers == nil {
			was.Headers = amqp091.Table{}
		}
		got := amqp091.Publishing{
			MessageId: d.MessageId, Type: d.Type, ContentType: d.ContentType, ContentEncoding: d.ContentEncoding, DeliveryMode: d.DeliveryMode, Priority: d.Priority,
			CorrelationId: d.CorrelationId, ReplyTo: d.ReplyTo, Expiration: d.Expiration, Timestamp: was.Timestamp, AppId: d.AppId, UserId: d.UserId,
			Headers: d.Headers, Body: was.Body,
		}
		if got.Headers == nil {
			got.Headers = amqp091.Table{}
		}
		if fmt.Sprintf("%#v", got) != fmt.Sprintf("%#v", was) || !bytes.Equal(d.Body, was.Body) || !d.Timestamp.Equal(was.Timestamp) {
			t.Errorf("%s came back as %.3000s, want %.3000s", was.MessageId, fmt.Sprintf("%#v", got), fmt.Sprintf("%#v", was))
		}
	}
}
