package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"backstep/internal/amqp"
	"backstep/internal/app"
	"backstep/internal/bench"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// latencyOptions are the flags of bench latency.
type latencyOptions struct {
	benchOptions
	rows     int
	interval time.Duration
}

func newBenchLatency() *cobra.Command {
	var o latencyOptions
	cmd := &cobra.Command{
		Use:   "latency",
		Short: "How long a row takes from its commit to a consumer, beside publishing directly",
		Long: `Commits one outbox row every --interval, each in a transaction of its own, rings the doorbell as
every writer of ours does, and measures from the return of COMMIT until a consumer has the
message (quorum queue, prefetch ` + fmt.Sprint(benchPrefetch) + `, one ack each), through one relay process that has nothing else
to do. Before that, in each repetition, the same without an outbox: from a publish with
amqp091-go and nothing else to the delivery, at the same pace, with a queue and a consumer of
the same kind; these are the raw figures. And before either, what the processes use in ` + short(idleTime) + ` in
which nothing is to be done, as a share of one core.`,
		Example: `  backstep bench latency
  backstep bench latency --interval 5ms --rows 2000
  backstep bench latency --json | jq '{p99: .p99_ms.median, raw: .raw_p99_ms.median}'`,
	}
	f := cmd.Flags()
	f.IntVar(&o.rows, "rows", 500, "rows, and messages of the raw figures")
	f.DurationVar(&o.interval, "interval", 20*time.Millisecond, "between two commits, and two raw publishes")
	return o.command(cmd, o.validate, func(b *benchmark) (benchResult, measure) {
		m := latencyBench{benchmark: b, latencyOptions: o}
		m.begin()
		return &m.result, m.measure
	})
}

func (o *latencyOptions) validate() error {
	err := errors.Join(o.benchOptions.validate(), inRange("rows", o.rows, 1, 1_000_000))
	if o.interval < time.Millisecond || o.interval > time.Minute {
		err = errors.Join(err, usagef("--interval is %s; it may be 1ms to 1m", o.interval))
	}
	return err
}

const (
	benchPrefetch = 200
	idleTime      = 5 * time.Second
)

// latencyResult is what bench latency prints.
type latencyResult struct {
	setting
	Rows     int     `json:"rows"`
	Interval float64 `json:"interval_ms"`
	Body     int     `json:"body_bytes"`
	Prefetch int     `json:"prefetch"`

	P50     figure `json:"p50_ms"`
	P99     figure `json:"p99_ms"`
	RawP50  figure `json:"raw_p50_ms"`
	RawP99  figure `json:"raw_p99_ms"`
	CPU     costs  `json:"cpu_s_per_1k"`     // mysql's and bench's include the writing
	RawCPU  costs  `json:"raw_cpu_s_per_1k"` // the relay's and mysql's is that of doing nothing
	Idle    costs  `json:"idle_cpu_share"`   // of one core
	Arrived int    `json:"arrived"`          // rows that the consumer got, of all repetitions
	Twice   int    `json:"duplicates"`       // copies beyond the first
}

func (r *latencyResult) print(w io.Writer) {
	t := newTable("figure", "median (least to most)")
	t.AppendRow([]any{"commit to delivery, p50, ms", r.P50.print("%.1f")})
	t.AppendRow([]any{"commit to delivery, p99, ms", r.P99.print("%.1f")})
	t.AppendRow([]any{"raw publish to delivery, p50, ms", r.RawP50.print("%.1f")})
	t.AppendRow([]any{"raw publish to delivery, p99, ms", r.RawP99.print("%.1f")})
	r.CPU.rows(t, "CPU seconds for 1000 rows", "%.2f")
	r.RawCPU.rows(t, "raw CPU seconds for 1000", "%.2f")
	r.Idle.rows(t, "idle, share of a core", "%.4f")
	t.AppendRow([]any{"rows delivered", r.Arrived})
	t.AppendRow([]any{"duplicates", r.Twice})
	r.setting.print(w, fmt.Sprintf("%s of %d bytes, one every %g ms", plural(r.Rows, "row"), r.Body, r.Interval), t)
}

