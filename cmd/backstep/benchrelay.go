package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/amqp"
	"backstep/internal/bench"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// relayOptions are the flags of bench relay.
type relayOptions struct {
	benchOptions
	rows, keys, relays, history, farFuture int
}

func newBenchRelay() *cobra.Command {
	var o relayOptions
	cmd := &cobra.Command{
		Use:   "relay",
		Short: "How fast relays drain a backlog, beside publishing without an outbox",
		Long: `Adds --rows outbox rows of ` + fmt.Sprint(benchBody) + ` bytes while no relay runs, starts --relays processes, and measures
from the last look that found the queue empty (there is one every 2 ms) until the last row is
marked published (the database's time of that UPDATE; with BACKSTEP_OUTBOX_RETENTION=0, when a
look each ` + short(markPoll) + ` finds none left). Starting, connecting and taking leases is not in the rate; their
processor time is in that of the relays. Then it takes all messages off the queue: every row
must be there, and what came twice is counted.

The ceiling is amqp091-go and nothing else: as many messages with the same body to another fresh
queue with the same arguments, persistent, mandatory, confirmed, on one channel with ` + fmt.Sprint(benchWindow) + `
unconfirmed in flight, from the first publish to the last confirm, in each repetition right
before the relays. The ratio is the median of the repetitions' ratios.

The ratio by CPU compares the processor time of all processes instead of the rates: it holds on a
machine that is busy with something else. Of servers that were not started here it is not known.`,
		Example: `  backstep bench relay
  backstep bench relay --relays 2 --runs 5
  backstep bench relay --history 1000000 --json | jq .ratio.median
  backstep bench relay --far-future 1000000`,
	}
	f := cmd.Flags()
	f.IntVar(&o.rows, "rows", 50_000, "outbox rows, and messages of the ceiling")
	f.IntVar(&o.keys, "keys", 10_000, "ordering keys, which the rows take in turn; at most one row of a key is in flight")
	f.IntVar(&o.relays, "relays", 1, "relay processes")
	f.IntVar(&o.history, "history", 0, "rows that are there before and have been published")
	f.IntVar(&o.farFuture, "far-future", 0, "scheduled messages that are there before and are due in a year")
	return o.command(cmd, o.validate, func(b *benchmark) (benchResult, measure) {
		m := relayBench{benchmark: b, relayOptions: o}
		m.begin()
		return &m.result, m.measure
	})
}

func (o *relayOptions) validate() error {
	return errors.Join(o.benchOptions.validate(),
		inRange("rows", o.rows, 1, 10_000_000), inRange("keys", o.keys, 1, 10_000_000),
		inRange("relays", o.relays, 1, 16), inRange("history", o.history, 0, 100_000_000),
		inRange("far-future", o.farFuture, 0, 100_000_000))
}

// What is published in the benchmarks of the relay.
const (
	benchBody   = 400  // bytes
	benchWindow = 1000 // of the ceiling, as is the relay's default
)

// relayResult is what bench relay prints.
type relayResult struct {
	setting
	Rows      int `json:"rows"`
	Keys      int `json:"keys"`
	Relays    int `json:"relays"`
	History   int `json:"history"`
	FarFuture int `json:"far_future"`
	Body      int `json:"body_bytes"`
	Window    int `json:"ceiling_window"`

	Ratio    figure `json:"ratio"`              // of rate to ceiling
	CPURatio figure `json:"cpu_ratio,omitzero"` // of the processor time of all processes, if it is known
	Rate     figure `json:"rate"`               // rows a second
	Ceiling  figure `json:"ceiling"`            // messages a second
	CPU      costs  `json:"cpu_s_per_1k"`       // from before the relays start until all is marked
	RawCPU   costs  `json:"ceiling_cpu_s_per_1k"`
	Arrived  int    `json:"arrived"`    // rows found in the queue, of all repetitions
	Twice    int    `json:"duplicates"` // copies beyond the first
}

