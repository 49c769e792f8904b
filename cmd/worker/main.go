// Command worker consumes command messages and runs saga steps and compensations, each batch
// in one MySQL transaction. Run as many as you like.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"backstep/internal/amqp"
	"backstep/internal/app"
	"backstep/internal/handlers"
	"backstep/internal/inbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

const about = `worker consumes command messages and runs saga steps and compensations, each
batch in one MySQL transaction. Run as many as you like; SIGTERM drains, a
second one exits at once.

Example:
  BACKSTEP_MYSQL_DSN='app:secret@tcp(127.0.0.1:3306)/backstep' \
  BACKSTEP_AMQP_URL='amqp://app:secret@127.0.0.1:5672/backstep' \
  BACKSTEP_QUEUES=inventory,payment worker`

// config is read once from BACKSTEP_*.
type config struct {
	app.Servers
	app.Service
	Queues   []string      `desc:"queues to consume, separated by commas; all if it is not set"`
	Lanes    int           `default:"1" range:"1 to 64" desc:"consumers of each queue; each has one transaction at a time"`
	Batch    int           `default:"128" range:"1 to 500" desc:"most messages in one transaction"`
	Prefetch int           `example:"256" range:"1 to 1000" desc:"messages that the broker may have sent to each consumer ahead of their acks, at least BACKSTEP_BATCH; twice that if it is not set"`
	MaxHold  time.Duration `split_words:"true" default:"10m" range:"1s to 24h" desc:"how long deliveries are held while the database is away, before they go back to the broker; well below its consumer time-out (30m)"`
	MaxBody  int           `split_words:"true" default:"262144" range:"262144 to 4194304" desc:"bytes; larger messages are parked"`
	Rescue   struct {
		After time.Duration `default:"1m" range:"1s to 24h" desc:"by how much later messages have been delivered, or for how long a queue has been empty, before a saga's command that was published earlier counts as lost and is emitted again"`
	}
	Payment struct {
		URL string `example:"http://payments:8080" desc:"payment gateway at which orders are charged; if it is not set, a payment is only recorded"`
	}
	Inbox struct {
		Retention time.Duration `default:"336h" range:"1h to 8760h" desc:"how long duplicates are known, longer than any message waits before it is replayed; older ones are parked"`
	}
}

// Validate checks what tags cannot say.
func (c *config) Validate() error {
	errs := []error{c.Servers.Validate(), c.Service.Validate()}
	if len(c.Queues) == 0 {
		c.Queues = handlers.Queues
	}
	switch {
	case c.Prefetch == 0: // not set, or refused already
		c.Prefetch = 2 * c.Batch
	case c.Prefetch < c.Batch:
		errs = append(errs, fmt.Errorf("BACKSTEP_PREFETCH is %d, less than BACKSTEP_BATCH, %d: no batch would ever be full; raise the one or lower the other", c.Prefetch, c.Batch))
	}
	if c.Payment.URL != "" {
		if _, err := handlers.NewGateway(c.Payment.URL); err != nil {
			errs = append(errs, fmt.Errorf("BACKSTEP_PAYMENT_URL is %s; %w", app.Quote(c.Payment.URL), err))
		}
	}
	known := "the queues are " + strings.Join(handlers.Queues, ", ")
	for i, q := range c.Queues {
		q = strings.TrimSpace(q)
		c.Queues[i] = q
		switch {
		case !slices.Contains(handlers.Queues, q):
			errs = append(errs, fmt.Errorf("BACKSTEP_QUEUES names %s; %s", app.Quote(q), known))
		case slices.Contains(c.Queues[:i], q):
			errs = append(errs, fmt.Errorf("BACKSTEP_QUEUES names %q twice; for more consumers set BACKSTEP_LANES", q))
		}
	}
	return errors.Join(errs...)
}

func main() {
	var cfg config
	app.Main("worker", about, &cfg, func(ctx context.Context) error { return run(ctx, cfg) })
}

