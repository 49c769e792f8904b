package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"backstep/internal/app"
	"backstep/internal/bench"
	"backstep/internal/testenv"
	"backstep/migrations"
)

func newBench() *cobra.Command {
	cmd := group("bench", "Measure relay, latency, schedule and sagas")
	cmd.Long = `Measures on MySQL and RabbitMQ of its own (or in a database and a virtual host of its own on those
in BACKSTEP_MYSQL_DSN and BACKSTEP_AMQP_URL), with real processes, and removes all it made. Each
repetition begins afresh, and all but those of schedule measure right before what the same servers
do without us. Compare the ratios: what a machine does in a second changes from one minute to the
next. Figures are medians of the repetitions, with the least and the most beside them.`
	cmd.Example = `  backstep bench relay
  backstep bench latency --runs 5 --json
  backstep bench schedule --relays 3
  backstep bench saga --refuse 25`
	cmd.AddCommand(newBenchRelay(), newBenchLatency(), newBenchSchedule(), newBenchSaga())
	return cmd
}

// benchOptions are the flags that all benchmarks have.
type benchOptions struct {
	runs   int
	asJSON bool
}

// measure measures one repetition.
type measure func(context.Context, *station) error

// benchResult is what the figures of all repetitions are gathered in.
type benchResult interface {
	of(s setting)
	print(w io.Writer)
}

// command has cmd run a benchmark, with these flags beside its own: begin is called when they are read.
func (o *benchOptions) command(cmd *cobra.Command, validate func() error, begin func(*benchmark) (benchResult, measure)) *cobra.Command {
	cmd.Flags().IntVar(&o.runs, "runs", 3, "repetitions, each afresh; the medians count")
	cmd.Flags().BoolVar(&o.asJSON, "json", false, "print the figures as JSON")
	cmd.Args = cobra.NoArgs
	cmd.RunE = verb(func(cmd *cobra.Command, _ []string) error {
		if err := validate(); err != nil {
			return err
		}
		b := newBenchmark(cmd.Name(), o.runs, cmd.ErrOrStderr())
		result, measure := begin(b)
		if err := b.run(cmd.Context(), measure); err != nil {
			return err
		}
		result.of(b.setting)
		if o.asJSON {
			return printJSON(cmd.OutOrStdout(), result)
		}
		result.print(cmd.OutOrStdout())
		return nil
	})
	return cmd
}

func (o *benchOptions) validate() error {
	return inRange("runs", o.runs, 1, 100)
}

// inRange reports a flag that is out of its range.
func inRange(flag string, v, low, high int) error {
	if v < low || v > high {
		return usagef("--%s is %d; it may be %d to %d", flag, v, low, high)
	}
	return nil
}

// figure is what was measured of one thing in each repetition. The median counts; the others
// say how steady it was.
type figure struct {
	Median float64   `json:"median"`
	Min    float64   `json:"min"`
	Max    float64   `json:"max"`
	Values []float64 `json:"values"` // in the order of the repetitions
}

