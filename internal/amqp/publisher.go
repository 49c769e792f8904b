package amqp

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/puddle/v2"
)

// PublisherConfig is a Publisher's. Zero fields mean the defaults.
type PublisherConfig struct {
	Channels int32 // most confirm channels open at once; default 4
	Window   int   // most messages in flight on each; default 1000
}

// Publisher lends confirm channels from a pool. They are all on the client's connection.
type Publisher struct {
	client *Client
	window int
	pool   *puddle.Pool[*confirmer]

	mu      sync.Mutex // guards below
	session *Session   // the last one seen; the pool holds nothing older
}

// NewPublisher returns a publisher with no channel open yet.
func NewPublisher(c *Client, cfg PublisherConfig) *Publisher {
	if cfg.Channels < 1 {
		cfg.Channels = 4
	}
	if cfg.Window < 1 {
		cfg.Window = 1000
	}
	p := &Publisher{client: c, window: cfg.Window}
	pool, err := puddle.NewPool(&puddle.Config[*confirmer]{
		Constructor: p.open,
		Destructor:  (*confirmer).close,
		MaxSize:     cfg.Channels,
	})
	if err != nil {
		panic(err) // only MaxSize < 1 fails
	}
	p.pool = pool
	return p
}

// Ready reports whether publishing makes sense now: connected, and not blocked by an alarm.
func (p *Publisher) Ready() bool { return p.client.Ready() }

// Acquire waits for a session and for a channel on it that nobody else has. The caller must
// Release or Destroy the channel. ErrStopped means that the client or publisher was stopped.
func (p *Publisher) Acquire(ctx context.Context) (*ConfirmChannel, error) {
	for {
		s, err := p.client.Session(ctx)
		if err != nil {
			return nil, fmt.Errorf("acquire a confirm channel: %w", err)
		}
		p.renew(s)
		res, err := p.pool.Acquire(ctx)
		switch {
		case errors.Is(err, puddle.ErrClosedPool):
			return nil, fmt.Errorf("acquire a confirm channel: %w", ErrStopped)
		case err != nil && ctx.Err() == nil && s.conn.IsClosed():
			continue // it went while the channel was opened
		case err != nil:
			return nil, fmt.Errorf("acquire a confirm channel: %w", err)
		}
		if c := res.Value(); c.session == s && !c.ch.IsClosed() {
			return &ConfirmChannel{confirmer: c, lease: res}, nil
		}
		res.Destroy()
	}
}

// renew empties the pool of channels of older sessions.
func (p *Publisher) renew(s *Session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session != s {
		p.session = s
		p.pool.Reset()
	}
}

// open is the pool's constructor. ctx ends when the pool is closed.
func (p *Publisher) open(ctx context.Context) (*confirmer, error) {
	s, err := p.client.Session(ctx)
	if err != nil {
		return nil, err
	}
	return openConfirmer(ctx, p.client, s, p.window)
}

// Stat is a snapshot of the pool for metrics: a pool that is always empty is the bottleneck.
type Stat struct {
	Acquired, Idle, Max int32
	EmptyAcquires       int64 // how often Acquire had to wait for or open a channel
}

// Stat returns the pool's figures.
func (p *Publisher) Stat() Stat {
	s := p.pool.Stat()
	return Stat{
		Acquired: s.AcquiredResources(), Idle: s.IdleResources(), Max: s.MaxResources(),
		EmptyAcquires: s.EmptyAcquireCount(),
	}
}

// Close closes the channels and waits until those lent have come back.
func (p *Publisher) Close() { p.pool.Close() }
