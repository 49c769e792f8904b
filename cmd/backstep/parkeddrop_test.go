package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/saga"
	"backstep/internal/testenv"
)

// newBroker reports whether it is RabbitMQ 4 or later.
func newBroker(t *testing.T, broker *testenv.Broker) bool {
	t.Helper()
	conn, err := amqp091.Dial(broker.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }() // all is said
	version, ok := conn.Properties["version"].(string)
	if !ok {
		t.Fatalf("the broker says it is %v", conn.Properties)
	}
	return !strings.HasPrefix(version, "3.")
}

// TestParkedDrop: what is dropped is gone from the queue, and whole in the audit.
func TestParkedDrop(t *testing.T) {
	t.Parallel()
	o, db, broker := lotOf(t)
	size := 20 << 20
	if newBroker(t, broker) {
		size = 15 << 20 // more it does not take
	}
	huge := bytes.Repeat([]byte("0123456789\xff\x00abcd"), size/16)
	parkAll(t, o, broker,
		amqp091.Publishing{MessageId: "huge", Type: handlers.OrderCreateType, DeliveryMode: 2, Headers: amqp091.Table{"mine": "x"}, Body: huge},
		amqp091.Publishing{MessageId: "nonsense", Type: handlers.OrderCreateType, DeliveryMode: 2, Body: []byte("nonsense")},
		amqp091.Publishing{MessageId: "neighbour", Type: "odd", DeliveryMode: 2, Body: []byte("odd")})
	body := func(from string) {
		t.Helper()
		if a := o.run("", "parked", "show", "huge", "--body").want(exitOK); a.stdout != string(huge) {
			t.Errorf("the body from the %s has %d bytes, want %d", from, len(a.stdout), len(huge))
		}
	}
	o.run("", "parked", "list").want(exitOK, "dead-lettered by the broker: rejected (its body has")
	o.run("", "parked", "show", "huge").want(exitOK, "once, for rejected", fmt.Sprintf("payload, %d bytes", len(huge)), "backstep parked drop huge --queue orders")
	var s shownParked
	o.run("", "parked", "show", "huge", "--json").want(exitOK).decode(&s)
	if s.Death == nil || s.Death.Reason != "rejected" || s.ParkedAt.IsZero() || s.Bytes != len(huge) || s.Base64 != nil || s.From != "orders" {
		t.Errorf("shown %+v", s.ParkedRecord)
	}
	body("queue")
	run := func(args ...string) answer {
		t.Helper()
		return o.run("", append(append([]string{"parked", "drop"}, args...), because...)...)
	}
	run("--because", "dead-lettered", "--dry-run").want(exitOK, "1 message would be dropped", "nothing was done")
	run("--because", "dead-lettered").want(exitOK, "from orders, message huge: dropped: it was parked: dead-lettered", "1 message dropped")
	run("huge").want(exitOK, "message huge: done already: it was dropped by ops at", "0 messages dropped, 1 done already")
	run("nobody").want(exitFailed, "message nobody: not found", "not dropped: 1 of 1 message")
	body("audit")
	o.run("", "parked", "show", "huge").want(exitOK, "It is not in orders.parked any more", "dropped by ops", "cured, ticket 12", "mine")
	o.run("", append([]string{"parked", "replay", "huge"}, because...)...).want(exitFailed, "left as it is: it was dropped by ops")
	var r replayed
	run("--all", "--max", "1", "--json").want(exitOK, "there are more").decode(&r)
	r.want(t, map[fate]int{fateDropped: 1})
	parkedAre(t, o, "orders", 1)
	run("--type", map[string]string{"nonsense": "odd", "neighbour": handlers.OrderCreateType}[r.Messages[0].ID]).want(exitOK, "1 message dropped")
	if a := o.run("", "parked", "show", "neighbour", "--body").want(exitOK); a.stdout != "odd" {
		t.Errorf("body %q", a.stdout)
	}
	var bodies int
	if err := db.QueryRowContext(t.Context(), `SELECT COUNT(DISTINCT action_id) FROM parked_bodies`).Scan(&bodies); err != nil || bodies != 3 {
		t.Errorf("%d bodies, %v, want 3", bodies, err)
	}
}

// TestDropTellsTheSaga: of what the broker dead-lettered nobody has told the saga.
func TestDropTellsTheSaga(t *testing.T) {
	t.Parallel()
	o, db, broker := lotOf(t)
	execute(t, db, `INSERT INTO saga_instances (id, type, version, correlation_id, status, direction, current_step, attempt, command_id, payload)
VALUES ('s', 'place-order', 1, 'c', 'RUNNING', 'execute', 1, 1, 'm', '{}')`)
	m := parkedCopy("m", "place-order.charge-payment", "r", time.Now())
	m.Headers[message.HeaderSagaID] = "s"
	broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, m)
	o.run("", append([]string{"parked", "drop", "m"}, because...)...).want(exitOK, "1 message dropped")
	d, err := saga.Get(t.Context(), db, "s")
	if err != nil || d.Status != saga.ManualAction || !strings.HasPrefix(d.LastError, "command parked: dropped by ops: cured, ticket 12") {
		t.Errorf("saga %+v, %v", d.Summary, err)
	}
}