func (f *figure) add(v float64) {
	f.Values = append(f.Values, v)
	sorted := slices.Sorted(slices.Values(f.Values))
	n := len(sorted)
	f.Min, f.Max = sorted[0], sorted[n-1]
	f.Median = (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// print returns the median and, if there is more than one repetition, the least and the most.
func (f *figure) print(format string) string {
	if f == nil || len(f.Values) == 0 {
		return "-"
	}
	s := fmt.Sprintf(format, f.Median)
	if len(f.Values) > 1 {
		s += fmt.Sprintf(" ("+format+" to "+format+")", f.Min, f.Max)
	}
	return s
}

// costs are figures of processor time, by process: relay, worker (all of a kind together),
// mysql, rabbitmq, and bench, which is this process. A server that we did not start is missing.
// It is among the others then, which is whatever else the machine did: if that is much, the
// rates are of a busy machine.
type costs map[string]*figure

// add adds one repetition: what was used between two readings, in units of the divisor.
func (c costs) add(before, after map[string]time.Duration, divisor float64) {
	for name, end := range after {
		if c[name] == nil {
			c[name] = &figure{}
		}
		// What is left for the others may be less than nothing by a tick of the kernel's clock.
		c[name].add(max(0, end-before[name]).Seconds() / divisor)
	}
}

// last returns what all of our processes, the servers included, used in the last repetition.
func (c costs) last() float64 {
	total := 0.0
	for name, f := range c {
		if name != "others" {
			total += f.Values[len(f.Values)-1]
		}
	}
	return total
}

// costOrder is the order in which the processes of costs are shown.
var costOrder = []string{"relay", "worker", "mysql", "rabbitmq", "bench", "others"}

// rows appends a row for each process to a table: what, in which unit.
func (c costs) rows(t table.Writer, what, format string) {
	for _, name := range costOrder {
		if f := c[name]; f != nil {
			t.AppendRow([]any{what + ", " + name, f.print(format)})
		}
	}
}

// setting is what the figures depend on; each benchmark's result begins with it.
type setting struct {
	Bench    string `json:"bench"`
	Version  string `json:"backstep"`
	MySQL    string `json:"mysql"`
	RabbitMQ string `json:"rabbitmq"`
	Cores    int    `json:"cores"`
	Runs     int    `json:"runs"`
}

// of notes what the figures depended on.
func (s *setting) of(is setting) { *s = is }

// print prints the figures as a table, under what they depend on.
func (s *setting) print(w io.Writer, parameters string, t table.Writer) {
	fmt.Fprintf(w, "bench %s: %s\n%s, %s, RabbitMQ %s, MySQL %s\n\n", s.Bench, parameters,
		plural(s.Runs, "repetition"), plural(s.Cores, "core"), s.RabbitMQ, s.MySQL)
	render(w, t)
}

// benchmark is one run of a benchmark: servers for all repetitions, and for each repetition a
// place of its own, so that none meets what another left.
type benchmark struct {
	progress io.Writer
	setting  setting
	servers  *testenv.Servers
	given    config
	programs map[string]string
}

func newBenchmark(name string, runs int, progress io.Writer) *benchmark {
	return &benchmark{
		progress: progress,
		setting:  setting{Bench: name, Version: app.Version(), Cores: runtime.NumCPU(), Runs: runs},
	}
}

func (b *benchmark) say(format string, args ...any) { fmt.Fprintf(b.progress, format+"\n", args...) }

// run calls measure for each repetition. Whatever happens, all that was made is gone after it.
func (b *benchmark) run(ctx context.Context, measure measure) (err error) {
	if b.programs, err = siblings("relay", "worker"); err != nil {
		return err
	}
	if b.given, err = loadConfig(); err != nil {
		return err
	}
	if b.servers, err = startServers(ctx, b.given, b.progress); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.servers.Stop()) }()
	for i := range b.setting.Runs {
		if err := b.repeat(ctx, i, measure); err != nil {
			return fmt.Errorf("repetition %d: %w", i+1, err)
		}
	}
	return nil
}

// repeat is one repetition.
func (b *benchmark) repeat(ctx context.Context, i int, measure measure) (err error) {
	p, err := newPlace(ctx, "bench", b.servers, b.given)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.remove(true, true)) }()
	b.say("repetition %d of %d, in database and virtual host %s", i+1, b.setting.Runs, p.name)
	s, err := b.install(ctx, p)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.leave(ctx, err)) }()
	return measure(ctx, s)
}

// station is where one repetition is measured: schema and topology are there, nothing runs.
type station struct {
	*benchmark
	place  *place
	db     *sql.DB
	broker *broker
	logs   string // folder
	fleet  *fleet
}

func (b *benchmark) install(ctx context.Context, p *place) (_ *station, err error) {
	s := &station{benchmark: b, place: p}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.leave(ctx, err))
		}
	}()
	if s.db, err = p.config.openDatabase(ctx); err != nil {
		return nil, err
	}
	if _, err := migrations.Up(ctx, s.db, nil); err != nil {
		return nil, err
	}
	if _, err := applyTopology(ctx, p.config); err != nil {
		return nil, err
	}
	if s.broker, err = p.config.connect(ctx); err != nil {
		return nil, err
	}
	if b.setting.MySQL, b.setting.RabbitMQ, err = p.versions(ctx, s.db); err != nil {
		return nil, err
	}
	if s.logs, err = os.MkdirTemp("", "backstep-bench-"); err != nil {
		return nil, fmt.Errorf("make a folder for logs: %w", err)
	}
	if s.fleet, err = newFleet(s.logs, p.environment()); err != nil {
		return nil, err
	}
	return s, nil
}

