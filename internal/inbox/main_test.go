package inbox

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"backstep/internal/message"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
	"backstep/migrations"
)

func TestMain(m *testing.M) {
	// The tests wait for servers, locks and deadlines more than they compute.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(testenv.M{M: m})
}

// patience is how long a test waits for what must happen.
const patience = 30 * time.Second

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

// receive waits for what comes out of a channel.
func receive[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("not within %s: %s", patience, what)
	}
	panic("unreachable")
}

// database is a schema of a test's own. Its pool gives up waiting for a lock after a second.
func database(t testing.TB) *sql.DB {
	t.Helper()
	return open(t, testenv.Database(t))
}

func open(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	db, err := sqltx.Open(dsn, sqltx.Config{LockWaitTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	if _, err := migrations.Up(t.Context(), db, nil); err != nil {
		t.Fatal(err)
	}
	exec(t, db, `CREATE TABLE IF NOT EXISTS effects (n BIGINT AUTO_INCREMENT PRIMARY KEY, message_id VARBINARY(255) NOT NULL)`)
	exec(t, db, `CREATE TABLE IF NOT EXISTS counters (id VARBINARY(8) PRIMARY KEY, n INT NOT NULL)`)
	exec(t, db, `INSERT INTO counters VALUES ('a', 0), ('b', 0) ON DUPLICATE KEY UPDATE n = n`)
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

func effectsOf(t testing.TB, db *sql.DB, id string) int {
	t.Helper()
	return number(t, db, `SELECT COUNT(*) FROM effects WHERE message_id = ?`, []byte(id))
}

func recorded(t testing.TB, db *sql.DB, queue, id string) bool {
	t.Helper()
	seen, err := Recorded(t.Context(), db, queue, []string{id})
	if err != nil {
		t.Fatal(err)
	}
	return seen[id]
}

// hold begins a transaction beside the lane's, runs a statement in it and keeps its locks
// until release.
func hold(t testing.TB, db *sql.DB, query string, args ...any) (tx *sql.Tx, release func()) {
	t.Helper()
	// With the locks of gaps that a stranger's transactions have.
	strange := &sql.TxOptions{Isolation: sql.LevelRepeatableRead}
	tx, err := db.BeginTx(context.WithoutCancel(t.Context()), strange)
	if err != nil {
		t.Fatal(err)
	}
	exec(t, tx, query, args...)
	release = sync.OnceFunc(func() {
		if err := tx.Rollback(); err != nil && !errors.Is(err, sql.ErrTxDone) {
			t.Errorf("let go of the locks: %v", err)
		}
	})
	t.Cleanup(release)
	return tx, release
}

// effects is a handler whose effect can be counted: a row for each message. Its functions may
// be nil.
type effects struct {
	// BatchFunc is called first, with the ids of the batch.
	BatchFunc func(ctx context.Context, tx *sqltx.Tx, ids []string)
	// OutcomeFunc decides about a message after its row is written.
	OutcomeFunc func(ctx context.Context, tx *sqltx.Tx, m *message.Message) message.Outcome

	mu      sync.Mutex // guards below
	batches [][]string
}

func (h *effects) HandleBatch(ctx context.Context, tx *sqltx.Tx, msgs []message.Message) []message.Outcome {
	ids := make([]string, len(msgs))
	for i := range msgs {
		ids[i] = msgs[i].MessageID
	}
	h.mu.Lock()
	h.batches = append(h.batches, ids)
	h.mu.Unlock()
	if h.BatchFunc != nil {
		h.BatchFunc(ctx, tx, ids)
	}
	out := make([]message.Outcome, len(msgs))
	for i := range msgs {
		if msgs[i].Failure != "" {
			out[i] = message.Outcome{Kind: message.Retry, Reason: msgs[i].Failure}
			continue
		}
		if _, err := tx.Exec(ctx, `INSERT INTO effects (message_id) VALUES (?)`, []byte(ids[i])); err != nil {
			tx.Fail(err)
			return out
		}
		if h.OutcomeFunc != nil {
			out[i] = h.OutcomeFunc(ctx, tx, &msgs[i])
		}
	}
	return out
}

// calls returns the batches so far.
func (h *effects) calls() [][]string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([][]string(nil), h.batches...)
}

func (h *effects) sizes() (n []int) {
	for _, b := range h.calls() {
		n = append(n, len(b))
	}
	return n
}

// lane is a lane that runs until the test ends or stop is called.
type lane struct {
	*Lane
	stats  *Stats
	logged func(msg string) int // how often
	stop   func()
}

// counting is a log that knows how often it has said something.
type counting struct {
	slog.Handler
	n *sync.Map // of *atomic.Int64, by message
}

func (c *counting) Handle(ctx context.Context, r slog.Record) error {
	n, _ := c.n.LoadOrStore(r.Message, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
	return c.Handler.Handle(ctx, r)
}

func (c *counting) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &counting{c.Handler.WithAttrs(attrs), c.n}
}

func (c *counting) count(msg string) int {
	n, ok := c.n.Load(msg)
	if !ok {
		return 0
	}
	return int(n.(*atomic.Int64).Load())
}

// newLane returns a lane that is not running.
func newLane(t testing.TB, db *sql.DB, src Source, cfg Config) *lane {
	t.Helper()
	log := &counting{Handler: slog.NewTextHandler(t.Output(), nil), n: &sync.Map{}}
	cfg.Log = slog.New(log)
	l := &lane{stats: &Stats{}, logged: log.count}
	l.Lane = NewLane(db, src, cfg, l.stats)
	return l
}

func run(t testing.TB, db *sql.DB, src Source, cfg Config) *lane {
	t.Helper()
	l := newLane(t, db, src, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	l.stop = sync.OnceFunc(func() {
		cancel()
		if err := receive(t, "Run returns", done); err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
	t.Cleanup(l.stop)
	return l
}

func msg(id string) message.Message {
	return message.Message{Properties: message.Properties{MessageID: id, Type: "test"}, Body: []byte(`{}`)}
}

// msgs returns n messages with new ids.
func newMsgs(n int) []message.Message {
	out := make([]message.Message, n)
	for i := range out {
		out[i] = msg(message.NewID())
	}
	return out
}

// row is a row of outbox_events or scheduled_messages as its reader sees it.
type row struct {
	message.Message
	due    time.Duration // scheduled: from now
	reason string
}

func outboxRows(t testing.TB, db *sql.DB, where string, args ...any) []row {
	t.Helper()
	return rowsOf(t, db, `SELECT message_id, ordering_key, exchange, routing_key, mandatory, properties, headers, payload, 0, COALESCE(last_error, '')
FROM outbox_events WHERE `+where+` ORDER BY id`, args...)
}

func scheduledRows(t testing.TB, db *sql.DB) []row {
	t.Helper()
	return rowsOf(t, db, `SELECT message_id, ordering_key, exchange, routing_key, mandatory, properties, headers, payload,
TIMESTAMPDIFF(MICROSECOND, NOW(6), due_at), COALESCE(last_error, '') FROM scheduled_messages ORDER BY id`)
}

func rowsOf(t testing.TB, db *sql.DB, query string, args ...any) (out []row) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), query, args...)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var r row
		var id, key, exchange, routingKey, properties, headers []byte
		var us int64
		if err := rows.Scan(&id, &key, &exchange, &routingKey, &r.Mandatory, &properties, &headers, &r.Body, &us, &r.reason); err != nil {
			t.Fatal(err)
		}
		if r.Properties, err = message.DecodeProperties(properties); err != nil {
			t.Fatal(err)
		}
		if r.Headers, err = message.DecodeHeaders(headers); err != nil {
			t.Fatal(err)
		}
		r.MessageID, r.OrderingKey, r.Exchange, r.RoutingKey = string(id), string(key), string(exchange), string(routingKey)
		r.due = time.Duration(us) * time.Microsecond
		out = append(out, r)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

// one returns the only element.
func one[T any](t testing.TB, what string, list []T) T {
	t.Helper()
	if len(list) != 1 {
		t.Fatalf("%d %s, want 1: %+v", len(list), what, list)
	}
	return list[0]
}

func equal(t testing.TB, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: %#v, want %#v", what, got, want)
	}
}