// latencyBench is one run of bench latency.
type latencyBench struct {
	*benchmark
	latencyOptions
	result latencyResult
}

func (b *latencyBench) begin() {
	b.result = latencyResult{
		Rows: b.rows, Interval: float64(b.interval) / float64(time.Millisecond), Body: benchBody, Prefetch: benchPrefetch,
		CPU: costs{}, RawCPU: costs{}, Idle: costs{},
	}
}

const rawQueue = "bench.raw"

// measure is one repetition.
func (b *latencyBench) measure(ctx context.Context, s *station) error {
	if err := s.declare(ctx, rawQueue, relayQueue); err != nil {
		return err
	}
	if err := s.start("relay", 1); err != nil {
		return err
	}
	if err := s.awaitShards(ctx); err != nil {
		return err
	}
	if err := s.idle(ctx, idleTime, b.result.Idle); err != nil {
		return err
	}
	if err := b.raw(ctx, s); err != nil {
		return fmt.Errorf("measure publishing directly: %w", err)
	}
	return b.throughRelay(ctx, s)
}

// awaitShards waits until the relays can publish everything.
func (s *station) awaitShards(ctx context.Context) error {
	if err := s.fleet.awaitReady(ctx); err != nil {
		return err
	}
	return s.await(ctx, "the relays have all shards", firstPoll, func(ctx context.Context) (n int, _ bool, _ error) {
		for _, p := range s.fleet.procs {
			var stats struct{ Shards int }
			if err := p.get(ctx, "/stats", &stats); err != nil {
				return 0, false, err
			}
			if stats.Shards == 0 {
				return n, false, nil // it has not got its share yet
			}
			n += stats.Shards
		}
		return n, n == message.Shards, nil
	})
}

// idle measures what is used while there is nothing to do.
func (s *station) idle(ctx context.Context, d time.Duration, used costs) error {
	if err := s.rest(ctx); err != nil {
		return err
	}
	s.say("nothing to do for %s", short(d))
	before, err := s.cpu()
	if err != nil {
		return err
	}
	began := time.Now()
	if !pause(ctx, d) {
		return ctx.Err()
	}
	after, err := s.cpu()
	used.add(before, after, time.Since(began).Seconds())
	return err
}

// raw measures without an outbox.
func (b *latencyBench) raw(ctx context.Context, s *station) error {
	sender, err := bench.NewSender(s.place.config.AMQP.URL)
	if err != nil {
		return err
	}
	defer sender.Close()
	body := bench.Body(benchBody)
	run := paced{what: "raw messages sent", queue: rawQueue, cpu: b.result.RawCPU}
	run.send = func(ctx context.Context) (id string, at time.Time, err error) {
		id, at = message.NewID(), time.Now()
		if err := sender.Send(message.CommandsExchange, rawQueue, id, body); err != nil {
			return "", at, err
		}
		return id, at, sender.Settle(ctx)
	}
	p50, p99, err := b.pace(ctx, s, &run)
	if err != nil {
		return err
	}
	b.result.RawP50.add(p50)
	b.result.RawP99.add(p99)
	return nil
}

// throughRelay measures with one.
func (b *latencyBench) throughRelay(ctx context.Context, s *station) error {
	running, stop := context.WithCancel(ctx)
	var parts errgroup.Group
	defer func() {
		stop()
		_ = parts.Wait() // nil: only we end them
	}()
	bell, err := s.bell(running, &parts)
	if err != nil {
		return err
	}

	run := paced{what: "rows committed", queue: relayQueue, cpu: b.result.CPU}
	run.send = func(ctx context.Context) (id string, at time.Time, err error) {
		row := benchRow(message.NewID())
		err = sqltx.WithTx(ctx, s.db, func(ctx context.Context, tx *sqltx.Tx) error { return outbox.Add(ctx, tx, row) })
		at = time.Now()
		bell.Ring(1 << message.Shard(row.OrderingKey))
		return row.MessageID, at, err
	}
	p50, p99, err := b.pace(ctx, s, &run)
	if err != nil {
		return err
	}
	b.result.P50.add(p50)
	b.result.P99.add(p99)
	b.result.Arrived += b.rows
	b.result.Twice += run.twice
	return nil
}

