package amqp

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
	"time"

	"github.com/jackc/puddle/v2"
	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
)

// ConfirmChannel is a channel in confirm mode, lent by a Publisher to one goroutine at a time.
type ConfirmChannel struct {
	*confirmer
	lease *puddle.Resource[*confirmer] // nil once handed back
}

// Release hands the channel back. A channel that is closed, or on which something is in
// flight or a result was not taken, is destroyed instead: the next user must not meet it.
func (c *ConfirmChannel) Release() {
	c.mu.Lock()
	doubt := c.inFlight+len(c.results) > 0
	c.mu.Unlock()
	if doubt || c.ch.IsClosed() {
		c.Destroy()
		return
	}
	if c.lease != nil {
		c.lease.Release()
		c.lease = nil
	}
}

// Destroy closes the channel, after any doubt. It does not wait; calling it after Release or
// Destroy does nothing.
func (c *ConfirmChannel) Destroy() {
	if c.lease != nil {
		c.lease.Destroy()
		c.lease = nil
	}
}

// confirmer publishes on one channel and works out what became of each message.
type confirmer struct {
	client  *Client
	session *Session
	ch      *amqp091.Channel
	closes  chan *amqp091.Error
	returns chan amqp091.Return
	results chan message.Result
	window  int
	wake    chan struct{}

	mu       sync.Mutex // guards below; nothing that waits is called under it
	inFlight int        // messages written, or being written, without a result
	written  []flight   // by Publish, not yet seen by collect
	idle     bool       // collect has nothing in flight and waits for wake
	gone     bool       // collect has given its last result
}

// flight is a message that was written and has no result yet.
type flight struct {
	tag       uint64
	confirm   *amqp091.DeferredConfirmation
	mandatory bool
	key       returnKey
}

// returnKey is what a basic.return tells of its message. Messages with equal keys are copies
// of each other, so it does not matter which of them a return is taken for. Body tells apart
// messages without an id.
type returnKey struct {
	id, exchange, routingKey string
	body                     uint64
}

var bodySeed = maphash.MakeSeed()

func newReturnKey(id, exchange, routingKey string, body []byte) returnKey {
	k := returnKey{id: id, exchange: exchange, routingKey: routingKey}
	if id == "" {
		k.body = maphash.Bytes(bodySeed, body)
	}
	return k
}

// openConfirmer opens a confirm channel on s, the client's session.
func openConfirmer(ctx context.Context, client *Client, s *Session, window int) (*confirmer, error) {
	c := &confirmer{
		client:  client,
		session: s,
		closes:  make(chan *amqp091.Error, 1),
		// amqp091 drops a return that finds this full for 5 s, and its message would look
		// published. There are never more of them than messages in flight.
		returns: make(chan amqp091.Return, window+16),
		results: make(chan message.Result, window+16),
		window:  window,
		wake:    make(chan struct{}, 1),
	}
	err := s.channel(ctx, func(ch *amqp091.Channel) error {
		c.ch = ch
		ch.NotifyClose(c.closes)
		ch.NotifyReturn(c.returns)
		if err := ch.Confirm(false); err != nil {
			return fmt.Errorf("select confirm mode: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	go c.collect()
	return c, nil
}

func (c *confirmer) close() { hangUp(c.ch) }

// Results delivers what became of each message, oldest first as far as the broker confirms in
// order. It is never closed.
func (c *confirmer) Results() <-chan message.Result { return c.results }

// Publish writes m, persistent unless m says otherwise, and does not wait for the broker. nil
// means that exactly one Result with this tag follows, also if the channel dies. After an
// error no Result follows. ErrRefused means that m can never be published as it is and
// ErrWindowFull that there is no room now; nothing was written and the channel is as before.
// After any other error the channel is of no more use and whether m was written is unknown.
// Only a socket that the broker does not read makes Publish wait; if ctx ends then, it cuts the
// connection.
func (c *confirmer) Publish(ctx context.Context, tag uint64, m *message.Message) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	p, err := publishing(m, c.session.frameMax())
	if err != nil {
		return err
	}
	if !c.admit() {
		return ErrWindowFull
	}
	stop := context.AfterFunc(ctx, c.session.cut) // the write may wait for a broker that does not read
	confirm, err := c.ch.PublishWithDeferredConfirm(m.Exchange, m.RoutingKey, m.Mandatory, false, p)
	stop()
	if err != nil {
		c.dismiss()
		if !errors.Is(err, amqp091.ErrClosed) {
			// Half a message may be in the socket. amqp091 notices at the next write only.
			c.session.cut()
		}
		return fmt.Errorf("publish message %q: %w", m.MessageID, gone(err))
	}
	f := flight{
		tag: tag, confirm: confirm, mandatory: m.Mandatory,
		key: newReturnKey(m.MessageID, m.Exchange, m.RoutingKey, m.Body),
	}
	if !c.note(f) {
		c.dismiss()
		return fmt.Errorf("publish message %q: %w", m.MessageID, ErrSessionGone)
	}
	return nil
}

// admit makes room for a message in the window, if there is any. Results nobody took count
// too, so that collect never waits to give one.
func (c *confirmer) admit() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.inFlight+len(c.results) >= c.window {
		return false
	}
	c.inFlight++
	return true
}

// dismiss takes back what admit did.
func (c *confirmer) dismiss() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inFlight--
}

// note hands f to collect. It returns false if collect has ended.
func (c *confirmer) note(f flight) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return false
	}
	c.written = append(c.written, f)
	if c.idle {
		c.idle = false
		c.wake <- struct{}{} // has room: collect takes it before it is idle again
	}
	return true
}

// Confirms usually come in the order of the messages, so collect waits for the oldest. One
// that is late, because its queue is, must not hold up the others: they are looked at every
// so often, the more seldom the longer it takes.
const (
	firstLook = time.Millisecond
	lastLook  = 16 * time.Millisecond
)

// collect gives each message its result, until the channel is closed.
func (c *confirmer) collect() {
	f := flights{confirmer: c, returned: map[returnKey]returned{}}
	f.end(f.run())
}

// run returns why the channel was closed.
func (f *flights) run() *amqp091.Error {
	look := time.NewTimer(time.Hour)
	defer look.Stop()
	wait := firstLook
	for {
		f.take()
		oldest := f.oldest()
		if oldest == nil {
			select {
			case <-f.wake:
				continue
			case e := <-f.closes:
				return e
			}
		}
		look.Reset(wait)
		settle := f.settle
		select {
		case <-oldest.Done():
			wait = firstLook
		case <-look.C:
			wait = min(2*wait, lastLook)
			settle = f.settleBehind
		case e := <-f.closes:
			return e
		}
		if e, closed := settle(); closed {
			return e
		}
	}
}
