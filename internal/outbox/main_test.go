package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"
	"go.uber.org/goleak"

	"backstep/internal/amqp"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
	"backstep/migrations"
)

func TestMain(m *testing.M) {
	flag.Parse()
	_ = flag.Set("test.parallel", "8") // they wait more than they compute; the flag exists
	goleak.VerifyTestMain(testenv.M{M: m})
}

// patience is how long a test waits for what must happen.
const patience = 2 * time.Minute

// eventually waits until ok is true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", patience, what)
		}
		<-tick.C
	}
}

// never demands that bad stays false for as long as it takes to be sure.
func never(t testing.TB, what string, during time.Duration, bad func() bool) {
	t.Helper()
	end := time.After(during)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if bad() {
			t.Fatalf("this must not be: %s", what)
		}
		select {
		case <-end:
			return
		case <-tick.C:
		}
	}
}

// database is a schema of a test's own.
func database(t testing.TB) *sql.DB {
	t.Helper()
	return open(t, testenv.Database(t))
}

func open(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	db, err := sqltx.Open(dsn, sqltx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	if _, err := migrations.Up(t.Context(), db, nil); err != nil {
		t.Fatal(err)
	}
	return db
}

func exec(t testing.TB, db interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}, query string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// number returns what a query for one number gives.
func number(t testing.TB, db *sql.DB, query string, args ...any) int {
	t.Helper()
	var n int
	if err := db.QueryRowContext(t.Context(), query, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

// text returns what a query for one text gives.
func text(t testing.TB, db *sql.DB, query string, args ...any) string {
	t.Helper()
	var s sql.NullString
	if err := db.QueryRowContext(t.Context(), query, args...).Scan(&s); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return s.String
}

// having returns how many outbox rows have this status.
func having(t testing.TB, db *sql.DB, status string) int {
	t.Helper()
	return number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE status = ?`, status)
}

// published waits until n rows are PUBLISHED and none is PENDING.
func published(t testing.TB, db *sql.DB, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d rows are published", n), func() bool {
		return having(t, db, "PENDING") == 0 && having(t, db, "PUBLISHED") == n
	})
}

func add(t testing.TB, db *sql.DB, msgs ...message.Message) {
	t.Helper()
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		return outbox.Add(ctx, tx, msgs...)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func to(exchange, routingKey, id string) message.Message {
	return message.Message{
		Properties: message.Properties{MessageID: id, Type: "test"}, Body: []byte(`{}`),
		Exchange: exchange, RoutingKey: routingKey,
	}
}

// command returns a mandatory message to a queue.
func command(queue, id string) message.Message {
	m := to(message.CommandsExchange, queue, id)
	m.Mandatory = true
	return m
}

// keyed returns m with an ordering key.
func keyed(m message.Message, key string) message.Message {
	m.OrderingKey = key
	return m
}

func logger(t testing.TB) *slog.Logger { return slog.New(slog.NewTextHandler(t.Output(), nil)) }

// relay is a relay that runs until the test ends or stop is called.
type relay struct {
	*outbox.Relay
	stop func()
}

// start runs a relay that polls quickly.
func start(t testing.TB, db *sql.DB, pub outbox.Publisher, cfg outbox.Config) *relay {
	t.Helper()
	if cfg.PollMax == 0 {
		cfg.PollMax = 50 * time.Millisecond
	}
	if cfg.Log == nil {
		cfg.Log = logger(t)
	}
	r := &relay{Relay: outbox.NewRelay(db, pub, cfg)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run = %v, want nil", err)
			}
		case <-time.After(patience):
			t.Error("Run did not return")
		}
	})
	t.Cleanup(r.stop)
	return r
}

// broker is a vhost of a test's own, with the topology's exchanges, and a client of it.
type broker struct {
	*testenv.Broker
	client *amqp.Client
	pub    *amqp.Publisher
}

func newBroker(t testing.TB) *broker {
	t.Helper()
	b := testenv.Vhost(t)
	return connect(t, b, b.URL)
}

// connect returns b with a client that reaches it at url.
func connect(t testing.TB, vhost *testenv.Broker, url string) *broker {
	t.Helper()
	client, err := amqp.New(amqp.Config{URL: url, Log: logger(t), MaxBackoff: time.Second, OnSession: amqp.Topology{}.Ensure})
	if err != nil {
		t.Fatal(err)
	}
	b := &broker{Broker: vhost, client: client, pub: amqp.NewPublisher(client, amqp.PublisherConfig{})}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- client.Run(ctx) }()
	t.Cleanup(func() {
		b.pub.Close()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("client: Run = %v, want nil", err)
		}
	})
	eventually(t, "the client is connected", client.Ready)
	return b
}

// Ready and Acquire make b an outbox.Publisher, as in cmd/relay.
func (b *broker) Ready() bool { return b.pub.Ready() }

func (b *broker) Acquire(ctx context.Context) (outbox.Channel, error) {
	ch, err := b.pub.Acquire(ctx)
	if err != nil {
		return nil, err // not a nil *ConfirmChannel in an interface
	}
	return channel{ch}, nil
}

type channel struct{ *amqp.ConfirmChannel }

func (c channel) Publish(ctx context.Context, tag uint64, m *message.Message) error {
	err := c.ConfirmChannel.Publish(ctx, tag, m)
	if errors.Is(err, amqp.ErrRefused) {
		return errors.Join(outbox.ErrRefused, err)
	}
	return err
}

// on runs use with a channel of a connection of its own.
func (b *broker) on(t testing.TB, use func(*amqp091.Channel) error) {
	t.Helper()
	conn, err := amqp091.DialConfig(b.URL, amqp091.Config{Properties: amqp091.Table{"connection_name": "testenv"}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if err := use(ch); err != nil {
		t.Fatal(err)
	}
}

// queue declares a queue and binds it to the commands under its name.
func (b *broker) queue(t testing.TB, name string, args amqp091.Table) {
	t.Helper()
	b.on(t, func(ch *amqp091.Channel) error {
		if _, err := ch.QueueDeclare(name, true, false, false, false, args); err != nil {
			return err
		}
		return ch.QueueBind(name, name, message.CommandsExchange, false, nil)
	})
}

// sink collects what arrives in a queue.
type sink struct {
	mu         sync.Mutex // guards below
	deliveries []amqp091.Delivery
	arrived    map[string]time.Time // the first of each id
}

// consume takes what arrives in a queue until the test ends, on a connection of its own.
func (b *broker) consume(t testing.TB, queue string) *sink {
	t.Helper()
	conn, err := amqp091.DialConfig(b.URL, amqp091.Config{Properties: amqp091.Table{"connection_name": "testenv"}})
	if err != nil {
		t.Fatal(err)
	}
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	deliveries, err := ch.Consume(queue, "", true, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	s, done := &sink{arrived: map[string]time.Time{}}, make(chan struct{})
	go func() {
		defer close(done)
		for d := range deliveries {
			s.mu.Lock()
			s.deliveries = append(s.deliveries, d)
			if s.arrived[d.MessageId].IsZero() {
				s.arrived[d.MessageId] = time.Now()
			}
			s.mu.Unlock()
		}
	}()
	t.Cleanup(func() { _ = conn.Close(); <-done })
	return s
}

// all returns what has arrived, in order.
func (s *sink) all() []amqp091.Delivery {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]amqp091.Delivery(nil), s.deliveries...)
}

// ids returns the ids of what has arrived, in order, each once.
func (s *sink) ids() (ids []string) {
	seen := map[string]bool{}
	for _, d := range s.all() {
		if !seen[d.MessageId] {
			seen[d.MessageId] = true
			ids = append(ids, d.MessageId)
		}
	}
	return ids
}

// await waits for n different messages and returns their ids in the order of their first delivery.
func (s *sink) await(t testing.TB, n int) []string {
	t.Helper()
	eventually(t, fmt.Sprintf("%d messages arrive", n), func() bool { return len(s.ids()) >= n })
	return s.ids()
}

// names returns prefix0, prefix1, … of n.
func names(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("%s%d", prefix, i)
	}
	return out
}

func equal[T comparable](t testing.TB, what string, got, want []T) {
	t.Helper()
	if g, w := fmt.Sprint(got), fmt.Sprint(want); g != w {
		t.Errorf("%s: %s, want %s", what, g, w)
	}
}

// same is equal in any order.
func same(t testing.TB, what string, got, want []string) {
	t.Helper()
	equal(t, what, slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want)))
}

func contains(t testing.TB, what, s string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(s, p) {
			t.Errorf("%s is %q, without %q", what, s, p)
		}
	}
}
