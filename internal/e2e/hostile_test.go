package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/saga"
)

// request makes an order.create message; change alters the good order it starts from.
func request(t *testing.T, change func(o *handlers.CreateOrder)) amqp091.Publishing {
	t.Helper()
	o := handlers.CreateOrder{
		Customer: "Ada", PaymentToken: "tok", ShipTo: handlers.ShipTo{Country: "DE"},
		Items:      []handlers.Item{{SKU: handlers.SKU(0), Quantity: 1, PriceCents: 100}},
		TotalCents: 100,
	}
	if change != nil {
		change(&o)
	}
	body, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	return raw(body)
}

func raw(body []byte) amqp091.Publishing {
	return amqp091.Publishing{
		MessageId: message.NewID(), Type: handlers.OrderCreateType, ContentType: "application/json",
		DeliveryMode: amqp091.Persistent, Body: body,
	}
}

func line(sku string, quantity, price int64) func(*handlers.CreateOrder) {
	return func(o *handlers.CreateOrder) {
		o.Items = []handlers.Item{{SKU: sku, Quantity: quantity, PriceCents: price}}
		o.TotalCents = quantity * price // wraps round where it overflows
	}
}

// Bad input is parked at intake with a reason, order.rejected says why, and no order exists.
func TestHostileInputIsParked(t *testing.T) {
	w := newWheel(t)
	w.start("relay")
	w.start("worker")
	w.awaitQueues()
	tests := []struct {
		name   string
		msg    amqp091.Publishing
		reason string
	}{
		{"no lines", request(t, func(o *handlers.CreateOrder) { o.Items = nil }), "no lines"},
		{"zero quantity", request(t, line("A", 0, 100)), "quantity 0"},
		{"negative quantity", request(t, line("A", -1, 100)), "quantity -1"},
		{"overflowing line", request(t, line("A", math.MaxInt64, 2)), "overflows"},
		{"zero price", request(t, line("A", 1, 0)), "price 0"},
		{"negative price", request(t, line("A", 1, -1)), "price -1"},
		{"wrong total", request(t, func(o *handlers.CreateOrder) { o.TotalCents = 99 }), "add up to 100"},
		{"blank SKU", request(t, line("  ", 1, 1)), "blank SKU"},
		{"quantity over int64", raw([]byte(`{"items":[{"sku":"A","quantity":9223372036854775808,"price_cents":1}]}`)), "does not decode"},
		{"fractional quantity", raw([]byte(`{"items":[{"sku":"A","quantity":0.5,"price_cents":1}]}`)), "does not decode"},
		{"not JSON", raw([]byte(`{"customer":`)), "does not decode"},
		{"empty body", raw(nil), "does not decode"},
		{"request id too long", withRequestID(request(t, nil), strings.Repeat("R", 300)), "x-request-id has 300 bytes"},
		{"request id too long and a bad body", withRequestID(raw([]byte("{")), strings.Repeat("R", 300)), "does not decode"},
		{"not UTF-8", raw([]byte("{\"customer\":\"\xff\"}")), "not valid UTF-8"},
	}
	good := request(t, nil)
	for _, tt := range tests {
		w.submit(tt.msg)
	}
	w.submit(good)
	w.rest(1, 60*time.Second)
	w.verify(expectation{confirmed: 1})
	parked := map[string]amqp091.Delivery{}
	for range tests {
		d, ok := w.broker.Get(t, "orders.parked")
		if !ok {
			break
		}
		parked[d.MessageId] = d
	}
	for _, tt := range tests {
		d, ok := parked[tt.msg.MessageId]
		if !ok {
			t.Errorf("%s: not in orders.parked", tt.name)
			continue
		}
		if reason, _ := d.Headers[message.HeaderParkedReason].(string); !strings.Contains(reason, tt.reason) {
			t.Errorf("%s: parked because %q, want %q", tt.name, reason, tt.reason)
		}
		if string(d.Body) != string(tt.msg.Body) || d.Type != tt.msg.Type {
			t.Errorf("%s: the parked copy is not the message", tt.name)
		}
		if n := w.count(`SELECT COUNT(*) FROM outbox_events WHERE event_type = 'order.rejected' AND aggregate_id = ?`, []byte(tt.msg.MessageId)); n != 1 {
			t.Errorf("%s: %d order.rejected events, want 1", tt.name, n)
		}
	}
}

