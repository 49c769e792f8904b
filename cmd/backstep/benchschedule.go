package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/bench"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// scheduleOptions are the flags of bench schedule.
type scheduleOptions struct {
	benchOptions
	rows, relays, farFuture int
	interval, spread, idle  time.Duration
}

func newBenchSchedule() *cobra.Command {
	var o scheduleOptions
	cmd := &cobra.Command{
		Use:   "schedule",
		Short: "How late scheduled messages are, and what relays use that have nothing to do",
		Long: `Commits one scheduled message every --interval, due after a random time of up to --spread, while
--relays processes have nothing else to do, and measures from when it is due, by the database's
clock, until a consumer has it. Nobody rings the doorbell for them. Before that, in each
repetition, it measures what the processes use in --idle in which nothing is to be done, as a share
of one core (that of the relays is of all of them together), and how many statements the database
server counts meanwhile, if it is one that was started for it: others may be asked by anybody.`,
		Example: `  backstep bench schedule
  backstep bench schedule --relays 3 --spread 200ms
  backstep bench schedule --far-future 1000000 --json | jq .p99_ms.median`,
	}
	f := cmd.Flags()
	f.IntVar(&o.rows, "rows", 1000, "scheduled messages")
	f.IntVar(&o.relays, "relays", 1, "relay processes")
	f.IntVar(&o.farFuture, "far-future", 0, "scheduled messages that are there before and are due in a year")
	f.DurationVar(&o.interval, "interval", 10*time.Millisecond, "between two commits")
	f.DurationVar(&o.spread, "spread", 2*time.Second, "a message is due after a random time up to this")
	f.DurationVar(&o.idle, "idle", idleTime, "how long it is measured what doing nothing costs")
	return o.command(cmd, o.validate, func(b *benchmark) (benchResult, measure) {
		m := scheduleBench{benchmark: b, scheduleOptions: o}
		m.begin()
		return &m.result, m.measure
	})
}

func (o *scheduleOptions) validate() error {
	errs := []error{
		o.benchOptions.validate(), inRange("rows", o.rows, 1, 1_000_000), inRange("relays", o.relays, 1, 16),
		inRange("far-future", o.farFuture, 0, 100_000_000),
	}
	for _, d := range []struct {
		flag   string
		v, low time.Duration
	}{{"interval", o.interval, time.Millisecond}, {"spread", o.spread, 0}, {"idle", o.idle, time.Second}} {
		if d.v < d.low || d.v > time.Minute {
			errs = append(errs, usagef("--%s is %s; it may be %s to 1m", d.flag, d.v, d.low))
		}
	}
	return errors.Join(errs...)
}

// scheduleResult is what bench schedule prints.
type scheduleResult struct {
	setting
	Rows      int     `json:"rows"`
	Relays    int     `json:"relays"`
	FarFuture int     `json:"far_future"`
	Interval  float64 `json:"interval_ms"`
	Spread    float64 `json:"spread_ms"`
	IdleTime  float64 `json:"idle_s"`

	P50        figure `json:"p50_ms"` // from due to delivered
	P99        figure `json:"p99_ms"`
	Latest     figure `json:"max_ms"`
	Idle       costs  `json:"idle_cpu_share"` // of one core
	Statements figure `json:"idle_statements_per_s,omitzero"`
	Arrived    int    `json:"arrived"`    // messages that the consumer got, of all repetitions
	Twice      int    `json:"duplicates"` // copies beyond the first
}

func (r *scheduleResult) print(w io.Writer) {
	t := newTable("figure", "median (least to most)")
	t.AppendRow([]any{"due to delivery, p50, ms", r.P50.print("%.1f")})
	t.AppendRow([]any{"due to delivery, p99, ms", r.P99.print("%.1f")})
	t.AppendRow([]any{"due to delivery, latest, ms", r.Latest.print("%.1f")})
	r.Idle.rows(t, "idle, share of a core", "%.4f")
	t.AppendRow([]any{"idle, statements a second", r.Statements.print("%.1f")})
	t.AppendRow([]any{"messages delivered", r.Arrived})
	t.AppendRow([]any{"duplicates", r.Twice})
	parameters := fmt.Sprintf("%s, one every %g ms, due within %g ms, %s", plural(r.Rows, "message"), r.Interval, r.Spread, plural(r.Relays, "relay"))
	if r.FarFuture > 0 {
		parameters += fmt.Sprintf(", beside %d that are due in a year", r.FarFuture)
	}
	r.setting.print(w, parameters, t)
}

