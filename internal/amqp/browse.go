package amqp

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
)

// What a browse has in memory at once: it asks for no more than that many deliveries at a
// time, for fewer if the last ones were large, and for not many more than the last time. Only
// so many windows are open that there are channels for them: a connection has 2047 by default.
const (
	browseWindow  = 1000
	browseBytes   = 16 << 20
	browseGrowth  = 8
	browseWindows = 1000
)

// ErrEnough is what a function that Browse calls returns when it wants to see no more.
var ErrEnough = errors.New("amqp: seen enough")

// Browsed is what a Browse came to.
type Browsed struct {
	Seen int // calls of see

	// What others have in hand is not seen, and the broker does not say how much that is.
	Others int  // consumers that the queue had when it began
	Short  bool // it looked for more, as far as most, and no more came
}

// Browse shows see the first most messages that are ready in a queue, in their order. Those
// of which see says that they are taken are acked at once; all others are back in the queue
// when Browse returns. An error of see ends it, and its message is put back; after ErrEnough
// see is not called any more, and Browse goes on to the end and returns nil.
//
// The order stays if the browse goes to its end and most is all there are: a queue keeps what
// was put back once apart and in front of the rest, and what is put back again comes behind
// that. So it is those not looked at that come first else.
//
// While it lasts the messages are unacked: that long is no longer than the broker's consumer
// time-out (30 min by default), and other consumers do not see them.
func (c *Consumer) Browse(ctx context.Context, queue string, most int, see func(*message.Delivery) (taken bool, err error)) (Browsed, error) {
	b := browser{consumer: c, queue: queue, see: see}
	err := b.run(ctx, most)
	if gerr := b.giveBack(); err == nil {
		err = gerr // after another error the end of the session puts back what we could not
	}
	return b.Browsed, err
}

// browser is one Browse.
type browser struct {
	consumer *Consumer
	queue    string
	see      func(*message.Delivery) (bool, error)
	Browsed
	enough  bool
	largest int // body in the last window

	// A window is a consumer that holds as many messages as it may, except for the last one.
	// Each has a channel of its own, because a channel that ends puts back what one consumer
	// held in order, and nothing else does: what is nacked faster than the queue takes it is
	// put back together, in no order (rabbit_fifo_client, rabbit_fifo).
	windows []*window
}

type window struct {
	*Subscription
	prefetch int
	held     int // deliveries that stay unacked
}

func (b *browser) run(ctx context.Context, most int) (err error) {
	if b.Others, err = b.others(ctx); err != nil {
		return err
	}
	for n := range most {
		if k := len(b.windows); k == 0 || b.windows[k-1].held == b.windows[k-1].prefetch {
			if err := b.open(ctx, most-n); err != nil {
				return err
			}
		}
		w := b.windows[len(b.windows)-1]
		d, err := b.next(ctx, w)
		if err != nil {
			return err
		}
		if d == nil {
			b.Short = !b.enough
			return nil
		}
		b.largest = max(b.largest, len(d.Body))
		if err := b.show(w, d); err != nil {
			return err
		}
	}
	return nil
}

// open begins the next window. Nothing is on its way to those before it.
func (b *browser) open(ctx context.Context, left int) error {
	prefetch := 1 // who knows how large they are
	if len(b.windows) > 0 {
		last := b.windows[len(b.windows)-1].prefetch
		fits := min(browseBytes/max(1, b.largest), browseGrowth*last)
		prefetch = min(browseWindow, left, max(fits, left/browseWindows+1))
	}
	b.largest = 0
	sub, err := b.consumer.Subscribe(ctx, b.queue, prefetch)
	if err != nil {
		return fmt.Errorf("browse: %w", err)
	}
	b.windows = append(b.windows, &window{Subscription: sub, prefetch: prefetch})
	return nil
}

