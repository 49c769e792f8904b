package amqp

import (
	"fmt"
	"testing"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
	"backstep/internal/testenv"
)

// typical is a command as the relay publishes it.
func typical(exchange, key string) *message.Message {
	m := &message.Message{
		Properties: message.Properties{
			MessageID: message.NewID(), Type: "reserve-stock.execute", CorrelationID: message.NewID(),
			ContentType: "application/json", AppID: "backstep",
		},
		Headers: message.Headers{
			message.HeaderTraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
			message.HeaderRequestID:   message.NewID(), message.HeaderSagaID: message.NewID(),
			message.HeaderSagaType: "place-order", message.HeaderSagaVersion: int64(1),
			message.HeaderStep: "reserve-stock", message.HeaderDirection: "execute", message.HeaderAttempt: int64(1),
		},
		Body: make([]byte, 400), Exchange: exchange, RoutingKey: key, Mandatory: exchange == message.CommandsExchange,
	}
	return m
}

// BenchmarkPublish compares a ConfirmChannel with amqp091 used directly, both with 1000
// messages in flight. To nobody, the broker does next to nothing.
func BenchmarkPublish(b *testing.B) {
	const window = 1000
	broker := testenv.Vhost(b)
	c := start(b, Config{URL: broker.URL})
	declare(b, c, "orders")
	for _, to := range []struct{ name, exchange, key string }{
		{"nobody", message.EventsExchange, "order.created"},
		{"quorum", message.CommandsExchange, "orders"},
	} {
		b.Run(fmt.Sprintf("to=%s/by=amqp091", to.name), func(b *testing.B) {
			conn, err := amqp091.Dial(broker.URL)
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			ch, err := conn.Channel()
			if err != nil {
				b.Fatal(err)
			}
			if err := ch.Confirm(false); err != nil {
				b.Fatal(err)
			}
			m := typical(to.exchange, to.key)
			p, err := publishing(m, 0)
			if err != nil {
				b.Fatal(err)
			}
			var inFlight [window]*amqp091.DeferredConfirmation
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				if old := inFlight[i%window]; old != nil && !old.Wait() {
					b.Fatal("not acked")
				}
				inFlight[i%window], err = ch.PublishWithDeferredConfirm(to.exchange, to.key, m.Mandatory, false, p)
				if err != nil {
					b.Fatal(err)
				}
			}
			for _, last := range inFlight {
				if last != nil && !last.Wait() {
					b.Fatal("not acked")
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
			broker.Purge(b, "orders")
		})
		b.Run(fmt.Sprintf("to=%s/by=ConfirmChannel", to.name), func(b *testing.B) {
			p := NewPublisher(c, PublisherConfig{Window: window})
			defer p.Close()
			ch := acquire(b, p)
			defer ch.Destroy()
			m := typical(to.exchange, to.key)
			b.ReportAllocs()
			b.ResetTimer()
			inFlight := 0
			settle := func() {
				if r := <-ch.Results(); r.Kind != message.Confirmed {
					b.Fatalf("%+v", r)
				}
				inFlight--
			}
			for i := range b.N {
				if inFlight == window {
					settle()
				}
				if err := ch.Publish(b.Context(), uint64(i), m); err != nil {
					b.Fatal(err)
				}
				inFlight++
			}
			for inFlight > 0 {
				settle()
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
			broker.Purge(b, "orders")
		})
	}
}

// BenchmarkConsume measures deliveries with cumulative acks, prefetch 64.
func BenchmarkConsume(b *testing.B) {
	broker := testenv.Vhost(b)
	c := start(b, Config{URL: broker.URL})
	declare(b, c, "orders")
	p := newPublisher(b, c, PublisherConfig{Window: 1000})
	ch := acquire(b, p)
	inFlight := 0
	for i := range b.N {
		if inFlight == 1000 {
			<-ch.Results()
			inFlight--
		}
		if err := ch.Publish(b.Context(), uint64(i), typical(message.CommandsExchange, "orders")); err != nil {
			b.Fatal(err)
		}
		inFlight++
	}
	for range inFlight {
		<-ch.Results()
	}
	ch.Release()
	b.ResetTimer()
	sub := subscribe(b, c, "orders", 64)
	for i := range b.N {
		d := <-sub.Deliveries()
		if i%32 == 31 || i == b.N-1 {
			if err := sub.Ack(d.Tag, true); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
}
