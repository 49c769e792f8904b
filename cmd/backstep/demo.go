package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/app"
	"backstep/internal/handlers"
	"backstep/internal/testenv"
	"backstep/migrations"
)

// demoOptions are the flags of demo.
type demoOptions struct {
	relays, workers, orders int
	keep, asJSON, gateway   bool
	patience                time.Duration
}

func newDemo() *cobra.Command {
	var o demoOptions
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run orders through the whole system, on servers of its own, and check the outcome",
		Long: `Starts MySQL and RabbitMQ (or makes a database and a virtual host of its own on those in
BACKSTEP_MYSQL_DSN and BACKSTEP_AMQP_URL), relays and workers, submits orders of which some must
fail, waits until every saga has ended, shows what was expected beside what happened, and checks
every invariant. Then it stops and removes all it made. It exits with 1 on any difference.

With --gateway and --keep it prints the commands that have the payment gateway go wrong (slow, fail-before,
fail-after, cut-after, decline) and work again, to see what becomes of orders that are submitted meanwhile.`,
		Example: `  backstep demo
  backstep demo --orders 5000 --workers 6
  backstep demo --gateway    # payments over HTTP, at a gateway that fails now and then
  backstep demo --keep       # leave it up until Ctrl-C, to look around
  backstep demo --gateway --keep`,
		Args: cobra.NoArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			if err := o.validate(); err != nil {
				return err
			}
			d := demo{demoOptions: o, out: cmd.OutOrStdout(), progress: cmd.ErrOrStderr()}
			return d.run(cmd.Context())
		}),
	}
	f := cmd.Flags()
	f.IntVar(&o.relays, "relays", 2, "relay processes")
	f.IntVar(&o.workers, "workers", 3, "worker processes")
	f.IntVar(&o.orders, "orders", 200, "orders; 6.5 % ask for too much, 6.5 % are declined and 7 % refused")
	f.BoolVar(&o.gateway, "gateway", false, "charge at a payment gateway, which loses some of its answers, and check its ledger")
	f.BoolVar(&o.keep, "keep", false, "leave everything up until Ctrl-C")
	f.BoolVar(&o.asJSON, "json", false, "print the outcome as JSON")
	f.DurationVar(&o.patience, "patience", 120*time.Second, "fail when no order has moved for so long")
	return cmd
}

func (o demoOptions) validate() error {
	err := errors.Join(inRange("relays", o.relays, 1, 16), inRange("workers", o.workers, 1, 32), inRange("orders", o.orders, 1, 1_000_000))
	if o.patience <= 0 {
		err = errors.Join(err, usagef("--patience is %s; it must be positive", o.patience))
	}
	return err
}

// mix is exactly 13, 13 and 14 of 200, and in proportion otherwise.
func (o demoOptions) mix() mix {
	share := func(percent float64) int { return int(math.Round(float64(o.orders) * percent / 100)) }
	return mix{count: o.orders, noStock: share(6.5), decline: share(6.5), refuse: share(7)}
}

// What the demo stocks: enough of everything, for orders that do not ask for too much.
const (
	demoSKUs  = 100
	demoStock = 100_000_000
)

// demo is one run of it.
type demo struct {
	demoOptions
	out      io.Writer    // the outcome
	progress io.Writer    // what is going on
	pay      *demoGateway // nil: payments are only recorded
	logs     string       // folder with the processes' logs
}

func (d *demo) say(format string, args ...any) { fmt.Fprintf(d.progress, format+"\n", args...) }

// run does it all, and undoes it whatever happens.
func (d *demo) run(ctx context.Context) (err error) {
	programs, err := siblings("relay", "worker")
	if err != nil {
		return err
	}
	given, err := loadConfig()
	if err != nil {
		return err
	}
	servers, err := startServers(ctx, given, d.progress)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, servers.Stop()) }()
	p, err := newPlace(ctx, "demo", servers, given)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.drop()) }()
	d.say("database and virtual host are %s", p.name)
	return d.inPlace(ctx, p, programs)
}

// startServers returns servers for a demo or a benchmark: those that are given, else ones of
// its own, of the stack that the environment names.
func startServers(ctx context.Context, given config, progress io.Writer) (*testenv.Servers, error) {
	o, err := testenv.Options{
		MySQLDSN: given.MySQL.DSN, AMQPURL: given.AMQP.URL, ManagementURL: given.AMQP.ManagementURL,
		Log: slog.New(plainLog{progress}),
	}.StackFromEnvironment()
	if err != nil {
		return nil, err
	}
	servers, err := testenv.Start(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("start MySQL and RabbitMQ: %w", err)
	}
	return servers, nil
}

