// Command relay publishes outbox rows to RabbitMQ with publisher confirms. Run two or more:
// they share the work, and one takes over when another dies.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"backstep/internal/amqp"
	"backstep/internal/app"
	"backstep/internal/handlers"
	"backstep/internal/inbox"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

const about = `relay publishes outbox rows to RabbitMQ with publisher confirms. Run two or
more: they share the work, and one takes over when another dies. SIGTERM finishes
what is in flight, a second one exits at once.

Example:
  BACKSTEP_MYSQL_DSN='app:secret@tcp(127.0.0.1:3306)/backstep' \
  BACKSTEP_AMQP_URL='amqp://app:secret@127.0.0.1:5672/backstep' relay`

// config is read once from BACKSTEP_*.
type config struct {
	app.Servers
	app.Service
	Relay struct {
		Window    int           `default:"1000" range:"1 to 10000" desc:"messages in flight"`
		LeaseTTL  time.Duration `split_words:"true" default:"5s" range:"1s to 5m" desc:"how long a shard stays with a relay that shows no sign of life"`
		ParkAfter time.Duration `split_words:"true" default:"15m" range:"1s to 720h" desc:"how long unroutable messages are tried before they are parked"`
	}
	Inbox struct {
		Retention time.Duration `default:"336h" range:"1h to 8760h" desc:"how long processed message ids are kept, as the workers have it"`
	}
	Outbox struct {
		Retention time.Duration `default:"24h" range:"0s to 8760h" desc:"how long published rows are kept, to be published again after a disaster; 0s deletes them at once"`
	}
	Saga struct {
		Retention time.Duration `default:"720h" range:"1h to 87600h" desc:"how long sagas are kept that have ended; never less than processed message ids"`
	}
}

// Validate checks what tags cannot say.
func (c *config) Validate() error { return errors.Join(c.Servers.Validate(), c.Service.Validate()) }

func main() {
	var cfg config
	app.Main("relay", about, &cfg, func(ctx context.Context) error { return run(ctx, cfg) })
}

func run(ctx context.Context, cfg config) error {
	log := app.Log(cfg.Service, "relay")
	dbConfig := sqltx.Config{MaxOpen: 8, ProgramName: "backstep-relay", AllowUntested: cfg.AllowUntestedServer}
	db, err := sqltx.Open(cfg.MySQL.DSN, dbConfig)
	if err != nil {
		return fmt.Errorf("BACKSTEP_MYSQL_DSN: %w", err)
	}
	defer db.Close() //nolint:errcheck // the process ends

	topology := amqp.Topology{Queues: handlers.Queues}
	client, err := amqp.New(amqp.Config{
		URL: cfg.AMQP.URL, Name: app.ConnectionName("relay"), Log: log, OnSession: topology.Ensure,
	})
	if err != nil {
		return fmt.Errorf("BACKSTEP_AMQP_URL: %w", err)
	}
	pub := amqp.NewPublisher(client, amqp.PublisherConfig{Window: cfg.Relay.Window})
	defer pub.Close()
	bell := amqp.NewBell(client) // where the broker blocks it, it takes no messages either
	relay := outbox.NewRelay(db, publisher{pub}, outbox.Config{
		Window: cfg.Relay.Window, LeaseTTL: cfg.Relay.LeaseTTL, ParkAfter: cfg.Relay.ParkAfter,
		DeletePublished: cfg.Outbox.Retention == 0,
		Parked:          handlers.NewEngine(log).CommandParked,
		Promoted:        func() { bell.Ring(amqp.AllShards) },
		Log:             log,
	})
	admin := app.Admin{
		Ready: func(ctx context.Context) error {
			if !client.Ready() {
				return errors.New("RabbitMQ: " + client.State())
			}
			return sqltx.Probe(ctx, db)
		},
		Stats: func() any { return map[string]any{"relay": relay.ID(), "shards": relay.Shards()} },
	}

	// The client outlives the relay, or it could not finish what is in flight.
	connected, disconnect := context.WithCancel(context.WithoutCancel(ctx))
	defer disconnect()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return admin.Run(connected, cfg.AdminAddr, log) })
	g.Go(func() error { return client.Run(connected) })
	g.Go(func() error { return bell.Run(connected) })
	g.Go(func() error {
		defer disconnect()
		if err := app.AwaitDatabase(ctx, db, dbConfig, 30*time.Second, log); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
		log.Info("database is ready", "database", sqltx.Address(cfg.MySQL.DSN), "version", app.Version())
		var parts errgroup.Group
		parts.Go(func() error { return relay.Run(ctx) })
		parts.Go(func() error { return client.Listen(ctx, relay.Wake) })
		parts.Go(func() error { return relay.RunSweeps(ctx, cfg.sweeps(db)...) })
		return parts.Wait()
	})
	return g.Wait()
}

// sweeps delete one batch each of what is past its retention.
func (c *config) sweeps(db *sql.DB) []outbox.SweepFunc {
	return []outbox.SweepFunc{
		func(ctx context.Context, limit int) (int64, error) {
			return outbox.Sweep(ctx, db, c.Outbox.Retention, limit)
		},
		func(ctx context.Context, limit int) (int64, error) {
			return inbox.Sweep(ctx, db, c.Inbox.Retention, limit)
		},
		func(ctx context.Context, limit int) (int64, error) {
			// Or a late copy of a request could start its saga again.
			return saga.Sweep(ctx, db, max(c.Saga.Retention, c.Inbox.Retention), limit)
		},
	}
}

// publisher is the amqp publisher as the outbox knows it.
type publisher struct{ *amqp.Publisher }

func (p publisher) Acquire(ctx context.Context) (outbox.Channel, error) {
	ch, err := p.Publisher.Acquire(ctx)
	if err != nil {
		return nil, err // not a nil *ConfirmChannel in an interface
	}
	return channel{ch}, nil
}

type channel struct{ *amqp.ConfirmChannel }

func (c channel) Publish(ctx context.Context, tag uint64, m *message.Message) error {
	err := c.ConfirmChannel.Publish(ctx, tag, m)
	if errors.Is(err, amqp.ErrRefused) {
		return errors.Join(outbox.ErrRefused, err)
	}
	return err
}
