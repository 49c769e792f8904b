package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/handlers"
)

// sagaOptions are the flags of bench saga.
type sagaOptions struct {
	benchOptions
	orders, relays, workers, refuse int
	hotSKU                          bool
	rate, seconds                   int
}

func newBenchSaga() *cobra.Command {
	var o sagaOptions
	cmd := &cobra.Command{
		Use:   "saga",
		Short: "How many order sagas a second, and how long one takes, beside the bare SQL of their steps",
		Long: `Throughput: publishes --orders orders at once to RabbitMQ, with --relays and --workers processes
running, and measures from before the first publish until the last saga has ended (the
database's time in its last transaction). Intake is in it, and everything else: three steps,
events, inbox, outbox and saga rows, and the publishing. Every order must become what it should,
and every invariant must hold; else it fails.

The ceilings are the same orders in SQL and nothing else, right before it, in a database of
their own with our schema: orders and sagas made beforehand, no broker, no intake, every row
that our steps write, one round trip a statement. ceiling_single has a transaction for each step
of each saga, on ` + fmt.Sprint(singleConnections) + ` connections; ceiling_batch has ` + fmt.Sprint(batchSize) + ` sagas in a transaction, on ` + fmt.Sprint(batchConnections) + ` connections, with one
statement for all rows of a table. They are of orders that succeed, also with --refuse. The
ratios by CPU compare the processor time of all processes instead of the rates: they hold on a
machine that is busy with something else.

Latency: starts --rate sagas a second for --seconds, by the intake's own transaction in this
process, and measures from the return of that COMMIT until the transaction of the last step is
visible, which is looked for every ` + endedPoll.String() + `: so it may be read that much, and a query, too late,
never too early. Its bound is 1.2 × (3 × a raw publish to delivery + 3 × a bare step's
transaction) + 3 ms, or 15 ms for the p99, of those two at the same pace with nothing else
running.

Statements are counted apart, in a last run through a relay of connections that is not timed:
everything the workers send to the database, a round trip each, for each message they process.`,
		Example: `  backstep bench saga
  backstep bench saga --refuse 25               # a quarter of the sagas is compensated
  backstep bench saga --hot-sku --seconds 0     # all orders take the same SKU; no latency
  backstep bench saga --json | jq '{single: .ratio_single.median, batch: .ratio_batch.median}'`,
	}
	f := cmd.Flags()
	f.IntVar(&o.orders, "orders", 5000, "orders that are submitted at once")
	f.IntVar(&o.relays, "relays", 2, "relay processes")
	f.IntVar(&o.workers, "workers", 2, "worker processes")
	f.IntVar(&o.refuse, "refuse", 0, "percent of the orders whose shipment is refused, so that they are compensated")
	f.BoolVar(&o.hotSKU, "hot-sku", false, "all orders take the same SKU")
	f.IntVar(&o.rate, "rate", 20, "sagas a second of the latency")
	f.IntVar(&o.seconds, "seconds", 15, "for so long; 0 leaves the latency out")
	return o.command(cmd, o.validate, func(b *benchmark) (benchResult, measure) {
		m := sagaBench{benchmark: b, sagaOptions: o}
		m.begin()
		return &m.result, m.measure
	})
}

func (o *sagaOptions) validate() error {
	return errors.Join(o.benchOptions.validate(),
		inRange("orders", o.orders, 1, 1_000_000), inRange("relays", o.relays, 1, 16), inRange("workers", o.workers, 1, 32),
		inRange("refuse", o.refuse, 0, 100), inRange("rate", o.rate, 1, 1000), inRange("seconds", o.seconds, 0, 3600))
}

// mix is the orders of the throughput.
func (o *sagaOptions) mix() mix {
	return mix{count: o.orders, refuse: int(math.Round(float64(o.orders*o.refuse) / 100))}
}

// skus is how many there are.
func (o *sagaOptions) skus() int {
	if o.hotSKU {
		return 1
	}
	return sagaSKUs
}