// bell returns a doorbell, as every writer of ours has; what makes it ring runs in parts until
// ctx ends.
func (s *station) bell(ctx context.Context, parts *errgroup.Group) (*amqp.Bell, error) {
	client, err := amqp.New(amqp.Config{URL: s.place.config.AMQP.URL, Name: app.ConnectionName("bench-bell")})
	if err != nil {
		return nil, err
	}
	bell := amqp.NewBell(client)
	parts.Go(func() error { return client.Run(ctx) })
	parts.Go(func() error { return bell.Run(ctx) })
	_, err = client.Session(ctx)
	return bell, err
}

// paced is one thing after the other, and a consumer that waits for them.
type paced struct {
	what, queue string
	cpu         costs
	send        func(context.Context) (id string, at time.Time, err error) // at is when the clock starts

	twice int
}

// arrivals are what a consumer got.
type arrivals struct {
	at    map[string]time.Time // by message id; of the first copy
	twice int
	err   error // it ended early
}

// pace sends b.rows and returns the quantiles of their latencies in milliseconds.
func (b *latencyBench) pace(ctx context.Context, s *station, run *paced) (p50, p99 float64, err error) {
	receiver, err := bench.NewReceiver(s.place.config.AMQP.URL, run.queue, benchPrefetch)
	if err != nil {
		return 0, 0, err
	}
	defer receiver.Close() // ends receive too
	before, err := s.cpu()
	if err != nil {
		return 0, 0, err
	}
	came := make(chan arrivals, 1)
	go func() { came <- receive(ctx, receiver, b.rows) }()

	bar := newProgress(b.progress, b.rows, run.what)
	sent := make(map[string]time.Time, b.rows)
	err = bench.Pace(ctx, b.interval, b.rows, func(i int) error {
		id, at, err := run.send(ctx)
		sent[id] = at
		bar.set(i + 1)
		return err
	})
	bar.done()
	if err != nil {
		return 0, 0, err
	}
	var got arrivals
	err = s.await(ctx, "all messages were delivered", deliveryPoll, func(context.Context) (int, bool, error) {
		select {
		case got = <-came:
			return 0, true, got.err
		default:
			return 0, false, nil
		}
	})
	if err != nil {
		return 0, 0, err
	}
	after, err := s.cpu()
	if err != nil {
		return 0, 0, err
	}
	run.cpu.add(before, after, float64(b.rows)/1000)
	run.twice = got.twice
	took := make([]time.Duration, 0, len(sent))
	for id, at := range sent {
		arrived, ok := got.at[id]
		if !ok {
			return 0, 0, fmt.Errorf("message %s was not delivered, but %d others were", id, len(got.at))
		}
		took = append(took, arrived.Sub(at))
	}
	return precise(bench.Quantile(took, 0.50)), precise(bench.Quantile(took, 0.99)), nil
}

// deliveryPoll is how often it is looked whether the last message has come. When each came the
// consumer has noted.
const deliveryPoll = 10 * time.Millisecond

// receive takes n different messages.
func receive(ctx context.Context, r *bench.Receiver, n int) arrivals {
	a := arrivals{at: make(map[string]time.Time, n)}
	for len(a.at) < n {
		id, at, err := r.Next(ctx)
		if err != nil {
			a.err = err
			break
		}
		if _, again := a.at[id]; again {
			a.twice++
			continue
		}
		a.at[id] = at
	}
	return a
}

// precise is d in milliseconds, to the microsecond.
func precise(d time.Duration) float64 { return math.Round(d.Seconds()*1e6) / 1e3 }
