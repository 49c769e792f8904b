package inbox

import (
	"context"
	"log/slog"
	"testing"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/amqp"
	"backstep/internal/message"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

// consumer is the amqp consumer as a lane knows it.
type consumer struct{ *amqp.Consumer }

func (c consumer) Subscribe(ctx context.Context, queue string, prefetch int) (Subscription, error) {
	sub, err := c.Consumer.Subscribe(ctx, queue, prefetch)
	if err != nil {
		return nil, err
	}
	return sub, nil
}

// rabbit is a virtual host of a test's own with the queue q, and a source of its deliveries.
func rabbit(t testing.TB) (*testenv.Broker, Source) {
	t.Helper()
	b := testenv.Vhost(t)
	topology := amqp.Topology{Queues: []string{"q"}}
	client, err := amqp.New(amqp.Config{
		URL: b.URL, Name: t.Name(), OnSession: topology.Ensure, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context())) // lanes that stop at the test's end hand back what they have
	done := make(chan error, 1)
	go func() { done <- client.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := receive(t, "the client stops", done); err != nil {
			t.Error(err)
		}
	})
	if _, err := client.Session(t.Context()); err != nil {
		t.Fatal(err)
	}
	return b, consumer{amqp.NewConsumer(client, "test")}
}

func publishings(n int) (out []amqp091.Publishing) {
	for range n {
		out = append(out, amqp091.Publishing{
			MessageId: message.NewID(), Type: "test", DeliveryMode: amqp091.Persistent, Body: []byte(`{}`),
		})
	}
	return out
}

func empty(t *testing.T, b *testenv.Broker) func() bool {
	return func() bool {
		ready, _ := b.Queue(t, "q")
		return ready == 0
	}
}

// Through RabbitMQ and back: each message once, without a single redelivery.
func TestRabbitMQ(t *testing.T) {
	t.Parallel()
	db := database(t)
	b, src := rabbit(t)
	const n = 500
	b.Publish(t, message.CommandsExchange, "q", publishings(n)...)
	h := &effects{}
	l := run(t, db, src, Config{Queue: "q", Handler: h})
	eventually(t, "all are done", func() bool { return l.stats.Done.Load() == n })
	l.stop()
	if ready, _ := b.Queue(t, "q"); ready != 0 {
		t.Errorf("%d messages are left: their acks came to nothing", ready)
	}
	equal(t, "effects", number(t, db, `SELECT COUNT(DISTINCT message_id) FROM effects`), n)
	equal(t, "records", number(t, db, `SELECT COUNT(*) FROM inbox_messages`), n)
	equal(t, "duplicates", l.stats.Duplicates.Load(), int64(0))
	if batches := len(h.calls()); batches > n/4 {
		t.Errorf("%d batches for %d messages that were all there", batches, n)
	}
}

// B54: what a lane that stops had not started is at once there for others.
func TestRabbitMQDrain(t *testing.T) {
	t.Parallel()
	db := database(t)
	b, src := rabbit(t)
	const n = 200
	b.Publish(t, message.CommandsExchange, "q", publishings(n)...)
	entered, gate := make(chan struct{}, n), make(chan struct{})
	h := &effects{BatchFunc: func(_ context.Context, _ *sqltx.Tx, ids []string) {
		if len(ids) > 1 {
			entered <- struct{}{}
			<-gate
		}
	}}
	l := newLane(t, db, src, Config{Queue: "q", Handler: h, Batch: 8})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	receive(t, "a batch is in hand", entered)
	inHand := len(h.calls()[len(h.calls())-1])
	before := int(l.stats.Done.Load())
	cancel()
	eventually(t, "the others go back", func() bool {
		ready, _ := b.Queue(t, "q")
		return ready == n-before-inHand
	})
	close(gate)
	if err := receive(t, "Run returns", done); err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	ready, _ := b.Queue(t, "q")
	equal(t, "left", ready, n-before-inHand)
	equal(t, "done", int(l.stats.Done.Load()), before+inHand)
	run(t, db, src, Config{Queue: "q", Handler: &effects{}})
	eventually(t, "another lane does the rest", func() bool { return number(t, db, `SELECT COUNT(*) FROM inbox_messages`) == n })
	eventually(t, "the queue is empty", empty(t, b))
	equal(t, "effects", number(t, db, `SELECT COUNT(*) FROM effects`), n)
}