func run(ctx context.Context, cfg config) error {
	log := app.Log(cfg.Service, "worker")
	lanes := len(cfg.Queues) * cfg.Lanes
	dbConfig := sqltx.Config{MaxOpen: lanes + 6, ProgramName: "backstep-worker", AllowUntested: cfg.AllowUntestedServer}
	db, err := sqltx.Open(cfg.MySQL.DSN, dbConfig)
	if err != nil {
		return fmt.Errorf("BACKSTEP_MYSQL_DSN: %w", err)
	}
	defer db.Close() //nolint:errcheck // the process ends

	topology := amqp.Topology{Queues: handlers.Queues}
	client, err := amqp.New(amqp.Config{
		URL: cfg.AMQP.URL, Name: app.ConnectionName("worker", cfg.Queues...), Log: log, OnSession: topology.Ensure,
	})
	if err != nil {
		return fmt.Errorf("BACKSTEP_AMQP_URL: %w", err)
	}
	// The doorbell has a connection of its own: under an alarm the broker blocks connections
	// that publish, and acks must get through.
	bellClient, err := amqp.New(amqp.Config{URL: cfg.AMQP.URL, Name: app.ConnectionName("worker-bell"), Log: log})
	if err != nil {
		return fmt.Errorf("BACKSTEP_AMQP_URL: %w", err)
	}
	bell := amqp.NewBell(bellClient)
	host, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("host name: %w", err)
	}
	source := consumer{amqp.NewConsumer(client, "backstep@"+host)}
	var gateway *handlers.Gateway
	if cfg.Payment.URL != "" {
		if gateway, err = handlers.NewGateway(cfg.Payment.URL); err != nil {
			return fmt.Errorf("BACKSTEP_PAYMENT_URL: %w", err)
		}
	}
	engine := handlers.NewEngineWithGateway(log, gateway)
	if err := engine.Takes(cfg.Inbox.Retention); err != nil {
		return fmt.Errorf("BACKSTEP_INBOX_RETENTION: %w", err)
	}
	mux := &inbox.Mux{
		Types: map[string]inbox.Handler{
			handlers.OrderCreateType: handlers.NewOrderCreate(log),
			// Also without an x-saga-id header: a wish to cancel may name its saga otherwise, and
			// only the engine knows what is wrong with one that does not.
			saga.CancelType: engine, saga.ReplyType: engine,
		},
		Sagas: engine,
	}

	var stats inbox.Stats
	admin := app.Admin{
		Ready: func(ctx context.Context) error {
			if !client.Ready() {
				return errors.New("RabbitMQ: " + client.State())
			}
			return sqltx.Probe(ctx, db)
		},
		Stats: func() any { return stats.Snapshot() },
	}

	// The client outlives the lanes, or they could not hand back what they have not started.
	connected, disconnect := context.WithCancel(context.WithoutCancel(ctx))
	defer disconnect()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return admin.Run(connected, cfg.AdminAddr, log) })
	g.Go(func() error { return client.Run(connected) })
	g.Go(func() error { return bellClient.Run(connected) })
	g.Go(func() error { return bell.Run(connected) })
	g.Go(func() error {
		defer disconnect()
		if err := app.AwaitDatabase(ctx, db, dbConfig, 30*time.Second, log); err != nil {
			return err
		}
		log.Info("worker started", "queues", cfg.Queues, "lanes_per_queue", cfg.Lanes,
			"database", sqltx.Address(cfg.MySQL.DSN), "version", app.Version())
		standing := map[string]func() saga.Standing{}
		var lanesDone errgroup.Group
		for _, queue := range cfg.Queues {
			progress := &inbox.Progress{} // of all lanes of the queue
			standing[queue] = func() saga.Standing { return saga.Standing(progress.Standing()) }
			for range cfg.Lanes {
				lane := inbox.NewLane(db, source, inbox.Config{
					Queue: queue, Handler: mux, Batch: cfg.Batch, Prefetch: cfg.Prefetch, MaxBody: cfg.MaxBody, Retention: cfg.Inbox.Retention,
					MaxHold: cfg.MaxHold,
					Parked:  engine.CommandParked, Committed: bell.Ring, Progress: progress, Log: log,
				}, &stats)
				lanesDone.Go(func() error { return lane.Run(ctx) })
			}
		}
		keeper := saga.NewKeeper(engine, db, saga.KeeperConfig{
			Queues: standing, Ready: client.Ready, Committed: bell.Ring, RescueAfter: cfg.Rescue.After, Log: log,
		})
		defer log.Info("worker stopped")
		// As long as lanes have something in hand.
		keeping, enough := context.WithCancel(context.WithoutCancel(ctx))
		defer enough()
		var kept errgroup.Group
		kept.Go(func() error { return keeper.Run(keeping) })
		err := lanesDone.Wait()
		enough()
		return errors.Join(err, kept.Wait())
	})
	return g.Wait()
}

// consumer is the amqp consumer as the inbox knows it.
type consumer struct{ *amqp.Consumer }

func (c consumer) Subscribe(ctx context.Context, queue string, prefetch int) (inbox.Subscription, error) {
	sub, err := c.Consumer.Subscribe(ctx, queue, prefetch)
	if err != nil {
		return nil, err // not a nil *Subscription in an interface
	}
	return sub, nil
}