// scheduleBench is one run of bench schedule.
type scheduleBench struct {
	*benchmark
	scheduleOptions
	result scheduleResult
}

func (b *scheduleBench) begin() {
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	b.result = scheduleResult{
		Rows: b.rows, Relays: b.relays, FarFuture: b.farFuture,
		Interval: ms(b.interval), Spread: ms(b.spread), IdleTime: b.idle.Seconds(), Idle: costs{},
	}
}

// measure is one repetition.
func (b *scheduleBench) measure(ctx context.Context, s *station) error {
	if err := s.declare(ctx, relayQueue); err != nil {
		return err
	}
	if err := s.addFarFuture(ctx, b.farFuture); err != nil {
		return err
	}
	if err := s.start("relay", b.relays); err != nil {
		return err
	}
	if err := s.awaitShards(ctx); err != nil {
		return err
	}
	if err := b.doNothing(ctx, s); err != nil {
		return err
	}
	return b.deliver(ctx, s)
}

// doNothing measures what is used while there is nothing to do.
func (b *scheduleBench) doNothing(ctx context.Context, s *station) error {
	if err := s.rest(ctx); err != nil {
		return err
	}
	began := time.Now()
	before, err := bench.Questions(ctx, s.db)
	if err != nil {
		return err
	}
	if err := s.idle(ctx, b.idle, b.result.Idle); err != nil {
		return err
	}
	took := time.Since(began)
	after, err := bench.Questions(ctx, s.db)
	if s.servers.MySQLPID() != 0 { // or others ask as well
		b.result.Statements.add(float64(after-before-1) / took.Seconds()) // ours is not theirs
	}
	return err
}

// deliver measures how late messages are.
func (b *scheduleBench) deliver(ctx context.Context, s *station) error {
	receiver, err := bench.NewReceiver(s.place.config.AMQP.URL, relayQueue, benchPrefetch)
	if err != nil {
		return err
	}
	defer receiver.Close() // ends receive too
	came := make(chan arrivals, 1)
	go func() { came <- receive(ctx, receiver, b.rows) }()

	bar := newProgress(b.progress, b.rows, "messages scheduled")
	due := make(map[string]time.Time, b.rows)
	err = bench.Pace(ctx, b.interval, b.rows, func(i int) error {
		m := outbox.Delayed{Message: benchRow(""), After: rand.N(b.spread + 1), Reason: "a benchmark"}
		var at time.Time
		err := sqltx.WithTx(ctx, s.db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
			if err := outbox.Schedule(ctx, tx, m); err != nil {
				return err
			}
			at, err = outbox.DueAt(ctx, tx, m.MessageID)
			return err
		})
		due[m.MessageID] = at
		bar.set(i + 1)
		return err
	})
	bar.done()
	if err != nil {
		return err
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
		return err
	}
	ahead, err := clockAhead(ctx, s.db)
	if err != nil {
		return err
	}
	late := make([]time.Duration, 0, len(due))
	for id, at := range due {
		arrived, ok := got.at[id]
		if !ok {
			return fmt.Errorf("message %s was not delivered, but %d others were", id, len(got.at))
		}
		late = append(late, arrived.Add(ahead).Sub(at))
	}
	b.result.P50.add(precise(bench.Quantile(late, 0.50)))
	b.result.P99.add(precise(bench.Quantile(late, 0.99)))
	b.result.Latest.add(precise(bench.Quantile(late, 1)))
	b.result.Arrived += b.rows
	b.result.Twice += got.twice
	return nil
}