func (r *relayResult) print(w io.Writer) {
	t := newTable("figure", "median (least to most)")
	t.AppendRow([]any{"ratio to the ceiling", r.Ratio.print("%.2f")})
	t.AppendRow([]any{"ratio to the ceiling, by CPU", r.CPURatio.print("%.2f")})
	t.AppendRow([]any{"rows published a second", r.Rate.print("%.0f")})
	t.AppendRow([]any{"ceiling, messages a second", r.Ceiling.print("%.0f")})
	r.CPU.rows(t, "CPU seconds for 1000 rows", "%.4f")
	r.RawCPU.rows(t, "ceiling's CPU seconds for 1000", "%.4f")
	t.AppendRow([]any{"rows found in the queue", r.Arrived})
	t.AppendRow([]any{"duplicates", r.Twice})
	parameters := fmt.Sprintf("%s of %d bytes, %s, %s", plural(r.Rows, "row"), r.Body, plural(r.Keys, "key"), plural(r.Relays, "relay"))
	if r.History > 0 {
		parameters += fmt.Sprintf(", behind %d published ones", r.History)
	}
	if r.FarFuture > 0 {
		parameters += fmt.Sprintf(", beside %d that are due in a year", r.FarFuture)
	}
	r.setting.print(w, parameters, t)
}

// relayBench is one run of bench relay.
type relayBench struct {
	*benchmark
	relayOptions
	result relayResult
}

func (b *relayBench) begin() {
	b.result = relayResult{
		Rows: b.rows, Keys: b.keys, Relays: b.relays, History: b.history, FarFuture: b.farFuture,
		Body: benchBody, Window: benchWindow, CPU: costs{}, RawCPU: costs{},
	}
}

// The queues of one repetition.
const (
	ceilingQueue = "bench.ceiling"
	relayQueue   = "bench.relay"
)

// measure is one repetition. The servers come to rest before either part, so that neither
// pays for what was done before it.
func (b *relayBench) measure(ctx context.Context, s *station) error {
	if err := s.declare(ctx, ceilingQueue, relayQueue); err != nil {
		return err
	}
	ids, err := b.fill(ctx, s)
	if err != nil {
		return err
	}
	ceiling, err := b.ceiling(ctx, s)
	if err != nil {
		return fmt.Errorf("measure the ceiling: %w", err)
	}
	if err := s.place.servers.Manage(ctx, http.MethodDelete, nil, nil, "queues", s.place.name, ceilingQueue); err != nil {
		return fmt.Errorf("delete queue %s: %w", ceilingQueue, err)
	}
	rate, err := b.drain(ctx, s)
	if err != nil {
		return err
	}
	b.result.Rate.add(rate)
	b.result.Ceiling.add(ceiling)
	b.result.Ratio.add(rate / ceiling)
	if s.knowsCPU() {
		b.result.CPURatio.add(b.result.RawCPU.last() / b.result.CPU.last()) // not 0: a relay has been started
	}
	return b.count(ctx, s, ids)
}

// benchRow is what the benchmarks put into the outbox.
func benchRow(key string) message.Message {
	return message.Message{
		Properties: message.Properties{MessageID: message.NewID(), Type: "bench.row", ContentType: "application/json", DeliveryMode: 2},
		Body:       bench.Body(benchBody),
		Exchange:   message.CommandsExchange, RoutingKey: relayQueue, Mandatory: true,
		OrderingKey: key, AggregateType: "bench", AggregateID: key,
	}
}

// fillBatch is how many rows are added by one transaction.
const fillBatch = 500

// addFarFuture adds n messages that are due in a year.
func (s *station) addFarFuture(ctx context.Context, n int) error {
	if n == 0 {
		return nil
	}
	bar := newProgress(s.progress, n, "messages added that are due in a year")
	defer bar.done()
	return outbox.AddFarFuture(ctx, s.db, benchRow("far-future"), n, bar.set)
}

// fill adds history and rows, and returns the message ids of the rows.
func (b *relayBench) fill(ctx context.Context, s *station) (map[string]int, error) {
	if b.history > 0 {
		bar := newProgress(b.progress, b.history, "published rows added")
		err := outbox.AddHistory(ctx, s.db, benchRow("history"), b.history, bar.set)
		bar.done()
		if err != nil {
			return nil, err
		}
	}
	if err := s.addFarFuture(ctx, b.farFuture); err != nil {
		return nil, err
	}
	bar := newProgress(b.progress, b.rows, "rows added")
	defer bar.done()
	ids := make(map[string]int, b.rows)
	for len(ids) < b.rows {
		batch := make([]message.Message, min(fillBatch, b.rows-len(ids)))
		for i := range batch {
			batch[i] = benchRow(fmt.Sprintf("key-%d", len(ids)%b.keys))
			ids[batch[i].MessageID] = 0
		}
		err := sqltx.WithTx(ctx, s.db, func(ctx context.Context, tx *sqltx.Tx) error { return outbox.Add(ctx, tx, batch...) })
		if err != nil {
			return nil, err
		}
		bar.set(len(ids))
	}
	return ids, nil
}

