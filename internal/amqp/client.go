package amqp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rabbitmq/amqp091-go"
)

// Client keeps one connection to the broker. Run connects, and connects again for as long as
// it takes; everybody else waits in Session.
type Client struct {
	cfg     Config
	address string // of the broker, without the password

	mu      sync.Mutex // guards below; nothing that waits is called under it
	session *Session   // the live one, or nil
	stopped bool
	reason  string        // why there is no session, in words
	changed chan struct{} // closed and replaced when any of these, or an alarm, changes
}

// New returns a client that is not connected yet.
func New(cfg Config) (*Client, error) {
	addr, err := address(cfg.URL)
	if err != nil {
		return nil, fmt.Errorf("AMQP URL: %w", err)
	}
	return &Client{cfg: cfg.withDefaults(), address: addr, reason: "not started", changed: make(chan struct{})}, nil
}

// Address returns the broker's URL without the password.
func (c *Client) Address() string { return c.address }

// Run keeps a session until ctx ends, then closes it and returns nil. What uses the session
// should have finished by then: end its context before this one. With GiveUp it may also end
// with ErrDenied.
func (c *Client) Run(ctx context.Context) error {
	c.set(nil, false, "connecting to "+c.address)
	last, wasIn := "stopped", false
	defer func() { c.set(nil, true, last) }()
	for try := 0; ; try++ {
		began := time.Now()
		err := c.serve(ctx, func() { wasIn = true })
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(began) > c.cfg.MaxBackoff {
			try = 0 // that one worked for a while
		}
		limit := c.cfg.MaxBackoff
		if e, ok := errors.AsType[*endedError](err); ok && e.overMessage {
			limit = min(limit, messageBackoff)
		}
		wait := retryDelay(try, limit)
		state := fmt.Sprintf("not connected to %s: %v", c.address, err)
		if c.cfg.GiveUp && !wasIn && errors.Is(err, ErrDenied) {
			last = state
			return err
		}
		c.set(nil, false, state)
		c.cfg.Log.Warn("no connection to the broker; trying again", "broker", c.address, "error", err, "wait", wait)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// messageBackoff is the longest wait when the broker closed the connection over something we
// sent. It is there, and each time the relay knows more about which message that was: until it
// is parked, all others wait.
const messageBackoff = 200 * time.Millisecond

// endedError says why a session ended.
type endedError struct {
	why         string
	overMessage bool // closed by the broker with an error code
}

func (e *endedError) Error() string { return e.why }

// firstBackoff is the limit of the first wait: a broker that only closed the connection is
// there again at once.
const firstBackoff = 100 * time.Millisecond

// retryDelay returns how long to wait before try n+1: uniformly random in
// [0, min(limit, firstBackoff·2ⁿ)), so that a fleet does not come back as one.
func retryDelay(n int, limit time.Duration) time.Duration {
	return rand.N(max(1, min(limit, firstBackoff<<min(n, 16))))
}

// serve makes one session, hands it out and returns when it has ended. It calls in when the
// broker has let us in.
func (c *Client) serve(ctx context.Context, in func()) error {
	s, err := c.dial(ctx)
	if err != nil {
		return fmt.Errorf("connect: %w", explain(err, c.cfg.URL))
	}
	in()
	alive, ended := context.WithCancelCause(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		s.watch(c.noteBlocked)
		ended(ErrSessionGone)
	}()
	defer func() { s.close(); <-watched }()

	if c.cfg.OnSession != nil {
		if err := c.cfg.OnSession(alive, s); err != nil {
			return fmt.Errorf("set up the session: %w", err)
		}
	}
	c.cfg.Log.Info("connected to the broker", "broker", c.address, "name", c.cfg.Name)
	c.set(s, false, "")
	defer c.set(nil, false, "closing")
	select {
	case <-ctx.Done():
		return nil
	case <-s.Done():
		return &endedError{s.why(), !isOutage(s.err)}
	}
}

// dial makes a connection. Whatever amqp091 does about a failed handshake, the socket is
// closed when it fails or ctx ends.
func (c *Client) dial(ctx context.Context) (*Session, error) {
	var socket *writeBehind
	var frameMax atomic.Int64
	stop := func() bool { return true }
	deadline := time.Now().Add(c.cfg.DialTimeout)
	uri, err := amqp091.ParseURI(c.cfg.URL)
	if err != nil {
		return nil, err
	}
	conn, err := amqp091.DialConfig(withoutTLS(c.cfg.URL), amqp091.Config{
		Properties: c.cfg.clientProperties(),
		Heartbeat:  c.cfg.Heartbeat,
		Dial: func(network, _ string) (net.Conn, error) {
			begin, cancel := context.WithDeadline(ctx, deadline)
			defer cancel()
			var d net.Dialer
			tcp, err := d.DialContext(begin, network, net.JoinHostPort(uri.Host, strconv.Itoa(uri.Port)))
			if err != nil {
				return nil, err
			}
			nc, err := secure(begin, tcp, uri)
			if err != nil {
				return nil, errors.Join(err, tcp.Close())
			}
			in := &reading{Conn: nc, in: bufio.NewReader(nc), max: func() int { return int(frameMax.Load()) }}
			socket = newWriteBehind(in, c.cfg.WriteTimeout)
			stop = context.AfterFunc(ctx, func() { _ = tcp.Close() }) // whoever reads or writes has the error
			// For the handshakes; amqp091 lifts it after them.
			return socket, socket.SetDeadline(deadline)
		},
	})
	stop()
	if err == nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		if socket != nil {
			_ = socket.Close()
			<-socket.done
		}
		return nil, err
	}
	frameMax.Store(int64(conn.Config.FrameSize))
	return newSession(conn, socket), nil
}

func (c *Client) noteBlocked(reason string) {
	c.mu.Lock()
	c.tell()
	c.mu.Unlock()
	if reason == "" {
		c.cfg.Log.Info("the broker takes messages again", "broker", c.address)
		return
	}
	c.cfg.Log.Warn("the broker takes no messages for now", "broker", c.address, "reason", reason)
}

func (c *Client) set(s *Session, stopped bool, reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.session, c.stopped, c.reason = s, stopped, reason
	c.tell()
}

// tell wakes who waits for a change. mu must be held.
func (c *Client) tell() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// Session waits for a live session. ErrStopped means there will be none.
func (c *Client) Session(ctx context.Context) (*Session, error) {
	for {
		c.mu.Lock()
		s, stopped, changed := c.session, c.stopped, c.changed
		c.mu.Unlock()
		if stopped {
			return nil, ErrStopped
		}
		if s != nil {
			select {
			case <-s.Done(): // Run has not noticed yet
			default:
				return s, nil
			}
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-changed:
		}
	}
}

// Ready reports whether there is a session and the broker takes messages on it: no memory or
// disk alarm blocks it.
func (c *Client) Ready() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.session != nil && c.session.blocked.Load() == nil
}

// State says in words whether we are connected, for /readyz and operators.
func (c *Client) State() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.session == nil:
		return c.reason
	case c.session.blocked.Load() != nil:
		return "blocked by the broker: " + *c.session.blocked.Load()
	}
	return "connected to " + c.address
}
