package amqp

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"backstep/internal/testenv"
)

func TestURLIsRedacted(t *testing.T) {
	tests := []struct {
		name, url string
		want      string // address; empty: refused
	}{
		{"plain", "amqp://app:s3cret@broker:5672/prod", "amqp://app@broker:5672/prod"},
		{"TLS with parameters", "amqps://app:s3cret@broker/prod?cacertfile=/ca.pem", "amqps://app@broker/prod"},
		{"vhost with a slash", "amqp://app:s3cret@broker/a%2Fb", "amqp://app@broker/a%2Fb"},
		{"no user", "amqp://broker", "amqp://broker"},
		{"unencoded password", "amqp://app:s3cret#1@broker/", ""},
		{"unencoded password that looks like a port", "amqp://app:s3cret/1@broker/", ""},
		{"percent sign", "amqp://app:s3cret%@broker/", ""},
		{"scheme", "https://app:s3cret@broker/", ""},
		{"blank", "amqp://app:s3cret@bro ker/", ""},
		{"empty", "", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := New(Config{URL: tt.url})
			switch {
			case err != nil && strings.Contains(err.Error(), "s3cret"):
				t.Errorf("New tells the password: %v", err)
			case tt.want == "" && err == nil:
				t.Errorf("New = %q, want an error", c.Address())
			case tt.want != "" && (err != nil || c.Address() != tt.want):
				t.Errorf("New = %v, %v, want address %q", c, err, tt.want)
			}
		})
	}
}

func TestRetryDelay(t *testing.T) {
	for n := range 100 {
		if d := retryDelay(n, 5*time.Second); d < 0 || d >= 5*time.Second {
			t.Errorf("retryDelay(%d) = %v", n, d)
		}
	}
}

// TestRunEndsWithItsContext in every state, with nil and without a goroutine left (TestMain).
func TestRunEndsWithItsContext(t *testing.T) {
	b := testenv.Vhost(t)
	run := func(t *testing.T, cfg Config, until func(context.Context, *Client)) {
		c, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if c.Ready() {
			t.Error("ready before Run")
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- c.Run(ctx) }()
		until(within(t), c)
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run = %v, want nil", err)
			}
		case <-time.After(patience):
			t.Fatal("Run did not end")
		}
		if c.Ready() || c.State() != "stopped" {
			t.Errorf("after Run: ready %t, state %q", c.Ready(), c.State())
		}
		if _, err := c.Session(t.Context()); !errors.Is(err, ErrStopped) {
			t.Errorf("Session after Run = %v, want ErrStopped", err)
		}
	}
	t.Run("connected", func(t *testing.T) {
		run(t, Config{URL: b.URL}, func(ctx context.Context, c *Client) {
			if _, err := c.Session(ctx); err != nil {
				t.Error(err)
			}
			if !c.Ready() || !strings.HasPrefix(c.State(), "connected to amqp://") {
				t.Errorf("connected: ready %t, state %q", c.Ready(), c.State())
			}
		})
	})
	t.Run("nobody listens", func(t *testing.T) {
		run(t, Config{URL: "amqp://127.0.0.1:1"}, func(_ context.Context, c *Client) {
			until(t, c, func() bool { return strings.HasPrefix(c.State(), "not connected to amqp://127.0.0.1:1: ") })
		})
	})
	silent := func(t *testing.T) (net.Listener, string) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l, "amqp://" + l.Addr().String()
	}
	t.Run("nobody answers", func(t *testing.T) {
		_, url := silent(t) // the kernel accepts
		run(t, Config{URL: url, DialTimeout: 20 * time.Millisecond}, func(_ context.Context, c *Client) {
			until(t, c, func() bool { return strings.Contains(c.State(), "timeout") })
		})
	})
	t.Run("in the handshake", func(t *testing.T) {
		l, url := silent(t)
		run(t, Config{URL: url, DialTimeout: time.Hour}, func(context.Context, *Client) {
			nc, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = nc.Close() })
		})
	})
	t.Run("in OnSession", func(t *testing.T) {
		in := make(chan struct{})
		hang := func(ctx context.Context, _ *Session) error { close(in); <-ctx.Done(); return ctx.Err() }
		run(t, Config{URL: b.URL, OnSession: hang}, func(context.Context, *Client) { <-in })
	})
}

func TestOnSessionIsTriedAgain(t *testing.T) {
	b := testenv.Vhost(t)
	tries := 0
	c := start(t, Config{URL: b.URL, OnSession: func(context.Context, *Session) error {
		if tries++; tries < 3 {
			return errors.New("not yet")
		}
		return nil
	}})
	session(t, c)
	if tries != 3 {
		t.Errorf("OnSession ran %d times before there was a session, want 3", tries)
	}
}