// leave stops what runs. The logs stay if it failed with why.
func (s *station) leave(ctx context.Context, why error) error {
	var err error
	if s.fleet != nil {
		if e := s.fleet.stop(); e != nil {
			err = fmt.Errorf("stop relays and workers: %w", e)
		}
	}
	if s.broker != nil {
		s.broker.close()
	}
	if s.db != nil {
		_ = s.db.Close() // the database is dropped next
	}
	if s.logs == "" {
		return err
	}
	if errors.Join(why, err) != nil && ctx.Err() == nil {
		s.say("the logs of relays and workers are in %s", s.logs)
		return err
	}
	return errors.Join(err, os.RemoveAll(s.logs))
}

// start starts n processes of a role, relay or worker. To wait for them: s.fleet.awaitReady.
func (s *station) start(role string, n int) error {
	for i := range n {
		if err := s.fleet.start(s.programs[role], fmt.Sprintf("%s-%d", role, i+1)); err != nil {
			return err
		}
	}
	return nil
}

// cpu returns the processor time so far by process, as in costs.
func (s *station) cpu() (map[string]time.Duration, error) {
	used := map[string]time.Duration{}
	read := func(name string, pid int) error {
		d, err := bench.CPU(pid)
		used[name] += d
		return err
	}
	errs := []error{read("bench", os.Getpid())}
	if pid := s.servers.MySQLPID(); pid != 0 {
		errs = append(errs, read("mysql", pid))
	}
	if pid := s.servers.RabbitPID(); pid != 0 {
		errs = append(errs, read("rabbitmq", pid))
	}
	for _, p := range s.fleet.procs {
		role, _, _ := strings.Cut(p.name, "-")
		errs = append(errs, read(role, p.cmd.Process.Pid))
	}
	busy, err := bench.BusyCPU()
	for _, d := range used {
		busy -= d
	}
	used["others"] = busy
	return used, errors.Join(append(errs, err)...)
}

// knowsCPU reports whether we started both servers, so that cpu knows what they used.
func (s *station) knowsCPU() bool { return s.servers.MySQLPID() != 0 && s.servers.RabbitPID() != 0 }

const (
	quietPoll    = 250 * time.Millisecond
	quietShare   = 0.1 // of a core
	quietTimeout = 15 * time.Second
)

// rest waits until the servers have done what they do behind the scenes after much was written,
// or for quietTimeout: on servers that do not come to rest all figures are of servers that are
// busy. Of servers that we did not start it cannot tell. If the machine is busy with something
// else it says so.
func (s *station) rest(ctx context.Context) error {
	last, err := s.cpu()
	if err != nil {
		return err
	}
	for at, end := time.Now(), time.Now().Add(quietTimeout); ; {
		if !pause(ctx, quietPoll) {
			return ctx.Err()
		}
		used, err := s.cpu()
		if err != nil {
			return err
		}
		share := func(name string) float64 { return (used[name] - last[name]).Seconds() / time.Since(at).Seconds() }
		if max(share("mysql"), share("rabbitmq")) < quietShare || time.Now().After(end) {
			if others := share("others") / float64(s.setting.Cores); others > quietShare {
				s.say("this machine's processors are %.0f %% busy with something else: rates, ratios and latencies will say little", 100*others)
			}
			return nil
		}
		last, at = used, time.Now()
	}
}

// benchPatience is how long nothing may move before a benchmark fails.
const benchPatience = 2 * time.Minute

// await calls look every now and then until it reports that it is done. It fails if a process
// of ours ends, or if what look counts has stood still for too long.
func (s *station) await(ctx context.Context, what string, every time.Duration, look func(context.Context) (n int, done bool, err error)) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	stuck := time.NewTimer(benchPatience)
	defer stuck.Stop()
	last := math.MinInt
	for {
		n, done, err := look(ctx)
		if err != nil || done {
			return err
		}
		if n != last {
			last = n
			stuck.Reset(benchPatience)
		}
		select {
		case <-tick.C:
		case p := <-s.fleet.ended:
			return p.gone()
		case <-stuck.C:
			return fmt.Errorf("nothing has moved for %s while waiting until %s", short(benchPatience), what)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
