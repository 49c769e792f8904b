package e2e

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/saga"
)

// B113: orders are cancelled at random moments: before there is a saga, as soon as there is, in and
// between its steps, while it is undone, after its end; some twice, some that fail by themselves.
// Each ends confirmed with everything or cancelled with nothing, and whoever asked is told which.
func TestCancelAtRandomMoments(t *testing.T) {
	t.Parallel()
	w := newWheel(t)
	w.together("relay", 2)
	w.together("worker", 2, "BACKSTEP_BATCH=4")
	w.awaitQueues()
	w.cancelBeforeStart()
	const total = 121
	msgs, want := orders(total - 1)
	w.submit(msgs...)
	wishes := wishes{at: map[string]time.Time{}}
	w.eventually(90*time.Second, "every saga has ended, and so has the wish to cancel it", func() error {
		due := wishes.due(w)
		if len(due) > 0 {
			w.broker.Publish(t, message.CommandsExchange, handlers.Queues[rand.IntN(len(handlers.Queues))], due...)
		}
		if left := wishes.left(); len(wishes.at) < total || left > 0 {
			return fmt.Errorf("%d sagas have begun, %d of them are to be cancelled", len(wishes.at), left)
		}
		if n := w.count(`SELECT COUNT(*) FROM saga_instances WHERE status IN ('RUNNING', 'COMPENSATING')`); n > 0 {
			return fmt.Errorf("%d sagas are under way", n)
		}
		return nil
	})
	w.rest(total, 60*time.Second)
	w.verifyInvariants()
	w.nothingParked()

	w.eventually(20*time.Second, "every wish is answered", func() error {
		if n := w.count(`SELECT COUNT(*) FROM saga_actions WHERE action IN ('cancel', 'cancel refused')`); n < len(wishes.sent) {
			return fmt.Errorf("%d of %d wishes are answered", n, len(wishes.sent))
		}
		return nil
	})
	answered := w.column(`SELECT actor FROM saga_actions WHERE action IN ('cancel', 'cancel refused') ORDER BY actor`)
	slices.Sort(wishes.sent)
	if !slices.Equal(answered, wishes.sent) {
		t.Errorf("the answers are to\n%v\nthe wishes were\n%v", answered, wishes.sent)
	}
	confirmed := w.count(`SELECT COUNT(*) FROM orders WHERE status = 'CONFIRMED'`)
	cancelled := w.count(`SELECT COUNT(*) FROM orders WHERE status = 'CANCELLED'`)
	granted := w.count(`SELECT COUNT(DISTINCT saga_id) FROM saga_actions WHERE action = 'cancel'`)
	refused := w.count(`SELECT COUNT(*) FROM saga_actions WHERE action = 'cancel refused'`)
	t.Logf("%d wishes: %d granted, %d refused; %d confirmed, %d cancelled", len(wishes.sent), granted, refused, confirmed, cancelled)
	if confirmed+cancelled != total {
		t.Errorf("%d orders are confirmed and %d cancelled, of %d", confirmed, cancelled, total)
	}
	if confirmed < 2 || confirmed > want.confirmed+1 || granted < total/10 || refused < total/10 {
		t.Error("that shows too little")
	}
	for what, query := range map[string]string{
		"wishes were granted whose order is not cancelled": `
SELECT COUNT(*) FROM saga_actions a JOIN saga_instances i ON i.id = a.saga_id JOIN orders o ON o.id = i.correlation_id
 WHERE a.action = 'cancel' AND (o.status <> 'CANCELLED' OR o.reason NOT LIKE '%changed my mind%')`,
		"wishes were refused whose order is confirmed, and not because it is too late": `
SELECT COUNT(*) FROM saga_actions a JOIN saga_instances i ON i.id = a.saga_id JOIN orders o ON o.id = i.correlation_id
 WHERE a.action = 'cancel refused' AND o.status = 'CONFIRMED' AND a.reason NOT LIKE '%it is COMPLETED: too late to cancel it%'`,
		"wishes were refused whose order is cancelled, and not because it was already being so": `
SELECT COUNT(*) FROM saga_actions a JOIN saga_instances i ON i.id = a.saga_id JOIN orders o ON o.id = i.correlation_id
 WHERE a.action = 'cancel refused' AND o.status = 'CANCELLED' AND a.reason NOT LIKE '%already%'`,
		"orders were told of twice, or not at all": `
SELECT COUNT(*) FROM orders o
 WHERE 1 <> (SELECT COUNT(*) FROM outbox_events e
              WHERE e.aggregate_id = o.id AND e.routing_key IN ('order.confirmed', 'order.cancelled'))`,
		"sagas are stopped": `SELECT COUNT(*) FROM saga_instances WHERE status = 'MANUAL_ACTION'`,
	} {
		if n := w.count(query); n > 0 {
			t.Errorf("%d %s", n, what)
		}
	}
}

