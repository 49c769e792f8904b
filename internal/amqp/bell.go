package amqp

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
)

// Bell is the writers' side of the doorbell: it tells the relays that there are new rows, and
// in which shards. Losing a ring costs the wait until the relay's next poll. Its client's
// connection should serve nothing else: under a memory alarm the broker blocks connections
// that publish, and acks on it would wait too.
type Bell struct {
	client *Client
	shards atomic.Uint32 // not rung for yet
	wake   chan struct{}
}

// bellPause is the least time between two rings of a process.
const bellPause = time.Millisecond

// NewBell returns a bell; Run makes it ring.
func NewBell(c *Client) *Bell { return &Bell{client: c, wake: make(chan struct{}, 1)} }

// Ring announces new rows in these shards, one bit each. It never waits.
func (b *Bell) Ring(shards uint16) {
	b.shards.Or(uint32(shards))
	select {
	case b.wake <- struct{}{}:
	default: // Run has not taken the last one yet and will take these shards with it
	}
}

// Run rings until ctx ends, and returns nil. What cannot be sent at once is dropped.
func (b *Bell) Run(ctx context.Context) error {
	var ch *amqp091.Channel
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-b.wake:
		}
		shards := uint16(b.shards.Swap(0)) // Ring sets no more
		pause := bellPause
		if b.client.Ready() {
			var err error
			if ch, err = b.send(ctx, ch, shards); err != nil && ctx.Err() == nil {
				b.client.cfg.Log.Warn("doorbell not rung", "exchange", message.WakeExchange, "error", err)
				pause = time.Second // a missing exchange closes the channel each time
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// send rings on ch, or on a new channel if that is closed, and returns the channel used.
func (b *Bell) send(ctx context.Context, ch *amqp091.Channel, shards uint16) (*amqp091.Channel, error) {
	if ch == nil || ch.IsClosed() {
		var err error
		if ch, err = b.open(ctx); err != nil {
			return nil, err
		}
	}
	return ch, publishRing(ch, shards)
}

func (b *Bell) open(ctx context.Context) (ch *amqp091.Channel, err error) {
	s, err := b.client.Session(ctx)
	if err != nil {
		return nil, err
	}
	err = s.channel(ctx, func(opened *amqp091.Channel) error { ch = opened; return nil })
	return ch, err
}

func publishRing(ch *amqp091.Channel, shards uint16) error {
	return ch.Publish(message.WakeExchange, "", false, false, amqp091.Publishing{
		DeliveryMode: amqp091.Transient,
		Body:         binary.BigEndian.AppendUint16(nil, shards),
	})
}

// RingOnce rings now, and waits until the broker has the ring, or ctx ends: for a process that
// ends then.
func (b *Bell) RingOnce(ctx context.Context, shards uint16) error {
	ch, err := b.open(ctx)
	if err != nil {
		return fmt.Errorf("ring the doorbell: %w", err)
	}
	closed := ch.NotifyClose(make(chan *amqp091.Error, 1))
	// The broker takes them in order: a ring it refuses, it refuses before it answers the close.
	err = await(ctx, func() error {
		err := errors.Join(publishRing(ch, shards), ch.Close())
		if refused := <-closed; refused != nil {
			err = refused
		}
		return err
	}, func() {})
	if err != nil {
		return fmt.Errorf("ring the doorbell, exchange %q: %w", message.WakeExchange, err)
	}
	return nil
}

// WakeQueuePrefix is how the names of the relays' doorbell queues begin.
const WakeQueuePrefix = message.WakeExchange + "."

// AllShards rings for any shard. It is also what a ring stands for whose body we cannot read.
const AllShards = 0xffff

// Listen is the relays' side of the doorbell: it calls ring with the shards of each ring, on
// whatever session there is, until ctx ends, and returns nil. ring must not wait. For a relay
// that does not listen, a few rings wait on the broker, the latest.
func (c *Client) Listen(ctx context.Context, ring func(shards uint16)) error {
	for try := 0; ; try++ {
		began := time.Now()
		err := c.listen(ctx, ring)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(began) > c.cfg.MaxBackoff {
			try = 0
		}
		wait := retryDelay(try, c.cfg.MaxBackoff)
		c.cfg.Log.Warn("doorbell not heard; listening again", "error", err, "wait", wait)
		ring(AllShards) // something may have been missed
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// listen listens on one session.
func (c *Client) listen(ctx context.Context, ring func(shards uint16)) error {
	s, err := c.Session(ctx)
	if err != nil {
		return err
	}
	var ch *amqp091.Channel
	var in <-chan amqp091.Delivery
	err = s.channel(ctx, func(opened *amqp091.Channel) (err error) {
		ch = opened
		in, err = consumeBell(ch)
		return err
	})
	if err != nil {
		return err
	}
	defer hangUp(ch) // the queue goes with its consumer
	for {
		select {
		case <-ctx.Done():
			return nil
		case d, ok := <-in:
			if !ok {
				return ErrSessionGone
			}
			ring(shardsOf(d.Body))
			if err := d.Ack(false); err != nil {
				return gone(err)
			}
		}
	}
}

// ringsAhead is how many rings may be on their way to a relay, and as many may wait behind
// them. With one, each process that rings would push out what another has rung for.
const ringsAhead = 16

// consumeBell makes a doorbell queue and consumes it. Its name is new each time: the queue of
// a lost connection is locked until the broker has noticed the loss.
func consumeBell(ch *amqp091.Channel) (<-chan amqp091.Delivery, error) {
	name := WakeQueuePrefix + rand.Text()
	args := amqp091.Table{amqp091.QueueMaxLenArg: int32(ringsAhead), amqp091.QueueOverflowArg: amqp091.QueueOverflowDropHead}
	if _, err := ch.QueueDeclare(name, false, true, true, false, args); err != nil {
		return nil, fmt.Errorf("declare queue %q: %w", name, err)
	}
	if err := ch.QueueBind(name, "", message.WakeExchange, false, nil); err != nil {
		return nil, fmt.Errorf("bind queue %q to exchange %q: %w", name, message.WakeExchange, err)
	}
	if err := ch.Qos(ringsAhead, 0, false); err != nil {
		return nil, fmt.Errorf("set prefetch: %w", err)
	}
	return ch.Consume(name, name, false, true, false, false, nil)
}

func shardsOf(body []byte) uint16 {
	if len(body) != 2 {
		return AllShards
	}
	return binary.BigEndian.Uint16(body)
}