// The session ends while messages are in hand: no ack crosses to the next one, the copies are
// duplicates.
func TestRabbitMQSessionGone(t *testing.T) {
	t.Parallel()
	db := database(t)
	b, src := rabbit(t)
	entered, gate := make(chan struct{}, 1000), make(chan struct{})
	h := &effects{BatchFunc: func(context.Context, *sqltx.Tx, []string) { entered <- struct{}{}; <-gate }}
	const n = 50
	b.Publish(t, message.CommandsExchange, "q", publishings(n)...)
	l := run(t, db, src, Config{Queue: "q", Handler: h})
	receive(t, "a message is in hand", entered)
	b.CloseConnections(t)
	close(gate)
	eventually(t, "all are done", func() bool { return l.stats.Done.Load() == n && l.stats.Duplicates.Load() > 0 })
	eventually(t, "the queue is empty", empty(t, b))
	l.stop()
	equal(t, "effects", number(t, db, `SELECT COUNT(*) FROM effects`), n)
	if ready, _ := b.Queue(t, "q"); ready != 0 {
		t.Errorf("%d messages are left", ready)
	}
}

// What cannot be stored goes to the same place whole, by way of the broker.
func TestRabbitMQDeadLettersHugeBodies(t *testing.T) {
	t.Parallel()
	db := database(t)
	b, src := rabbit(t)
	msgs := publishings(5)
	msgs[2].Body = make([]byte, maxParkedBody+1)
	msgs[2].Headers = amqp091.Table{"mine": "kept"}
	b.Publish(t, message.CommandsExchange, "q", msgs...)
	l := run(t, db, src, Config{Queue: "q", Handler: &effects{}})
	eventually(t, "all are settled", func() bool { return l.stats.Done.Load() == 4 && l.stats.Parked.Load() == 1 })
	eventually(t, "it is dead-lettered", func() bool { ready, _ := b.Queue(t, amqp.ParkedQueue("q")); return ready == 1 })
	d, _ := b.Get(t, amqp.ParkedQueue("q"))
	if d.MessageId != msgs[2].MessageId || len(d.Body) != len(msgs[2].Body) || d.Headers["mine"] != "kept" || d.Headers["x-death"] == nil {
		t.Errorf("dead-lettered: id %s, %d bytes, headers %v", d.MessageId, len(d.Body), d.Headers)
	}
	l.stop()
	if ready, _ := b.Queue(t, "q"); ready != 0 {
		t.Errorf("%d messages are left", ready)
	}
}

// Header names of any bytes come through the client, and into the parked copy.
func TestRabbitMQHeaders(t *testing.T) {
	t.Parallel()
	db := database(t)
	b, src := rabbit(t)
	m := publishings(1)
	m[0].Headers = amqp091.Table{"\xff name": "v\xfe", "table": amqp091.Table{"\xfd": []any{int32(1), []byte{0}}}}
	b.Publish(t, message.CommandsExchange, "q", m...)
	l := run(t, db, src, Config{Queue: "q", Handler: always(message.Park("no"))})
	eventually(t, "it is parked", func() bool { return l.stats.Parked.Load() == 1 })
	headers, body := unwrap(t, one(t, "outbox rows", outboxRows(t, db, "TRUE")))
	got, err := message.DecodeHeaders(headers)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "body", string(body), `{}`)
	equal(t, "headers", got, message.Headers{"$pairs": []any{
		[]any{"table", message.Headers{"$pairs": []any{[]any{"\xfd", []any{int32(1), []byte{0}}}}}},
		[]any{"\xff name", "v\xfe"},
	}})
}
