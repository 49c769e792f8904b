package testenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"time"

	"github.com/go-sql-driver/mysql"
)

// given is a server that somebody else runs.
type given string

// ErrNotOurs means that a server was given to us, so that we may not stop or start it.
var ErrNotOurs = errors.New("not started by testenv")

func (g given) start(context.Context) error { return fmt.Errorf("start %s: %w", string(g), ErrNotOurs) }
func (g given) stop(context.Context) error  { return fmt.Errorf("stop %s: %w", string(g), ErrNotOurs) }
func (g given) kill() error                 { return fmt.Errorf("kill %s: %w", string(g), ErrNotOurs) }
func (g given) pid() int                    { return 0 }
func (g given) reaped()                     {}

// useGiven takes the servers whose addresses are given and checks that they answer.
func (s *Servers) useGiven(ctx context.Context, o Options) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if o.MySQLDSN != "" {
		cfg, err := mysql.ParseDSN(o.MySQLDSN)
		if err != nil {
			return fmt.Errorf("read the given MySQL DSN: %w", err)
		}
		if err := wait(ctx, nil, func(ctx context.Context) error { return pingMySQL(ctx, cfg) }); err != nil {
			return fmt.Errorf("use the given MySQL at %s: %w", cfg.Addr, err)
		}
		s.database, s.dsn = given("MySQL"), cfg
	}
	if o.AMQPURL != "" {
		broker, err := url.Parse(o.AMQPURL)
		if err != nil {
			return errors.New("read the given AMQP URL: it is not a URL") // the error would quote the password
		}
		management := &url.URL{Scheme: "http", User: broker.User, Host: net.JoinHostPort(broker.Hostname(), "15672")}
		if o.ManagementURL != "" {
			if management, err = url.Parse(o.ManagementURL); err != nil {
				return errors.New("read the given management URL: it is not a URL")
			}
		}
		if management.User == nil {
			management.User = broker.User
		}
		if err := wait(ctx, nil, func(ctx context.Context) error { return pingRabbitMQ(ctx, broker, management) }); err != nil {
			return fmt.Errorf("use the given RabbitMQ at %s: %w", broker.Host, err)
		}
		s.broker, s.amqp, s.management = given("RabbitMQ"), broker, management
	}
	return nil
}