func (b *browser) show(w *window, d *message.Delivery) error {
	if b.enough {
		w.held++
		return nil
	}
	b.Seen++
	taken, err := b.see(d)
	if taken {
		err = errors.Join(err, w.Ack(d.Tag, false))
	} else {
		w.held++
	}
	if errors.Is(err, ErrEnough) {
		b.enough, err = true, nil
	}
	return err
}

// A queue does not tell a consumer that there is no more, so it is asked when nothing comes.
const (
	browseLook  = time.Second
	browseLooks = 3 // in a row that say so: the last messages may be on their way to us
)

// next returns the next delivery, nil if there is none.
func (b *browser) next(ctx context.Context, w *window) (*message.Delivery, error) {
	tick := time.NewTicker(browseLook)
	defer tick.Stop()
	for none := 0; ; {
		select {
		case d, ok := <-w.Deliveries():
			if !ok {
				return nil, fmt.Errorf("browse queue %q: %w", b.queue, w.Err())
			}
			return &d, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
			ready, err := b.ready(ctx)
			if err != nil {
				return nil, err
			}
			if ready > 0 {
				none = 0
			} else if none++; none == browseLooks {
				return nil, nil
			}
		}
	}
}

// A consumer that has just ended is counted for a moment more.
const (
	othersLook  = 50 * time.Millisecond
	othersLooks = 10
)

// others returns how many consumers the queue has before it gets ours.
func (b *browser) others(ctx context.Context) (n int, err error) {
	session, err := b.consumer.client.Session(ctx)
	if err != nil {
		return 0, fmt.Errorf("browse queue %q: %w", b.queue, err)
	}
	for range othersLooks {
		err = session.channel(ctx, func(ch *amqp091.Channel) error {
			defer func() { _ = ch.Close() }() // all is said, or it is closed already
			q, err := ch.QueueDeclarePassive(b.queue, true, false, false, false, nil)
			n = q.Consumers
			return err
		})
		if err != nil {
			return 0, fmt.Errorf("browse queue %q: %w", b.queue, err)
		}
		if n == 0 {
			break
		}
		select {
		case <-time.After(othersLook):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	return n, nil
}

// ready returns how many messages the queue has for others.
func (b *browser) ready(ctx context.Context) (int, error) {
	session, err := b.consumer.client.Session(ctx)
	if err != nil {
		return 0, fmt.Errorf("browse queue %q: %w", b.queue, err)
	}
	return session.Depth(ctx, b.queue)
}

// giveBackTimeout bounds the wait until what one window held is back.
const (
	giveBackTimeout = 5 * time.Second
	giveBackLook    = 5 * time.Millisecond
)

// giveBack ends the windows one after the other, each when what the one before held is back,
// and so waits until the broker has read all acks.
func (b *browser) giveBack() error {
	if len(b.windows) == 0 {
		return nil
	}
	// What is put back must not be delivered to the last window; the others are full.
	last := b.windows[len(b.windows)-1]
	if err := last.Cancel(); err == nil {
		for range last.Deliveries() { // beyond most
			last.held++
		}
	}
	back, err := b.readySoon(0)
	errs := []error{err}
	for _, w := range b.windows {
		if err := w.Close(); err != nil {
			errs = append(errs, err)
			continue
		}
		if errs = append(errs, w.Err()); errors.Join(errs...) == nil {
			back += w.held
			_, err := b.readySoon(back)
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("put back what was in queue %q: %w", b.queue, err)
	}
	return nil
}

// readySoon waits until so many messages are ready, and returns how many are. If they do not
// come, somebody else has taken them.
func (b *browser) readySoon(want int) (int, error) {
	// Not the caller's context: what was taken is given back also when that has ended.
	ctx, cancel := context.WithTimeout(context.Background(), giveBackTimeout)
	defer cancel()
	for {
		ready, err := b.ready(ctx)
		if err != nil || ready >= want {
			return ready, err
		}
		select {
		case <-time.After(giveBackLook):
		case <-ctx.Done():
			return ready, nil
		}
	}
}