// TestDenied: the client says in words why the broker does not let it in and what to do. It
// goes on trying, unless it was told to give up.
func TestDenied(t *testing.T) {
	b, other := testenv.Vhost(t), testenv.Vhost(t)
	user := b.User(t, "^$", "^$", "^$")
	name := strings.TrimPrefix(strings.SplitN(user, ":", 3)[1], "//")
	for _, tt := range []struct{ name, url, says, hint string }{
		{"wrong password", strings.Replace(user, "@", "s3cret@", 1), "(403)", `are user "` + name + `" and its password right?`},
		{"guest", strings.Replace(b.URL, "@", "s3cret@", 1), "(403)", "guest may only connect from the broker's own host"},
		{"no such virtual host", b.URL + "x", "(530)", "create it: rabbitmqctl add_vhost '" + b.Vhost + "x'"},
		{"virtual host of others", strings.Replace(user, b.Vhost, other.Vhost, 1), "(530)", "rabbitmqctl set_permissions -p '" + other.Vhost + "' '" + name + "'"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if strings.HasPrefix(tt.name, "guest") && !strings.Contains(b.URL, "//guest:") {
				t.Logf("the tests' user is not guest: only the code is looked for")
				tt.hint = "right?"
			}
			c, err := New(Config{URL: tt.url, GiveUp: true})
			if err != nil {
				t.Fatal(err)
			}
			err = c.Run(within(t))
			if !errors.Is(err, ErrDenied) || !strings.Contains(err.Error(), tt.says) || !strings.Contains(err.Error(), tt.hint) || strings.Contains(err.Error(), "s3cret") {
				t.Errorf("Run = %v, want ErrDenied with %s, %q and no password", err, tt.says, tt.hint)
			}
			if _, serr := c.Session(t.Context()); !errors.Is(serr, ErrStopped) || !strings.Contains(c.State(), tt.hint) {
				t.Errorf("afterwards Session = %v, state %q", serr, c.State())
			}
			patient := start(t, Config{URL: tt.url})
			until(t, patient, func() bool { return strings.Contains(patient.State(), tt.hint) })
		})
	}
	tls := start(t, Config{URL: strings.Replace(b.URL, "amqp://", "amqps://", 1)})
	until(t, tls, func() bool { return strings.Contains(tls.State(), "usually 5671") })
}

// TestMissingPermission: the object is named, and the right.
func TestMissingPermission(t *testing.T) {
	b := testenv.Vhost(t)
	declare(t, start(t, Config{URL: b.URL}), "orders")
	c := start(t, Config{URL: b.User(t, "^$", "^$", "^$")})
	err := Topology{Queues: []string{"orders"}}.Declare(within(t), session(t, c))
	for _, want := range []string{`exchange "backstep.commands"`, "lacks the permission to configure it", "backstep topology apply"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Declare = %v, want %q", err, want)
		}
	}
	_, err = NewConsumer(c, "tag").Subscribe(within(t), "orders", 1)
	for _, want := range []string{`queue "orders"`, "lacks the permission to read it"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Subscribe = %v, want %q", err, want)
		}
	}
}

// TestReconnect closes the connection as an operator would. Nothing of the old session works
// on the new one.
func TestReconnect(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	fill(t, c, "orders", 3)
	old := session(t, c)
	sub := subscribe(t, c, "orders", 2)
	first := receive(t, sub)

	b.CloseConnections(t)
	<-old.Done()
	if rest := awaitEnd(t, sub); len(rest) > 1 {
		t.Errorf("%d deliveries after the first, prefetch 2", len(rest))
	}
	if err := sub.Err(); !errors.Is(err, ErrSessionGone) || !strings.Contains(err.Error(), "320") {
		t.Errorf("Err = %v, want ErrSessionGone with the broker's code 320", err)
	}
	renewed := session(t, c)
	if renewed == old {
		t.Fatal("the old session is handed out again")
	}
	for name, err := range map[string]error{
		"Ack": sub.Ack(first.Tag, true), "Nack": sub.Nack(first.Tag, false, true), "Reopen": sub.Reopen(t.Context(), 5),
	} {
		if !errors.Is(err, ErrSessionGone) {
			t.Errorf("%s after the end of the session = %v, want ErrSessionGone", name, err)
		}
	}

	again := subscribe(t, c, "orders", 10)
	redelivered := map[string]bool{}
	for range 3 {
		d := receive(t, again)
		redelivered[string(d.Body)] = d.Redelivered
		if err := again.Ack(d.Tag, false); err != nil {
			t.Error(err)
		}
	}
	if len(redelivered) != 3 || !redelivered[string(first.Body)] {
		t.Errorf("on the new session came %v, want all three, %s as redelivered", redelivered, first.Body)
	}
}