const (
	sagaSKUs  = 1000
	sagaStock = 100_000_000 // of each; enough for all

	singleConnections = 32
	batchConnections  = 8
	batchSize         = 32
)

// The ceilings' sagas: each for some seconds.
func (o *sagaOptions) singles() int { return max(1, o.orders/2) }
func (o *sagaOptions) batched() int { return 2 * o.orders }

// paced is how many sagas the latency is of.
func (o *sagaOptions) paced() int { return o.rate * o.seconds }

// every is the time between two of them.
func (o *sagaOptions) every() time.Duration { return time.Second / time.Duration(o.rate) }

// sagaResult is what bench saga prints.
type sagaResult struct {
	setting
	Orders  int  `json:"orders"`
	Relays  int  `json:"relays"`
	Workers int  `json:"workers"`
	Refuse  int  `json:"refuse_percent"`
	SKUs    int  `json:"skus"`
	HotSKU  bool `json:"hot_sku"`
	Rate    int  `json:"rate"`
	Seconds int  `json:"seconds"`
	Singles int  `json:"ceiling_single_sagas"`
	Batched int  `json:"ceiling_batch_sagas"`

	Sagas       figure `json:"sagas_per_s"`
	Single      figure `json:"ceiling_single"` // sagas a second
	Batch       figure `json:"ceiling_batch"`
	SingleRatio figure `json:"ratio_single"`
	BatchRatio  figure `json:"ratio_batch"`
	// The same of the processor time of all processes, if it is known: what the ratios would
	// be if nothing ever waited. Other work on the machine hardly moves it.
	SingleCPURatio figure `json:"cpu_ratio_single,omitzero"`
	BatchCPURatio  figure `json:"cpu_ratio_batch,omitzero"`

	Fill       figure `json:"messages_per_transaction"` // of the workers
	Duplicates figure `json:"duplicates"`
	Conflicts  figure `json:"conflicts"` // deadlocks and lock waits: batches run again

	P50      figure `json:"p50_ms"`
	P99      figure `json:"p99_ms"`
	P50Bound figure `json:"p50_bound_ms"`
	P99Bound figure `json:"p99_bound_ms"`
	RawP50   figure `json:"raw_p50_ms"` // publish to delivery
	RawP99   figure `json:"raw_p99_ms"`
	StepP50  figure `json:"step_p50_ms"` // a bare step's transaction
	StepP99  figure `json:"step_p99_ms"`

	CPU       costs `json:"cpu_s_per_1k"` // sagas, while they are submitted at once
	SingleCPU costs `json:"ceiling_single_cpu_s_per_1k"`
	BatchCPU  costs `json:"ceiling_batch_cpu_s_per_1k"`

	statements
}

