package amqp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"time"

	"github.com/rabbitmq/amqp091-go"
)

// Config is a Client's. Zero fields mean the defaults.
type Config struct {
	// URL is amqp:// or amqps://user:password@host:port/vhost, user and password
	// percent-encoded. It never appears in an error or a log; Address does.
	URL string
	// Name is the connection's name in the management UI, such as
	// "backstep/worker inventory@host-1 v1.2".
	Name string
	// Properties are further client properties shown on the connection's page.
	Properties map[string]string
	Log        *slog.Logger // default: discarded

	DialTimeout  time.Duration // TCP, TLS and AMQP handshake together; default 10 s
	Heartbeat    time.Duration // default 10 s; a dead link is noticed after about three
	WriteTimeout time.Duration // of one write into a socket the broker does not read; default 30 s
	MaxBackoff   time.Duration // longest wait before connecting again; default 3 s

	// OnSession runs on each new session before anybody gets it, to declare the topology, say.
	// Its context ends with the session. After an error the session is closed and another is
	// tried after a wait. It runs again, beside others and without consequences for the session,
	// when a queue to be consumed turns out to be missing.
	OnSession func(ctx context.Context, s *Session) error

	// GiveUp makes Run return if the broker denies us (ErrDenied) and has never let us in. It is
	// for commands that somebody waits for; a service goes on trying, and the operator cures it
	// meanwhile.
	GiveUp bool
}

func (c Config) withDefaults() Config {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&c.DialTimeout, 10 * time.Second},
		{&c.Heartbeat, 10 * time.Second},
		{&c.WriteTimeout, 30 * time.Second},
		{&c.MaxBackoff, 3 * time.Second}, // all shall flow within 5 s of the end of an outage
	} {
		if *d.field <= 0 {
			*d.field = d.value
		}
	}
	return c
}

func (c Config) clientProperties() amqp091.Table {
	t := amqp091.NewConnectionProperties()
	t["product"] = "Backstep"
	for k, v := range c.Properties {
		t[k] = v
	}
	if c.Name != "" {
		t.SetClientConnectionName(c.Name)
	}
	return t
}

// CheckURL returns why New would refuse an AMQP URL.
func CheckURL(raw string) error {
	_, err := address(raw)
	return err
}

// address checks an AMQP URL and returns it without its password and parameters. The error
// quotes nothing of the URL: where an unencoded password breaks it, any part may be secret.
func address(raw string) (string, error) {
	if !strings.HasPrefix(raw, "amqp://") && !strings.HasPrefix(raw, "amqps://") {
		return "", errors.New("it must start with amqp:// or amqps://")
	}
	if _, err := amqp091.ParseURI(raw); err != nil {
		return "", errors.New("it cannot be read; reserved characters in user, password and virtual host must be percent-encoded")
	}
	u, err := url.Parse(raw)
	if err != nil {
		return "", errors.New("it cannot be read")
	}
	who := ""
	if u.User != nil {
		who = u.User.Username() + "@"
	}
	return fmt.Sprintf("%s://%s%s%s", u.Scheme, who, u.Host, u.EscapedPath()), nil
}
