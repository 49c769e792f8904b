package main

import (
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/testenv"
)

// measured demands a figure of so many repetitions, none of them negative.
func measured(t *testing.T, what string, f figure, runs int) {
	t.Helper()
	if len(f.Values) != runs || f.Min < 0 || f.Min > f.Median || f.Median > f.Max ||
		!slices.Contains(f.Values, f.Min) || !slices.Contains(f.Values, f.Max) {
		t.Errorf("%s: %+v, want %d values", what, f, runs)
	}
}

// charged demands the processor time of these processes and of no other.
func charged(t *testing.T, what string, c costs, runs int, names ...string) {
	t.Helper()
	for _, name := range names {
		if c[name] == nil {
			t.Errorf("%s: nothing about %s", what, name)
			continue
		}
		measured(t, what+" of "+name, *c[name], runs)
	}
	if len(c) != len(names) {
		t.Errorf("%s: %v, want of %v", what, c, names)
	}
}

// described demands that the figures say what they depend on.
func described(t *testing.T, s setting, name string, runs int) {
	t.Helper()
	if s.Bench != name || s.Runs != runs || s.Cores < 1 || s.Version == "" || s.MySQL == "" || s.RabbitMQ == "" {
		t.Errorf("setting %+v", s)
	}
}

// TestBenchRelay has servers of its own: of those that are given nobody knows the processes.
func TestBenchRelay(t *testing.T) {
	a := newOperator(t).run("", "bench", "relay", "--rows", "300", "--keys", "20", "--relays", "2", "--history", "15000", "--far-future", "20", "--runs", "2", "--json")
	a.want(exitOK, "repetition 2 of 2")
	var r relayResult
	a.decode(&r)
	described(t, r.setting, "relay", 2)
	if r.Rows != 300 || r.Keys != 20 || r.Relays != 2 || r.History != 15000 || r.FarFuture != 20 || r.Body != 400 || r.Window != 1000 {
		t.Errorf("parameters %+v", r)
	}
	if r.Arrived != 600 {
		t.Errorf("%d rows arrived, want 600", r.Arrived)
	}
	measured(t, "rate", r.Rate, 2)
	measured(t, "ceiling", r.Ceiling, 2)
	measured(t, "ratio", r.Ratio, 2)
	for i := range 2 {
		if rate, ceiling := r.Rate.Values[i], r.Ceiling.Values[i]; rate <= 0 || ceiling <= 0 || r.Ratio.Values[i] != rate/ceiling {
			t.Errorf("repetition %d: rate %v, ceiling %v, ratio %v", i+1, rate, ceiling, r.Ratio.Values[i])
		}
	}
	measured(t, "ratio by CPU", r.CPURatio, 2)
	charged(t, "CPU", r.CPU, 2, "relay", "mysql", "rabbitmq", "bench", "others")
	charged(t, "CPU of the ceiling", r.RawCPU, 2, "mysql", "rabbitmq", "bench", "others")
}

// TestBenchRelayThatDeletes: there is no row to tell when the last was published, but history.
func TestBenchRelayThatDeletes(t *testing.T) {
	o := newDemoOperator(t)
	o.env = append(o.env, "BACKSTEP_OUTBOX_RETENTION=0")
	var r relayResult
	o.run("", "bench", "relay", "--rows", "50", "--history", "10", "--runs", "1", "--json").want(exitOK).decode(&r)
	// More than the broker can have confirmed since the queue was seen empty.
	if r.Arrived != 50 || r.Rate.Median <= 0 || r.Rate.Median >= 1e6 {
		t.Errorf("%d rows arrived, %v a second", r.Arrived, r.Rate.Median)
	}
}

func TestBenchLatency(t *testing.T) {
	o := newDemoOperator(t)
	a := o.run("", "bench", "latency", "--rows", "20", "--interval", "5ms", "--runs", "1", "--json").want(exitOK)
	var r latencyResult
	a.decode(&r)
	described(t, r.setting, "latency", 1)
	if r.Rows != 20 || r.Interval != 5 || r.Body != 400 || r.Prefetch != 200 {
		t.Errorf("parameters %+v", r)
	}
	if r.Arrived != 20 {
		t.Errorf("%d rows arrived, want 20", r.Arrived)
	}
	measured(t, "raw p50", r.RawP50, 1)
	measured(t, "raw p99", r.RawP99, 1)
	// A message may be there before we are told that its COMMIT has been done.
	if len(r.P50.Values) != 1 || len(r.P99.Values) != 1 || r.P99.Median < r.P50.Median || r.RawP99.Median < r.RawP50.Median {
		t.Errorf("latencies: %v and %v, raw %v and %v", r.P50, r.P99, r.RawP50, r.RawP99)
	}
	charged(t, "CPU", r.CPU, 1, "relay", "bench", "others")
	charged(t, "raw CPU", r.RawCPU, 1, "relay", "bench", "others")
	charged(t, "idle CPU", r.Idle, 1, "relay", "bench", "others")
	nothingLeft(t, o, a.stderr)
}

