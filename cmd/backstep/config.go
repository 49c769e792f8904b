package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/kelseyhightower/envconfig"

	"backstep/internal/amqp"
	"backstep/internal/app"
	"backstep/internal/sqltx"
	"backstep/migrations"
)

// config is read once, by the verb that runs, from BACKSTEP_*. Which of the addresses a verb
// needs it says itself.
type config struct {
	MySQL struct {
		DSN string `desc:"user:password@tcp(host:3306)/database"`
	}
	AMQP struct {
		URL           string `desc:"amqp://user:password@host:5672/vhost"`
		ManagementURL string `split_words:"true" desc:"http://user:password@host:15672, for the policies; credentials as in BACKSTEP_AMQP_URL if it has none"`
	}
	AllowUntestedServer bool `split_words:"true" default:"false" desc:"accept database servers this version was never tested on"`
	Inbox               struct {
		Retention time.Duration `default:"336h" desc:"how long processed message ids are kept, as the workers have it"`
	}
}

// Validate checks what envconfig does not.
func (c *config) Validate() error {
	if c.Inbox.Retention < time.Hour {
		return fmt.Errorf("BACKSTEP_INBOX_RETENTION is %s; it must be an hour or more, as the workers have it", c.Inbox.Retention)
	}
	return nil
}

// environment is the table of variables for --help.
func environment() string {
	const format = `{{range .}}  {{usage_key .}}	{{usage_default .}}	{{usage_description .}}
{{end}}`
	var b strings.Builder
	w := columns(&b)
	err := envconfig.Usagef(app.Prefix, &config{}, w, format)
	if err = errors.Join(err, w.Flush()); err != nil {
		panic(err) // the struct's tags are wrong
	}
	return strings.TrimRight(b.String(), "\n")
}

func loadConfig() (config, error) {
	var c config
	if err := app.Load(&c); err != nil {
		return c, usageError{err}
	}
	return c, nil
}

// connectTimeout is how long a server may take to answer at first.
const connectTimeout = 10 * time.Second

// openDatabase returns a pool on a server that answers and that we support.
func (c config) openDatabase(ctx context.Context) (*sql.DB, error) {
	if c.MySQL.DSN == "" {
		return nil, usagef("BACKSTEP_MYSQL_DSN is not set; it looks like user:password@tcp(127.0.0.1:3306)/backstep")
	}
	settings := sqltx.Config{MaxOpen: 4, ProgramName: "backstep-cli", AllowUntested: c.AllowUntestedServer}
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
}

// connect returns a broker that answers. The caller must close it.
func (c config) connect(ctx context.Context) (*broker, error) {
	if c.AMQP.URL == "" {
		return nil, usagef("BACKSTEP_AMQP_URL is not set; it looks like amqp://user:password@127.0.0.1:5672/backstep")
	}
	client, err := amqp.New(amqp.Config{URL: c.AMQP.URL, Name: app.ConnectionName("cli")})
	if err != nil {
		return nil, usagef("BACKSTEP_AMQP_URL: %w", err)
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	b := &broker{client: client, stop: stop, done: make(chan struct{})}
	go func() {
		defer close(b.done)
		_ = client.Run(running) // nil: only we end it
	}()
	wait, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	if _, err := client.Session(wait); err != nil {
		state := client.State()
		b.close()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("RabbitMQ: %s; is it running, and is BACKSTEP_AMQP_URL right?", state)
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
