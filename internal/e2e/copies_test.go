package e2e

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// B01: the relay dies after the broker confirmed row 25 and before it was marked. Every copy
// of a row has the same id, properties, headers and body; no row is lost.
func TestCopiesAreIdentical(t *testing.T) {
	w := newWheel(t)
	relay := w.start("relay", "CRASH_AT=relay.confirmed:25")
	w.awaitQueues()
	w.sink("sink")
	const n = 50
	err := sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		for i := range n {
			if err := outbox.Add(ctx, tx, message.Message{
				Properties: message.Properties{MessageID: fmt.Sprintf("row-%02d", i), Type: "test", CorrelationID: "c"},
				Headers:    message.Headers{"n": int32(i), "raw": []byte{0, byte(i)}},
				Body:       fmt.Appendf(nil, `{"n":%d}`, i),
				Exchange:   message.CommandsExchange, RoutingKey: "sink", Mandatory: true,
			}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	relay.killed(30 * time.Second)
	w.start("relay")
	w.eventually(30*time.Second, "every row is marked published", func() error {
		if left := w.count(`SELECT COUNT(*) FROM outbox_events WHERE status <> 'PUBLISHED'`); left > 0 {
			return fmt.Errorf("%d rows are not", left)
		}
		return nil
	})
	copies := map[string][]amqp091.Delivery{}
	total := 0
	for {
		d, ok := w.broker.Get(t, "sink")
		if !ok {
			break
		}
		total++
		copies[d.MessageId] = append(copies[d.MessageId], d)
	}
	if len(copies) != n {
		t.Errorf("%d of %d rows arrived", len(copies), n)
	}
	if total == n {
		t.Error("nothing arrived twice: the crash was not between confirm and mark")
	}
	for id, ds := range copies {
		for _, d := range ds[1:] {
			if err := sameCopy(ds[0], d); err != nil {
				t.Errorf("copies of %s differ: %v", id, err)
			}
		}
	}
}

func sameCopy(a, b amqp091.Delivery) error {
	if string(a.Body) != string(b.Body) {
		return errors.New("body")
	}
	if !reflect.DeepEqual(a.Headers, b.Headers) {
		return fmt.Errorf("headers %v and %v", a.Headers, b.Headers)
	}
	for _, f := range []struct {
		name string
		a, b any
	}{
		{"content_type", a.ContentType, b.ContentType},
		{"delivery_mode", a.DeliveryMode, b.DeliveryMode},
		{"correlation_id", a.CorrelationId, b.CorrelationId},
		{"timestamp", a.Timestamp.Unix(), b.Timestamp.Unix()},
		{"type", a.Type, b.Type},
		{"app_id", a.AppId, b.AppId},
	} {
		if f.a != f.b {
			return fmt.Errorf("%s %v and %v", f.name, f.a, f.b)
		}
	}
	return nil
}

// sink declares a queue of the test's own and binds it to the commands.
func (w *wheel) sink(name string) {
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
	if _, err := ch.QueueDeclare(name, true, false, false, false, amqp091.Table{"x-queue-type": "quorum"}); err != nil {
		w.t.Fatal(err)
	}
	if err := ch.QueueBind(name, name, message.CommandsExchange, false, nil); err != nil {
		w.t.Fatal(err)
	}
}

// B07: a command with no queue bound is never marked published, and is delivered when there
// is one again.
func TestUnroutableCommandIsNeverPublished(t *testing.T) {
	w := newWheel(t)
	w.start("relay")
	w.start("worker")
	w.awaitQueues()
	w.broker.Unbind(t, message.CommandsExchange, "payment", "payment")
	msgs, want := orders(20)
	w.submit(msgs...)
	w.eventually(30*time.Second, "commands for payment were returned", func() error {
		if w.count(`SELECT COUNT(*) FROM outbox_events WHERE routing_key = 'payment' AND attempts > 1`) == 0 {
			return errors.New("none was")
		}
		return nil
	})
	if n := w.count(`SELECT COUNT(*) FROM outbox_events WHERE routing_key = 'payment' AND status <> 'PENDING'`); n > 0 {
		t.Errorf("%d unroutable commands are not PENDING", n)
	}
	if n := w.count(`
SELECT COUNT(*) FROM outbox_events
 WHERE routing_key = 'payment' AND attempts > 0
   AND last_error LIKE '%backstep.commands%' AND last_error LIKE '%payment%'`); n == 0 {
		t.Error("the reason does not name exchange and routing key")
	}
	w.eventually(10*time.Second, "rows to other queues do not wait behind them", func() error {
		if n := w.count(`SELECT COUNT(*) FROM outbox_events WHERE status = 'PENDING' AND routing_key <> 'payment'`); n > 0 {
			return fmt.Errorf("%d do", n)
		}
		return nil
	})
	if n := w.count(`SELECT COUNT(*) FROM outbox_events WHERE routing_key = 'payment' AND status = 'PUBLISHED'`); n > 0 {
		t.Errorf("%d unroutable commands were marked published", n)
	}
	w.broker.Bind(t, message.CommandsExchange, "payment", "payment")
	w.rest(want.total(), 60*time.Second)
	w.verify(want)
}
