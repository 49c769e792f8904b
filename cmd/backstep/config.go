package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/spf13/cobra"

	"backstep/internal/amqp"
	"backstep/internal/app"
	"backstep/internal/handlers"
	"backstep/internal/sqltx"
	"backstep/migrations"
)

// config is read once, by the verb that runs, from BACKSTEP_*. Which of the addresses a verb
// needs it says itself.
type config struct {
	MySQL struct {
		DSN string `example:"user:pass@tcp(host:3306)/database" desc:"database, as go-sql-driver DSN"`
	}
	AMQP struct {
		URL           string `example:"amqp://user:pass@host:5672/vhost" desc:"broker"`
		ManagementURL string `split_words:"true" example:"http://user:pass@host:15672" desc:"broker's management API, for the policies; user and password as in BACKSTEP_AMQP_URL if it has none"`
	}
	JaegerURL string `split_words:"true" example:"http://localhost:16686" desc:"Jaeger's UI, for links to the traces of sagas"`
	Payment   struct {
		URL string `example:"http://payments:8080" desc:"payment gateway, as the workers have it, so that a dry run knows what would be called there"`
	}
	AllowUntestedServer bool `split_words:"true" default:"false" desc:"accept database servers this version was never tested on"`
	Inbox               struct {
		Retention time.Duration `default:"336h" range:"1h to 8760h" desc:"how long processed message ids are kept, as the workers have it"`
	}
}

// Validate checks what tags cannot say.
func (c *config) Validate() error {
	errs := []error{app.CheckServers(c.MySQL.DSN, c.AMQP.URL)}
	if c.AMQP.ManagementURL != "" {
		if err := amqp.CheckManagementURL(c.AMQP.ManagementURL); err != nil {
			errs = append(errs, fmt.Errorf("BACKSTEP_AMQP_MANAGEMENT_URL: %w", err))
		}
	}
	if u, err := url.Parse(c.JaegerURL); c.JaegerURL != "" && (err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https") {
		errs = append(errs, errors.New("BACKSTEP_JAEGER_URL: it must read http(s)://host:port"))
	}
	if c.Payment.URL != "" {
		if _, err := handlers.NewGateway(c.Payment.URL); err != nil {
			errs = append(errs, fmt.Errorf("BACKSTEP_PAYMENT_URL is %s; %w", app.Quote(c.Payment.URL), err))
		}
	}
	return errors.Join(errs...)
}

// What a verb may need.
const (
	needsMySQL = "BACKSTEP_MYSQL_DSN"
	needsAMQP  = "BACKSTEP_AMQP_URL"
)

func loadConfig(needs ...string) (config, error) {
	var c config
	if err := app.Load(&c, needs...); err != nil {
		return c, usageError{err}
	}
	return c, nil
}

// connectTimeout is how long a server may take to answer at first.
const connectTimeout = 10 * time.Second

// openDatabase returns a pool on a server that answers and that we support.
func (c config) openDatabase(ctx context.Context) (*sql.DB, error) { return c.open(ctx, false) }

// openForMigrations is openDatabase for statements that may take long.
func (c config) openForMigrations(ctx context.Context) (*sql.DB, error) { return c.open(ctx, true) }

func (c config) open(ctx context.Context, long bool) (*sql.DB, error) {
	settings := sqltx.Config{MaxOpen: 4, ProgramName: "backstep-cli", AllowUntested: c.AllowUntestedServer, LongStatements: long}
	db, err := sqltx.Open(c.MySQL.DSN, settings)
	if err != nil {
		return nil, usagef("BACKSTEP_MYSQL_DSN: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	if err = db.PingContext(ctx); err == nil {
		err = sqltx.CheckServer(ctx, db, settings)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("MySQL at %s: %w%s", sqltx.Redact(c.MySQL.DSN), err, databaseHint(err)), db.Close())
	}
	return db, nil
}

// openSchema is openDatabase for verbs that need the schema.
func (c config) openSchema(ctx context.Context) (*sql.DB, error) {
	db, err := c.openDatabase(ctx)
	if err != nil {
		return nil, err
	}
	if err := migrations.Check(ctx, db); err != nil {
		return nil, errors.Join(fmt.Errorf("database %s: %w", sqltx.Redact(c.MySQL.DSN), err), db.Close())
	}
	return db, nil
}

