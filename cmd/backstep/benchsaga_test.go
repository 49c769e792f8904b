package main

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"syscall"
	"testing"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/testenv"
	"backstep/migrations"
)

// TestBenchSaga has servers of its own: of those that are given nobody knows the processes.
func TestBenchSaga(t *testing.T) {
	a := newOperator(t).run("", "bench", "saga", "--orders", "60", "--refuse", "25", "--rate", "20", "--seconds", "1", "--runs", "2", "--json")
	a.want(exitOK, "repetition 2 of 2")
	var r sagaResult
	a.decode(&r)
	described(t, r.setting, "saga", 2)
	if r.Orders != 60 || r.Relays != 2 || r.Workers != 2 || r.Refuse != 25 || r.SKUs != 1000 || r.HotSKU ||
		r.Rate != 20 || r.Seconds != 1 || r.Singles != 30 || r.Batched != 120 {
		t.Errorf("parameters %+v", r)
	}
	for what, f := range map[string]figure{
		"sagas": r.Sagas, "single": r.Single, "batch": r.Batch, "p50": r.P50, "p99": r.P99, "raw p50": r.RawP50,
		"raw p99": r.RawP99, "step p50": r.StepP50, "step p99": r.StepP99,
	} {
		if measured(t, what, f, 2); f.Min <= 0 {
			t.Errorf("%s: %+v, want more than nothing", what, f)
		}
	}
	measured(t, "conflicts", r.Conflicts, 2)
	measured(t, "duplicates", r.Duplicates, 2)
	if measured(t, "fill", r.Fill, 2); r.Fill.Min < 1 || r.Fill.Max > 32 {
		t.Errorf("messages in a transaction: %+v", r.Fill)
	}
	near := func(what string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > 1e-6 {
			t.Errorf("%s is %v, want %v", what, got, want)
		}
	}
	for i := range 2 {
		near("ratio to single", r.SingleRatio.Values[i], r.Sagas.Values[i]/r.Single.Values[i])
		near("ratio to batch", r.BatchRatio.Values[i], r.Sagas.Values[i]/r.Batch.Values[i])
		all := total(r.CPU, i)
		near("ratio to single by CPU", r.SingleCPURatio.Values[i], total(r.SingleCPU, i)/all)
		near("ratio to batch by CPU", r.BatchCPURatio.Values[i], total(r.BatchCPU, i)/all)
		near("bound of p50", r.P50Bound.Values[i], 1.2*(3*r.RawP50.Values[i]+3*r.StepP50.Values[i])+3)
		near("bound of p99", r.P99Bound.Values[i], 1.2*(3*r.RawP99.Values[i]+3*r.StepP99.Values[i])+15)
		if r.P99.Values[i] < r.P50.Values[i] {
			t.Errorf("p99 is %v and p50 %v", r.P99.Values[i], r.P50.Values[i])
		}
	}
	charged(t, "CPU", r.CPU, 2, "relay", "worker", "mysql", "rabbitmq", "bench", "others")
	charged(t, "CPU of the single ceiling", r.SingleCPU, 2, "mysql", "rabbitmq", "bench", "others")
	charged(t, "CPU of the batch ceiling", r.BatchCPU, 2, "mysql", "rabbitmq", "bench", "others")
	r.wantStatements(t, 60, 15)

	var names map[string]any
	if err := json.Unmarshal([]byte(a.stdout), &names); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{
		"sagas_per_s", "ceiling_single", "ceiling_batch", "ratio_single", "ratio_batch", "p50_ms", "p99_ms",
		"p50_bound_ms", "p99_bound_ms", "statements_per_message", "cpu_s_per_1k", "mysql", "rabbitmq", "orders",
	} {
		if names[name] == nil {
			t.Errorf("the JSON has no %s", name)
		}
	}
}

// total is the processor time of all but the others in one repetition.
func total(c costs, repetition int) float64 {
	all := 0.0
	for _, name := range []string{"relay", "worker", "mysql", "rabbitmq", "bench"} {
		if c[name] != nil {
			all += c[name].Values[repetition]
		}
	}
	return all
}

// wantStatements demands counts that add up, and are exact where they do not depend on who
// shares a transaction: of n orders so many were refused, which undoes two steps of each.
func (r *sagaResult) wantStatements(t *testing.T, n, refused int) {
	t.Helper()
	if r.Counted != n {
		t.Errorf("statements of %d sagas are counted, want %d", r.Counted, n)
	}
	messages := float64(4*n + 2*refused)
	perMessage := 0.0
	perSaga := map[string]float64{}
	for _, k := range r.Kinds {
		if k.PerSaga <= 0 || math.Abs(k.PerSaga*float64(n)-k.PerMessage*messages) > 1e-6 {
			t.Errorf("statement %+v of %d sagas and %v messages", k, n, messages)
		}
		perSaga[k.Process+" "+k.Kind] = k.PerSaga
		if k.Process == "worker" {
			perMessage += k.PerMessage
		}
	}
	if math.Abs(perMessage-r.PerMessage) > 1e-6 {
		t.Errorf("%v statements a message, but the kinds add up to %v", r.PerMessage, perMessage)
	}
	for _, kind := range []string{
		"worker COMMIT", "worker INSERT inbox_messages", "worker INSERT outbox_events", "worker UPDATE saga_instances",
		"worker INSERT payments", "worker UPDATE orders", "relay UPDATE outbox_events",
	} {
		if perSaga[kind] == 0 {
			t.Errorf("no %q was counted: %v", kind, perSaga)
		}
	}
	if perSaga["worker COMMIT"] != perSaga["worker START TRANSACTION"] || perSaga["worker COMMIT"] > messages/float64(n) {
		t.Errorf("transactions: %v", perSaga)
	}
}