// Orders that are well-formed but cannot be fulfilled, or look odd, have exact outcomes.
func TestHostileOrders(t *testing.T) {
	w := newWheel(t)
	w.start("relay")
	w.together("worker", 2)
	w.awaitQueues()
	script := "Ωμέγα 書籍 😀𝄞"
	tests := []struct {
		name   string
		msg    amqp091.Publishing
		status string
		reason string
	}{
		{"unknown SKU", request(t, line("NO-SUCH", 1, 1)), "CANCELLED", "unknown SKU"},
		{"a SKU with a trailing space is another SKU", request(t, line(handlers.SKU(0)+" ", 1, 1)), "CANCELLED", "unknown SKU"},
		{"too little stock", request(t, line(handlers.SKU(1), 1_001, 1)), "CANCELLED", "not enough stock"},
		{"too little stock over two lines", request(t, func(o *handlers.CreateOrder) {
			o.Items = []handlers.Item{{SKU: handlers.SKU(1), Quantity: 600, PriceCents: 1}, {SKU: handlers.SKU(1), Quantity: 600, PriceCents: 1}}
			o.TotalCents = 1200
		}), "CANCELLED", "not enough stock"},
		{"equal SKUs are added up", request(t, func(o *handlers.CreateOrder) {
			o.Items = []handlers.Item{{SKU: handlers.SKU(2), Quantity: 2, PriceCents: 5}, {SKU: handlers.SKU(2), Quantity: 3, PriceCents: 7}}
			o.TotalCents = 31
		}), "CONFIRMED", ""},
		{"any script", request(t, func(o *handlers.CreateOrder) { o.Customer, o.ShipTo.Name = script, script }), "CONFIRMED", ""},
		{"the id with a trailing space is another id", withID(request(t, nil), "order-1"), "CONFIRMED", ""},
		{"trailing space", withID(request(t, nil), "order-1 "), "CONFIRMED", ""},
		{"an id of any bytes", withID(request(t, nil), "\xff\xfe\x00id"), "CONFIRMED", ""},
		{"the longest id", withID(request(t, nil), strings.Repeat("i", 255)), "CONFIRMED", ""},
	}
	for _, tt := range tests {
		w.submit(tt.msg)
	}
	w.rest(len(tests), 60*time.Second)
	for _, tt := range tests {
		var status, customer string
		var reason *string
		if err := w.db.QueryRowContext(t.Context(), `SELECT status, customer, reason FROM orders WHERE request_id = ?`,
			[]byte(tt.msg.MessageId)).Scan(&status, &customer, &reason); err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		if status != tt.status || tt.reason != "" && (reason == nil || !strings.Contains(*reason, tt.reason)) {
			t.Errorf("%s: %s because %v, want %s because of %q", tt.name, status, reason, tt.status, tt.reason)
		}
		if tt.name == "any script" && customer != script {
			t.Errorf("customer %q, want %q", customer, script)
		}
	}
	if n := w.count(`SELECT shipped FROM inventory WHERE sku = ?`, []byte(handlers.SKU(2))); n != 5 {
		t.Errorf("%d pieces of the SKU on two lines were shipped, want 5", n)
	}
	w.verify(expectation{confirmed: 6, noStock: 2})
}

func withRequestID(p amqp091.Publishing, id string) amqp091.Publishing {
	p.Headers = amqp091.Table{message.HeaderRequestID: id}
	return p
}

func withID(p amqp091.Publishing, id string) amqp091.Publishing {
	p.MessageId = id
	return p
}

// The same order twice, and again after the inbox has forgotten it: one order.
func TestSameOrderAgain(t *testing.T) {
	w := newWheel(t)
	w.start("relay")
	w.start("worker")
	w.awaitQueues()
	msg := request(t, nil)
	w.submit(msg, msg)
	w.rest(1, 30*time.Second)
	if _, err := w.db.ExecContext(t.Context(), `DELETE FROM inbox_messages WHERE consumer = 'orders'`); err != nil {
		t.Fatal(err)
	}
	w.submit(msg)
	w.eventually(30*time.Second, "the third copy is processed", func() error {
		if w.count(`SELECT COUNT(*) FROM inbox_messages WHERE consumer = 'orders'`) == 0 {
			return errors.New("not recorded")
		}
		return nil
	})
	w.rest(1, 30*time.Second)
	w.verifyInvariants()
	if n := w.count(`SELECT COUNT(*) FROM payments`); n != 1 {
		t.Errorf("%d payments, want 1", n)
	}
	id, err := handlers.SagaOf(t.Context(), w.db, msg.MessageId)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := saga.Get(t.Context(), w.db, id); err != nil || s.Status != saga.Completed {
		t.Errorf("the saga of the request is %s, %v", s.Status, err)
	}
	if _, err := handlers.SagaOf(t.Context(), w.db, "nobody"); !errors.Is(err, saga.ErrNotFound) {
		t.Errorf("the saga of no request: %v, want ErrNotFound", err)
	}
}

// Crossed SKUs cannot deadlock, the last pieces go to exactly as many orders as there are,
// and one SKU in every order is no more than a queue.
func TestContention(t *testing.T) {
	w := newWheel(t)
	if _, err := w.db.ExecContext(t.Context(), `UPDATE inventory SET initial = 10, available = 10 WHERE sku = ?`, []byte(handlers.SKU(9))); err != nil {
		t.Fatal(err)
	}
	w.together("relay", 2)
	w.together("worker", 3, "BACKSTEP_LANES=2")
	w.awaitQueues()
	var msgs []amqp091.Publishing
	for i := range 100 { // crossed
		a, b := handlers.SKU(i%2), handlers.SKU((i+1)%2)
		msgs = append(msgs, request(t, func(o *handlers.CreateOrder) {
			o.Items = []handlers.Item{{SKU: a, Quantity: 1, PriceCents: 50}, {SKU: b, Quantity: 1, PriceCents: 50}}
		}))
	}
	for range 50 { // the last ten
		msgs = append(msgs, request(t, line(handlers.SKU(9), 1, 100)))
	}
	for range 500 { // one SKU
		msgs = append(msgs, request(t, line(handlers.SKU(5), 1, 100)))
	}
	w.submit(msgs...)
	w.rest(len(msgs), 120*time.Second)
	w.verify(expectation{confirmed: 610, noStock: 40})
	for sku, want := range map[string]string{handlers.SKU(9): "10 shipped, 0 left", handlers.SKU(5): "500 shipped, 500 left"} {
		var shipped, left int
		if err := w.db.QueryRowContext(t.Context(), `SELECT shipped, available FROM inventory WHERE sku = ?`, []byte(sku)).Scan(&shipped, &left); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%d shipped, %d left", shipped, left); got != want {
			t.Errorf("%s: %s, want %s", sku, got, want)
		}
	}
}