// TestBenchSchedule has servers of its own: statements are counted on no others.
func TestBenchSchedule(t *testing.T) {
	a := newOperator(t).run("", "bench", "schedule", "--rows", "40", "--relays", "2", "--far-future", "11000",
		"--interval", "5ms", "--spread", "100ms", "--idle", "2s", "--runs", "1", "--json").want(exitOK)
	var r scheduleResult
	a.decode(&r)
	described(t, r.setting, "schedule", 1)
	if r.Rows != 40 || r.Relays != 2 || r.FarFuture != 11000 || r.Interval != 5 || r.Spread != 100 || r.IdleTime != 2 {
		t.Errorf("parameters %+v", r)
	}
	if r.Arrived != 40 || r.Twice != 0 {
		t.Errorf("%d messages arrived and %d again, want 40 and none", r.Arrived, r.Twice)
	}
	// The clocks of database and machine are compared, to a fraction of a millisecond.
	for what, f := range map[string]figure{"p50": r.P50, "p99": r.P99, "latest": r.Latest} {
		if len(f.Values) != 1 || f.Median < -1 {
			t.Errorf("%s: %+v", what, f)
		}
	}
	if r.P50.Median > r.P99.Median || r.P99.Median > r.Latest.Median {
		t.Errorf("p50 %v, p99 %v, latest %v", r.P50.Median, r.P99.Median, r.Latest.Median)
	}
	charged(t, "idle CPU", r.Idle, 1, "relay", "mysql", "rabbitmq", "bench", "others")
	if n := r.Statements.Median; n <= 0 {
		t.Errorf("%v statements a second, but relays never sleep", n)
	}
}

// TestBenchPrints what a person reads.
func TestBenchPrints(t *testing.T) {
	o := newDemoOperator(t)
	a := o.run("", "bench", "relay", "--rows", "50", "--runs", "1").want(exitOK)
	for _, text := range []string{
		"bench relay: 50 rows of 400 bytes, 10000 keys, 1 relay\n1 repetition, ",
		"ratio to the ceiling", "rows published a second", "CPU seconds for 1000 rows, relay", "rows found in the queue", "50\n",
	} {
		if !strings.Contains(a.stdout, text) {
			t.Errorf("it does not say %q:\n%s", text, a.stdout)
		}
	}
	nothingLeft(t, o, a.stderr)
}

func TestBenchStops(t *testing.T) {
	for verb, moment := range map[string]string{"relay": "in database and virtual host", "latency": "nothing to do for"} {
		t.Run(verb, func(t *testing.T) {
			o := newDemoOperator(t)
			b := o.start("backstep", "bench", verb, "--rows", "100000")
			b.says(moment)
			if code := b.stop(syscall.SIGINT); code != exitFailed || !strings.Contains(b.text(), "interrupted") {
				t.Errorf("exit code %d", code)
			}
			nothingLeft(t, o, b.text())
		})
	}
}

func TestFigure(t *testing.T) {
	var f figure
	for i, want := range []string{"5.0", "3.0 (1.0 to 5.0)", "2.0 (1.0 to 5.0)", "2.5 (1.0 to 5.0)"} {
		f.add([]float64{5, 1, 2, 3}[i])
		if got := f.print("%.1f"); got != want {
			t.Errorf("%v prints as %q, want %q", f.Values, got, want)
		}
	}
	var none *figure
	if got := none.print("%.1f"); got != "-" {
		t.Errorf("no figure prints as %q", got)
	}
}

// TestBenchCounts: a rate that lost a row is none, whatever the depth of the queue says.
func TestBenchCounts(t *testing.T) {
	ctx := t.Context()
	vhost := testenv.Vhost(t)
	var c config
	c.AMQP.URL = vhost.URL
	broker, err := c.connect(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer broker.close()
	s := &station{place: &place{config: c}, broker: broker}
	if err := s.declare(ctx, relayQueue); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, rows, queue string // message ids
		arrived, twice    int
		says              string // "": no error
	}{
		{"all", "a b c", "c a b", 3, 0, ""},
		{"duplicates", "a b c", "a b a c a", 3, 2, ""},
		{"one lost", "a b c", "a c", 2, 0, "of 3 rows that are marked published, 2 are in the queue"},
		{"one lost and one twice", "a b c", "a c a", 2, 1, "of 3 rows that are marked published, 2 are in the queue"},
		{"a stranger", "a b", "a x b", 0, 0, `none of the rows: "x"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			vhost.Purge(t, relayQueue)
			for _, id := range strings.Fields(tt.queue) {
				vhost.Publish(t, "", relayQueue, amqp091.Publishing{MessageId: id})
			}
			ids := map[string]int{}
			for _, id := range strings.Fields(tt.rows) {
				ids[id] = 0
			}
			b := relayBench{benchmark: &benchmark{progress: t.Output()}, relayOptions: relayOptions{rows: len(ids)}}
			err := b.count(ctx, s, ids)
			if tt.says == "" && err != nil || tt.says != "" && (err == nil || !strings.Contains(err.Error(), tt.says)) {
				t.Errorf("error %v, want %q", err, tt.says)
			}
			if b.result.Arrived != tt.arrived || b.result.Twice != tt.twice {
				t.Errorf("%d arrived, %d twice; want %d, %d", b.result.Arrived, b.result.Twice, tt.arrived, tt.twice)
			}
		})
	}
}