// TestBenchSagaPrints what a person reads, on servers that are given.
func TestBenchSagaPrints(t *testing.T) {
	o := newDemoOperator(t)
	a := o.run("", "bench", "saga", "--orders", "40", "--hot-sku", "--relays", "1", "--workers", "1", "--seconds", "0", "--runs", "1").want(exitOK)
	for _, text := range []string{
		"bench saga: 40 orders, 1 relay, 1 worker, one SKU\n1 repetition, ", "ratio to one saga a transaction",
		"ratio to 32 sagas a transaction", "CPU seconds for 1000 sagas, worker", "40 sagas counted", "INSERT outbox_events",
	} {
		if !strings.Contains(a.stdout, text) {
			t.Errorf("it does not say %q:\n%s", text, a.stdout)
		}
	}
	if strings.Contains(a.stdout, "p50") {
		t.Errorf("it speaks of a latency that was not measured:\n%s", a.stdout)
	}
	nothingLeft(t, o, a.stderr)
}

// TestStackOfDemoAndBench: the stack in the environment is not ignored.
func TestStackOfDemoAndBench(t *testing.T) {
	for _, verb := range []string{"demo", "bench relay", "bench latency", "bench schedule", "bench saga"} {
		newOperator(t, "TEST_STACK=nonsense").run("", strings.Fields(verb)...).want(exitFailed, `TEST_STACK is "nonsense"`)
	}
}

func TestBenchSagaStops(t *testing.T) {
	for _, tt := range []struct{ name, orders, seconds, moment string }{
		{"ceilings", "50000", "0", "ceilings, in database"},
		{"latency", "20", "2", "through the system"},
		{"statements", "20", "0", "counting statements"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := newDemoOperator(t)
			b := o.start("backstep", "bench", "saga", "--runs", "1", "--orders", tt.orders, "--seconds", tt.seconds)
			b.says(tt.moment)
			if code := b.stop(syscall.SIGINT); code != exitFailed || !strings.Contains(b.text(), "interrupted") {
				t.Errorf("exit code %d:\n%s", code, b.text())
			}
			nothingLeft(t, o, b.text())
		})
	}
}

// TestBenchSagaChecks: a rate that lost an order, or made one too many, is none.
func TestBenchSagaChecks(t *testing.T) {
	ctx := t.Context()
	vhost := testenv.Vhost(t)
	var c config
	c.MySQL.DSN, c.AMQP.URL = testenv.Database(t), vhost.URL
	c.Inbox.Retention = 24 * time.Hour
	db, err := c.openDatabase(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	if _, err := migrations.Up(ctx, db, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := applyTopology(ctx, c); err != nil {
		t.Fatal(err)
	}
	broker, err := c.connect(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer broker.close()
	s := &station{benchmark: &benchmark{progress: t.Output()}, place: &place{config: c}, db: db, broker: broker, fleet: &fleet{}}
	check := func(b *sagaBench, orders []order) error {
		_, err := b.check(ctx, b.trial(s, len(orders)), orders)
		return err
	}
	wrong := func(what string, err error) {
		t.Helper()
		if err == nil {
			t.Errorf("%s, and it found nothing wrong", what)
		}
	}
	none := &sagaBench{benchmark: s.benchmark}
	if err := errors.Join(check(none, nil), none.checkAll(ctx, s)); err != nil {
		t.Fatalf("of no orders: %v", err)
	}
	orders := generate(mix{count: 1}, 1, 5)
	orders[0].message(ctx)
	one := &sagaBench{benchmark: s.benchmark, sagaOptions: sagaOptions{orders: 1}}
	wrong("an order is missing", check(one, orders))
	wrong("an order is missing", one.checkAll(ctx, s))

	// It is there, and confirmed by nobody: nothing was charged or shipped.
	if err := start(ctx, s, handlers.NewOrderCreate(nil), &orders[0]); err != nil {
		t.Fatal(err)
	}
	for _, query := range []string{
		`UPDATE orders SET status = 'CONFIRMED'`, `UPDATE saga_instances SET status = 'COMPLETED'`, `DELETE FROM outbox_events`,
	} {
		if _, err := db.ExecContext(ctx, query); err != nil {
			t.Fatal(err)
		}
	}
	wrong("an invariant is broken", check(one, orders))
	wrong("an invariant is broken", one.checkAll(ctx, s))
	wrong("there is an order too many", check(none, nil))
}