// print prints it for a person.
func (r *sagaResult) print(w io.Writer) {
	t := newTable("figure", "median (least to most)")
	t.AppendRow([]any{"ratio to one saga a transaction", r.SingleRatio.print("%.2f")})
	t.AppendRow([]any{fmt.Sprintf("ratio to %d sagas a transaction", batchSize), r.BatchRatio.print("%.3f")})
	t.AppendRow([]any{"ratio to one saga a transaction, by CPU", r.SingleCPURatio.print("%.2f")})
	t.AppendRow([]any{fmt.Sprintf("ratio to %d sagas a transaction, by CPU", batchSize), r.BatchCPURatio.print("%.3f")})
	t.AppendRow([]any{"sagas a second", r.Sagas.print("%.0f")})
	t.AppendRow([]any{"ceiling, one saga a transaction", r.Single.print("%.0f")})
	t.AppendRow([]any{fmt.Sprintf("ceiling, %d sagas a transaction", batchSize), r.Batch.print("%.0f")})
	if r.Seconds > 0 {
		t.AppendRow([]any{"start to end, p50, ms", r.P50.print("%.1f")})
		t.AppendRow([]any{"  its bound", r.P50Bound.print("%.1f")})
		t.AppendRow([]any{"start to end, p99, ms", r.P99.print("%.1f")})
		t.AppendRow([]any{"  its bound", r.P99Bound.print("%.1f")})
		t.AppendRow([]any{"raw publish to delivery, p50, ms", r.RawP50.print("%.1f")})
		t.AppendRow([]any{"raw publish to delivery, p99, ms", r.RawP99.print("%.1f")})
		t.AppendRow([]any{"bare step transaction, p50, ms", r.StepP50.print("%.1f")})
		t.AppendRow([]any{"bare step transaction, p99, ms", r.StepP99.print("%.1f")})
	}
	r.CPU.rows(t, "CPU seconds for 1000 sagas", "%.2f")
	r.SingleCPU.rows(t, "ceiling's, one saga a transaction", "%.2f")
	r.BatchCPU.rows(t, fmt.Sprintf("ceiling's, %d sagas a transaction", batchSize), "%.2f")
	t.AppendRow([]any{"messages in a worker's transaction", r.Fill.print("%.1f")})
	t.AppendRow([]any{"batches run again after a lock conflict", r.Conflicts.print("%.0f")})
	t.AppendRow([]any{"duplicates dropped by the workers", r.Duplicates.print("%.0f")})
	parameters := fmt.Sprintf("%s, %s, %s", plural(r.Orders, "order"), plural(r.Relays, "relay"), plural(r.Workers, "worker"))
	if r.Refuse > 0 {
		parameters += fmt.Sprintf(", %d %% refused", r.Refuse)
	}
	if r.HotSKU {
		parameters += ", one SKU"
	}
	if r.Seconds > 0 {
		parameters += fmt.Sprintf("; %d a second for %d s", r.Rate, r.Seconds)
	}
	r.setting.print(w, parameters, t)
	r.statements.print(w)
}

// sagaBench is one run of bench saga.
type sagaBench struct {
	*benchmark
	sagaOptions
	result sagaResult
}

func (b *sagaBench) begin() {
	b.result = sagaResult{
		Orders: b.orders, Relays: b.relays, Workers: b.workers, Refuse: b.refuse, SKUs: b.skus(), HotSKU: b.hotSKU,
		Rate: b.rate, Seconds: b.seconds, Singles: b.singles(), Batched: b.batched(),
		CPU: costs{}, SingleCPU: costs{}, BatchCPU: costs{},
	}
}

// measure is one repetition: ceilings, throughput, latency; after the last, statements.
func (b *sagaBench) measure(ctx context.Context, s *station) error {
	c, err := b.ceilings(ctx, s)
	if err != nil {
		return fmt.Errorf("measure the ceilings: %w", err)
	}
	if err := handlers.Seed(ctx, s.db, b.skus(), sagaStock); err != nil {
		return err
	}
	if err := b.startAll(ctx, s, nil); err != nil {
		return err
	}
	rate, err := b.throughput(ctx, s)
	if err != nil {
		return err
	}
	b.result.Sagas.add(rate)
	b.result.Single.add(c.single)
	b.result.Batch.add(c.batch)
	b.result.SingleRatio.add(rate / c.single)
	b.result.BatchRatio.add(rate / c.batch)
	if s.knowsCPU() {
		all := b.result.CPU.last()
		b.result.SingleCPURatio.add(b.result.SingleCPU.last() / all)
		b.result.BatchCPURatio.add(b.result.BatchCPU.last() / all)
	}
	if b.seconds > 0 {
		if err := b.latency(ctx, s); err != nil {
			return fmt.Errorf("measure the latency: %w", err)
		}
	}
	if len(b.result.Sagas.Values) == b.runs {
		return b.countStatements(ctx, s)
	}
	return nil
}

// bodies are those of the throughput's orders, over and over, for n sagas.
func (b *sagaBench) bodies(n int) [][]byte {
	orders := generate(b.mix(), orderSeed, b.skus())
	bodies := make([][]byte, n)
	for i := range bodies {
		bodies[i] = orders[i%len(orders)].body
	}
	return bodies
}

// orderSeed makes the same orders in each repetition.
const orderSeed = 1
