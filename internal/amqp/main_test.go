package amqp

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"go.uber.org/goleak"

	"backstep/internal/message"
	"backstep/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(testenv.M{M: m}) }

// patience is how long a test waits for what must happen.
const patience = 30 * time.Second

// start runs a client of the broker until the test ends.
func start(t testing.TB, cfg Config) *Client {
	t.Helper()
	cfg.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	if cfg.Name == "" {
		cfg.Name = t.Name()
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
	return c
}

// within returns a context that fails the wait, not the test binary.
func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func session(t testing.TB, c *Client) *Session {
	t.Helper()
	s, err := c.Session(within(t))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// channel opens a channel on the client's session for the test's own use.
func channel(t testing.TB, c *Client) *amqp091.Channel {
	t.Helper()
	var ch *amqp091.Channel
	err := session(t, c).channel(within(t), func(opened *amqp091.Channel) error { ch = opened; return nil })
	if err != nil {
		t.Fatal(err)
	}
	return ch
}

// declare declares the topology with these queues.
func declare(t testing.TB, c *Client, queues ...string) {
	t.Helper()
	if err := (Topology{Queues: queues}).Declare(within(t), session(t, c)); err != nil {
		t.Fatal(err)
	}
}

// queueWith declares a queue with these arguments, bound to the commands exchange by its name.
func queueWith(t testing.TB, c *Client, name string, args amqp091.Table) {
	t.Helper()
	ch := channel(t, c)
	if _, err := ch.QueueDeclare(name, true, false, false, false, args); err != nil {
		t.Fatal(err)
	}
	if err := ch.QueueBind(name, name, message.CommandsExchange, false, nil); err != nil {
		t.Fatal(err)
	}
}

func acquire(t testing.TB, p *Publisher) *ConfirmChannel {
	t.Helper()
	c, err := p.Acquire(within(t))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func newPublisher(t testing.TB, c *Client, cfg PublisherConfig) *Publisher {
	t.Helper()
	p := NewPublisher(c, cfg)
	t.Cleanup(p.Close)
	return p
}

// ordersPublisher returns a publisher to a broker of its own that has the topology with a queue "orders".
func ordersPublisher(t testing.TB, cfg PublisherConfig) (*testenv.Broker, *Client, *Publisher) {
	t.Helper()
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	return b, c, newPublisher(t, c, cfg)
}

// command returns a mandatory message to a queue.
func command(queue string) *message.Message {
	return &message.Message{
		Properties: message.Properties{MessageID: message.NewID(), Type: "test"},
		Exchange:   message.CommandsExchange, RoutingKey: queue, Mandatory: true,
		Body: []byte(`{"test":true}`),
	}
}

// results waits for n results and returns them by tag.
func results(t testing.TB, c *ConfirmChannel, n int) map[uint64]message.Result {
	t.Helper()
	got := make(map[uint64]message.Result, n)
	limit := time.After(patience)
	for range n {
		select {
		case r := <-c.Results():
			if old, twice := got[r.Tag]; twice {
				t.Fatalf("two results for tag %d: %+v and %+v", r.Tag, old, r)
			}
			got[r.Tag] = r
		case <-limit:
			t.Fatalf("only %d of %d results came", len(got), n)
		}
	}
	select {
	case r := <-c.Results():
		t.Fatalf("a result nobody waits for: %+v", r)
	default:
	}
	return got
}

// kinds counts results by kind.
func kinds(results map[uint64]message.Result) map[message.ResultKind]int {
	n := map[message.ResultKind]int{}
	for _, r := range results {
		n[r.Kind]++
	}
	return n
}

// publish publishes messages with their index as tag.
func publish(t testing.TB, c *ConfirmChannel, msgs ...*message.Message) {
	t.Helper()
	for i, m := range msgs {
		if err := c.Publish(t.Context(), uint64(i), m); err != nil {
			t.Fatalf("publish message %d: %v", i, err)
		}
	}
}

// result publishes a message and returns what became of it.
func result(t testing.TB, c *ConfirmChannel, m *message.Message) message.Result {
	t.Helper()
	publish(t, c, m)
	return results(t, c, 1)[0]
}

// fill publishes n numbered messages to a queue and waits until they are in it.
func fill(t testing.TB, c *Client, queue string, n int) {
	t.Helper()
	p := NewPublisher(c, PublisherConfig{Window: n})
	defer p.Close()
	ch := acquire(t, p)
	defer ch.Release()
	for i := range n {
		m := command(queue)
		m.Body = fmt.Append(nil, i)
		if err := ch.Publish(t.Context(), uint64(i), m); err != nil {
			t.Fatal(err)
		}
	}
	if got := kinds(results(t, ch, n)); got[message.Confirmed] != n {
		t.Fatalf("filled queue %q: %v, want %d confirmed", queue, got, n)
	}
}

// receive waits for the next delivery.
func receive(t testing.TB, s *Subscription) message.Delivery {
	t.Helper()
	select {
	case d, ok := <-s.Deliveries():
		if !ok {
			t.Fatalf("Deliveries is closed: %v", s.Err())
		}
		return d
	case <-time.After(patience):
		t.Fatal("no delivery came")
	}
	panic("unreachable")
}

// awaitEnd waits until Deliveries is closed and returns what still came.
func awaitEnd(t testing.TB, s *Subscription) (rest []message.Delivery) {
	t.Helper()
	limit := time.After(patience)
	for {
		select {
		case d, ok := <-s.Deliveries():
			if !ok {
				return rest
			}
			rest = append(rest, d)
		case <-limit:
			t.Fatal("Deliveries was not closed")
		}
	}
}

func subscribe(t testing.TB, c *Client, queue string, prefetch int) *Subscription {
	t.Helper()
	s, err := NewConsumer(c, "test").Subscribe(within(t), queue, prefetch)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() }) // many tests have lost it by then
	return s
}