// cancelBeforeStart wishes to cancel the saga of an order before there is one, in both ways to name
// it. Who asks is told that there is none, and the saga that is started then is one like any other.
func (w *wheel) cancelBeforeStart() {
	w.t.Helper()
	order := handlers.Order{ID: message.NewID(), CreateOrder: handlers.CreateOrder{
		Customer: "Ada", PaymentToken: "tok", ShipTo: handlers.ShipTo{Country: "DE"}, TotalCents: 100,
		Items: []handlers.Item{{SKU: handlers.SKU(0), Quantity: 1, PriceCents: 100}},
	}}
	byID, byName := cancelling(order.ID), cancelling("")
	byName.Headers, byName.Body = nil, fmt.Appendf(nil, `{"type":"place-order","correlation_id":%q}`, order.ID)
	w.broker.Publish(w.t, message.CommandsExchange, handlers.PaymentQueue, byID, byName)
	told := map[string]string{}
	w.eventually(20*time.Second, "both wishes are parked", func() error {
		if d, ok := w.broker.Get(w.t, handlers.PaymentQueue+".parked"); ok {
			told[d.MessageId], _ = d.Headers[message.HeaderParkedReason].(string)
		}
		if len(told) < 2 {
			return fmt.Errorf("%d are", len(told))
		}
		return nil
	})
	for id, want := range map[string]string{
		byID.MessageId:   fmt.Sprintf("no saga with id %q", order.ID),
		byName.MessageId: fmt.Sprintf(`no saga of type "place-order" with correlation id %q`, order.ID),
	} {
		if !strings.Contains(told[id], want) {
			w.t.Errorf("a wish before the start is parked because %q, want %q", told[id], want)
		}
	}
	for _, table := range []string{
		`orders (request_id, customer, total_cents, payment_token, ship_to, id) VALUES ('early', 'Ada', 100, 'tok', '{}', ?)`,
		`order_items (line, sku, quantity, price_cents, order_id) VALUES (1, 'SKU-0001', 1, 100, ?)`,
	} {
		if _, err := w.db.ExecContext(w.t.Context(), `INSERT INTO `+table, []byte(order.ID)); err != nil {
			w.t.Fatal(err)
		}
	}
	w.begin(handlers.PlaceOrder, order.ID, order)
	w.eventually(30*time.Second, "the order that was cancelled before is confirmed", func() error {
		if got := w.text(`SELECT status FROM orders WHERE id = ?`, []byte(order.ID)); got != "CONFIRMED" {
			return errors.New(got)
		}
		return nil
	})
}

// wishes are those to cancel the sagas of a test.
type wishes struct {
	at   map[string]time.Time // when each saga is to be cancelled; zero: it has been
	sent []string             // each as the one who asked is called in its answer
}

// left returns how many sagas have yet to be cancelled.
func (w *wishes) left() (n int) {
	for _, at := range w.at {
		if !at.IsZero() {
			n++
		}
	}
	return n
}

// due returns the wishes whose moment has come.
func (w *wishes) due(on *wheel) (out []amqp091.Publishing) {
	on.t.Helper()
	rows, err := on.db.QueryContext(on.t.Context(), `SELECT id FROM saga_instances`)
	if err != nil {
		on.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			on.t.Fatal(err)
		}
		if _, known := w.at[id]; !known {
			w.at[id] = time.Now()
			if rand.IntN(2) == 0 {
				w.at[id] = time.Now().Add(time.Duration(rand.Int64N(int64(2 * time.Second))))
			}
		}
	}
	if err := rows.Err(); err != nil {
		on.t.Fatal(err)
	}
	for id, at := range w.at {
		if at.IsZero() || time.Now().Before(at) {
			continue
		}
		w.at[id] = time.Time{}
		for range 1 + rand.IntN(2) {
			wish := cancelling(id)
			out = append(out, wish)
			w.sent = append(w.sent, fmt.Sprintf("message %q", wish.MessageId))
		}
	}
	return out
}

// cancelling makes the wish to cancel a saga.
func cancelling(id string) amqp091.Publishing {
	return amqp091.Publishing{
		MessageId: message.NewID(), Type: saga.CancelType, DeliveryMode: amqp091.Persistent, ContentType: "application/json",
		Headers: amqp091.Table{message.HeaderSagaID: id}, Body: []byte(`{"reason":"changed my mind"}`),
	}
}