// withSchema runs a verb that needs no more than the database in the environment, with the schema.
func withSchema(cmd *cobra.Command, fn func(ctx context.Context, c config, db *sql.DB) error) error {
	return withDatabase(cmd, config.openSchema, fn)
}

// withDatabase is withSchema with another way to open the database.
func withDatabase(
	cmd *cobra.Command, open func(config, context.Context) (*sql.DB, error), fn func(ctx context.Context, c config, db *sql.DB) error,
) error {
	c, err := loadConfig(needsMySQL)
	if err != nil {
		return err
	}
	db, err := open(c, cmd.Context())
	if err != nil {
		return err
	}
	defer db.Close() //nolint:errcheck // the process ends
	return fn(cmd.Context(), c, db)
}

// awaitSchema is openSchema, but a database that does not answer yet, or lacks migrations, is
// waited for until deadline.
func (c config) awaitSchema(ctx context.Context, deadline time.Time, say func(error)) (*sql.DB, error) {
	tick := time.NewTicker(restPoll)
	defer tick.Stop()
	for said := false; ; {
		db, err := c.openSchema(ctx)
		if err == nil || ctx.Err() != nil {
			return db, err
		}
		switch class := sqltx.Classify(err); {
		case class != sqltx.Lost && class != sqltx.Canceled && !errors.Is(err, migrations.ErrSchemaBehind):
			return nil, err
		case time.Now().After(deadline):
			return nil, err
		case !said:
			said = true
			say(fmt.Errorf("waiting: %w", err))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Server error numbers, from the MySQL 8.4 reference.
const (
	errDatabaseDenied = 1044 // ER_DBACCESS_DENIED_ERROR
	errAccessDenied   = 1045 // ER_ACCESS_DENIED_ERROR
	errNoDatabase     = 1049 // ER_BAD_DB_ERROR
)

// databaseHint says what a person can do about err.
func databaseHint(err error) string {
	if me, ok := errors.AsType[*mysql.MySQLError](err); ok {
		switch me.Number {
		case errNoDatabase:
			return "; create it first: CREATE DATABASE … CHARACTER SET utf8mb4"
		case errAccessDenied:
			return "; are user and password in BACKSTEP_MYSQL_DSN right?"
		case errDatabaseDenied:
			return "; the user in BACKSTEP_MYSQL_DSN needs rights on it"
		}
	}
	switch sqltx.Classify(err) {
	case sqltx.Lost, sqltx.Canceled:
		return "; is it running, and is BACKSTEP_MYSQL_DSN right?"
	}
	return ""
}

// broker is a connection to RabbitMQ for one command.
type broker struct {
	client *amqp.Client
	stop   context.CancelFunc
	done   chan struct{}
	denied error // why it will never connect; set before done is closed
}

// connect returns a broker that answers within connectTimeout. The caller must close it.
func (c config) connect(ctx context.Context) (*broker, error) {
	return c.dial(ctx, connectTimeout, true)
}

// dial is connect with another time-out. What the broker denies is an error at once if giveUp
// is set; one that is starting may not have its users and virtual hosts yet.
func (c config) dial(ctx context.Context, patience time.Duration, giveUp bool) (*broker, error) {
	client, err := amqp.New(amqp.Config{URL: c.AMQP.URL, Name: app.ConnectionName("cli"), GiveUp: giveUp})
	if err != nil {
		return nil, usageError{err}
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	b := &broker{client: client, stop: stop, done: make(chan struct{})}
	go func() {
		defer close(b.done)
		b.denied = client.Run(running)
	}()
	wait, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if _, err := client.Session(wait); err != nil {
		state := client.State()
		b.close()
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case b.denied != nil:
			return nil, fmt.Errorf("RabbitMQ at %s: %w (BACKSTEP_AMQP_URL)", client.Address(), b.denied)
		}
		return nil, fmt.Errorf("RabbitMQ: %s; no connection within %s: is it running, and is BACKSTEP_AMQP_URL right?", state, short(patience))
	}
	return b, nil
}

func (b *broker) close() {
	b.stop()
	<-b.done
}

// vhost returns the virtual host that an AMQP URL names.
func vhost(amqpURL string) (string, error) {
	u, err := url.Parse(amqpURL)
	if err != nil {
		return "", usagef("BACKSTEP_AMQP_URL: it is not a URL") // err would quote the password
	}
	if len(u.Path) < 2 {
		return "/", nil
	}
	return u.Path[1:], nil
}