// ceiling returns how many messages a second amqp091-go publishes.
func (b *relayBench) ceiling(ctx context.Context, s *station) (float64, error) {
	if err := s.rest(ctx); err != nil {
		return 0, err
	}
	sender, err := bench.NewSender(s.place.config.AMQP.URL)
	if err != nil {
		return 0, err
	}
	defer sender.Close()
	bar := newProgress(b.progress, b.rows, "messages of the ceiling confirmed")
	defer bar.done()
	before, err := s.cpu()
	if err != nil {
		return 0, err
	}
	took, err := bench.Flood{
		Exchange: message.CommandsExchange, Key: ceilingQueue, Body: bench.Body(benchBody),
		Messages: b.rows, Window: benchWindow, Confirmed: bar.set,
	}.Run(ctx, sender)
	if err != nil {
		return 0, err
	}
	after, err := s.cpu()
	b.result.RawCPU.add(before, after, float64(b.rows)/1000)
	return float64(b.rows) / took.Seconds(), err
}

const (
	firstPoll = 2 * time.Millisecond
	depthPoll = 250 * time.Millisecond // a look at the queue costs the broker something
	markPoll  = 20 * time.Millisecond
)

// drain starts the relays and returns how many rows a second they published.
func (b *relayBench) drain(ctx context.Context, s *station) (float64, error) {
	if err := s.rest(ctx); err != nil {
		return 0, err
	}
	session, err := s.broker.client.Session(ctx)
	if err != nil {
		return 0, err
	}
	before, err := s.cpu()
	if err != nil {
		return 0, err
	}
	if err := s.start("relay", b.relays); err != nil {
		return 0, err
	}
	bar := newProgress(b.progress, b.rows, "messages in the queue")
	defer bar.done()
	var began time.Time
	depth := func(least int) func(context.Context) (int, bool, error) {
		return func(ctx context.Context) (int, bool, error) {
			asked := time.Now()
			n, err := session.Depth(ctx, relayQueue)
			if n == 0 {
				began = asked
			}
			bar.set(n)
			return n, n >= least, err
		}
	}
	if err := s.await(ctx, "the first message is in the queue", firstPoll, depth(1)); err != nil {
		return 0, err
	}
	if err := s.await(ctx, "all messages are in the queue", depthPoll, depth(b.rows)); err != nil {
		return 0, err
	}
	var last, seen time.Time
	marked := func(ctx context.Context) (_ int, done bool, err error) {
		pending, at, err := outbox.Backlog(ctx, s.db)
		last, seen = at, time.Now()
		return 0, !pending, err
	}
	if err := s.await(ctx, "no row is pending", markPoll, marked); err != nil {
		return 0, err
	}
	after, err := s.cpu()
	if err != nil {
		return 0, err
	}
	b.result.CPU.add(before, after, float64(b.rows)/1000)
	ahead, err := clockAhead(ctx, s.db)
	end := last.Add(-ahead)
	if !end.After(began) {
		end = seen // the relays delete what they have published
	}
	return float64(b.rows) / end.Sub(began).Seconds(), err
}

// count takes all messages off the queue: no row may be missing.
func (b *relayBench) count(ctx context.Context, s *station, ids map[string]int) error {
	session, err := s.broker.client.Session(ctx)
	if err != nil {
		return err
	}
	depth, err := session.Depth(ctx, relayQueue)
	if err != nil {
		return err
	}
	r, err := bench.NewReceiver(s.place.config.AMQP.URL, relayQueue, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	bar := newProgress(b.progress, depth, "messages counted")
	defer bar.done()
	ctx, cancel := context.WithTimeoutCause(ctx, benchPatience, errors.New("not all messages of the queue were delivered"))
	defer cancel()
	arrived := 0
	for i := range depth {
		id, _, err := r.Next(ctx)
		if err != nil {
			return fmt.Errorf("count messages: %w", errors.Join(err, context.Cause(ctx)))
		}
		n, ours := ids[id]
		if !ours {
			return fmt.Errorf("a message in the queue is none of the rows: %q", id)
		}
		if ids[id]++; n == 0 {
			arrived++
		}
		bar.set(i + 1)
	}
	b.result.Arrived += arrived
	b.result.Twice += depth - arrived
	if arrived != b.rows {
		return fmt.Errorf("of %d rows that are marked published, %d are in the queue", b.rows, arrived)
	}
	return nil
}

// declare makes work queues as ours are.
func (s *station) declare(ctx context.Context, queues ...string) error {
	session, err := s.broker.client.Session(ctx)
	if err != nil {
		return err
	}
	return amqp.Topology{Queues: queues}.Declare(ctx, session)
}
