package amqp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
)

// Consumer subscribes to queues on a client's sessions.
type Consumer struct {
	client *Client
	tag    string
	count  atomic.Uint64 // of consumer tags given
}

// NewConsumer returns a consumer whose consumer tags are "<tag>.<queue>-<n>", so that an
// operator sees in a queue's page who consumes it.
func NewConsumer(c *Client, tag string) *Consumer { return &Consumer{client: c, tag: tag} }

// minArrived is how many deliveries Deliveries can hold ready; more wait inside amqp091.
const minArrived = 256

// Subscribe waits for a session and consumes queue on a channel of its own. prefetch is how
// many deliveries may be unacked, and so what bounds the memory they take; at least 1. If the
// queue is missing, the session is set up again first: somebody has deleted it meanwhile.
func (c *Consumer) Subscribe(ctx context.Context, queue string, prefetch int) (*Subscription, error) {
	if prefetch < 1 {
		return nil, fmt.Errorf("subscribe to queue %q: prefetch %d would mean no limit", queue, prefetch)
	}
	for missing := false; ; {
		session, err := c.client.Session(ctx)
		if err != nil {
			return nil, fmt.Errorf("subscribe to queue %q: %w%s", queue, err, permission(err, "read"))
		}
		s, err := c.subscribe(ctx, session, queue, prefetch)
		switch {
		case err == nil:
			return s, nil
		case ctx.Err() == nil && (session.conn.IsClosed() || errors.Is(err, net.ErrClosed)):
			continue // it went while the channel was opened; amqp091 may notice a little later
		case isCode(err, amqp091.NotFound) && !missing && c.client.cfg.OnSession != nil:
			missing = true
			if serr := c.client.cfg.OnSession(ctx, session); serr == nil {
				continue
			} else {
				err = fmt.Errorf("set up the session: %w", serr)
			}
		}
		return nil, fmt.Errorf("subscribe to queue %q: %w%s", queue, err, permission(err, "read"))
	}
}

// subscribe consumes queue on this session.
func (c *Consumer) subscribe(ctx context.Context, session *Session, queue string, prefetch int) (*Subscription, error) {
	s := &Subscription{
		consumer: c,
		queue:    queue,
		out:      make(chan message.Delivery, max(prefetch, minArrived)),
		closes:   make(chan *amqp091.Error, 1),
		changed:  make(chan struct{}, 1),
		ended:    make(chan struct{}),
	}
	var in <-chan amqp091.Delivery
	err := session.channel(ctx, func(ch *amqp091.Channel) (err error) {
		s.ch = ch
		ch.NotifyClose(s.closes)
		in, err = s.consume(prefetch)
		return err
	})
	if err != nil {
		return nil, err
	}
	go s.pump(in)
	return s, nil
}

// nextTag returns a consumer tag nobody on this session has, cut to what AMQP allows.
func (c *Consumer) nextTag(queue string) string {
	prefix, suffix := c.tag+"."+queue, fmt.Sprintf("-%d", c.count.Add(1))
	return prefix[:min(len(prefix), maxShort-len(suffix))] + suffix
}