// siblings finds programs of ours next to this one.
func siblings(names ...string) (map[string]string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the other programs: %w", err)
	}
	if self, err = filepath.EvalSymlinks(self); err != nil {
		return nil, fmt.Errorf("find the other programs: %w", err)
	}
	paths := map[string]string{}
	for _, name := range names {
		path := filepath.Join(filepath.Dir(self), name)
		if _, err := os.Stat(path); err != nil {
			return nil, fmt.Errorf("program %s is not next to %s: %w; run: make build", name, filepath.Base(self), err)
		}
		paths[name] = path
	}
	return paths, nil
}

// inPlace sets everything up, runs the orders and reports.
func (d *demo) inPlace(ctx context.Context, p *place, programs map[string]string) (err error) {
	db, err := p.config.openDatabase(ctx)
	if err != nil {
		return err
	}
	defer db.Close() //nolint:errcheck // the database is dropped next
	if _, err := migrations.Up(ctx, db, nil); err != nil {
		return err
	}
	if _, err := applyTopology(ctx, p.config); err != nil {
		return err
	}
	if err := handlers.Seed(ctx, db, demoSKUs, demoStock); err != nil {
		return err
	}
	b, err := p.config.connect(ctx)
	if err != nil {
		return err
	}
	defer b.close()

	if d.logs, err = os.MkdirTemp("", "backstep-demo-"); err != nil {
		return fmt.Errorf("make a folder for logs: %w", err)
	}
	defer func() {
		if err != nil && ctx.Err() == nil {
			d.say("the logs of relays and workers are in %s", d.logs)
			return
		}
		err = errors.Join(err, os.RemoveAll(d.logs))
	}()
	environment := p.environment()
	if d.gateway {
		if d.pay, err = startDemoGateway(); err != nil {
			return err
		}
		defer d.pay.server.Close() //nolint:errcheck // nobody calls it any more
		environment = append(environment, d.pay.environment())
	}
	f, err := newFleet(d.logs, environment)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.stop(); e != nil {
			err = errors.Join(err, fmt.Errorf("stop relays and workers: %w", e))
		}
	}()
	for role, n := range map[string]int{"relay": d.relays, "worker": d.workers} {
		for i := range n {
			if err := f.start(programs[role], fmt.Sprintf("%s-%d", role, i+1)); err != nil {
				return err
			}
		}
	}
	if err := f.awaitReady(ctx); err != nil {
		return err
	}
	d.say("%s and %s are ready", plural(d.relays, "relay"), plural(d.workers, "worker"))

	t := trial{demo: d, db: db, broker: b, fleet: f, config: p.config, poll: 100 * time.Millisecond}
	r, err := t.run(ctx)
	if err != nil {
		return err
	}
	if err := d.report(r, p); err != nil {
		return err
	}
	if d.keep {
		for _, p := range f.procs {
			d.say("%s is process %d", p.name, p.cmd.Process.Pid)
		}
		d.say("everything stays up until Ctrl-C; kill -9 one of them, and the others go on")
		d.stay(ctx, f)
	}
	if !r.OK {
		return errors.New("the outcome is not what it should be")
	}
	return nil
}

// stay waits for Ctrl-C. Whoever looks around may kill a worker to see what happens: the
// others go on, and that is what there is to see.
func (d *demo) stay(ctx context.Context, f *fleet) {
	for {
		select {
		case <-ctx.Done():
			d.say("stopping")
			return
		case p := <-f.ended:
			p.expected = true
			d.say("%s ended: %s; the others go on", p.name, p.cmd.ProcessState)
		}
	}
}

// environment is that of relays and workers: ours, with the place's servers.
func (p *place) environment() []string {
	mine := []string{
		app.Prefix + "_MYSQL_DSN=" + p.config.MySQL.DSN,
		app.Prefix + "_AMQP_URL=" + p.config.AMQP.URL,
		app.Prefix + "_ADMIN_ADDR=127.0.0.1:0", // many on one machine
	}
	others := slices.DeleteFunc(os.Environ(), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		// A secret's file would contradict what is set above.
		return strings.HasPrefix(name, app.Prefix+"_") && strings.HasSuffix(name, "_FILE") ||
			name == app.Prefix+"_QUEUES" || // each worker takes all
			name == app.Prefix+"_PAYMENT_URL" || // nobody's money
			slices.ContainsFunc(mine, func(m string) bool { return strings.HasPrefix(m, name+"=") })
	})
	return append(mine, others...)
}
