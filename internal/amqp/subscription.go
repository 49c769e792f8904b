package amqp

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
)

// Subscription is one consumer on a channel of its own. Its delivery tags mean nothing
// anywhere else. Its methods may be called by several goroutines.
type Subscription struct {
	consumer *Consumer
	queue    string
	ch       *amqp091.Channel
	closes   chan *amqp091.Error // why the channel ended; read by pump alone
	last     uint64              // tag taken from amqp091; used by pump alone
	out      chan message.Delivery
	ended    chan struct{} // closed when pump has returned

	op  sync.Mutex // held for a question to the broker: a channel answers one at a time
	tag string     // of the consumer; guarded by op

	changed chan struct{} // tells pump that one of the following did

	mu        sync.Mutex // guards below; nothing that waits is called under it
	next      []<-chan amqp091.Delivery
	switching bool // Reopen has cancelled one consumer and will hand over the next
	finished  bool // nothing follows what next holds
	err       error
}

// consume starts a consumer with this prefetch on the channel.
func (s *Subscription) consume(prefetch int) (<-chan amqp091.Delivery, error) {
	if err := s.ch.Qos(prefetch, 0, false); err != nil {
		return nil, fmt.Errorf("set prefetch: %w", err)
	}
	s.tag = s.consumer.nextTag(s.queue)
	in, err := s.ch.Consume(s.queue, s.tag, false, false, false, false, nil)
	if err != nil {
		return nil, fmt.Errorf("consume: %w", err)
	}
	return in, nil
}

// Deliveries is closed when the channel, its session or the consumer is gone; Err says why.
func (s *Subscription) Deliveries() <-chan message.Delivery { return s.out }

// Err returns why Deliveries was closed, nil if Cancel or Close did it.
func (s *Subscription) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Done is closed when nothing more will be put into Deliveries.
func (s *Subscription) Done() <-chan struct{} { return s.ended }

// Ack acks a delivery, or all up to it. ErrSessionGone means that the session or channel has
// ended and the broker has requeued the delivery.
func (s *Subscription) Ack(tag uint64, multiple bool) error {
	return s.answered("ack", tag, s.ch.Ack(tag, multiple))
}

// Nack hands a delivery back, or all up to it: to be delivered again if requeue is set, else
// dead-lettered.
func (s *Subscription) Nack(tag uint64, multiple, requeue bool) error {
	return s.answered("nack", tag, s.ch.Nack(tag, multiple, requeue))
}

func (s *Subscription) answered(verb string, tag uint64, err error) error {
	if err == nil {
		return nil
	}
	// A write that failed ends the session; what had not been acked is delivered again.
	return fmt.Errorf("%s delivery %d of queue %q: %w", verb, tag, s.queue, errors.Join(ErrSessionGone, notClosed(err)))
}

// notClosed is err, unless it says no more than that the channel is closed.
func notClosed(err error) error {
	if errors.Is(err, amqp091.ErrClosed) {
		return nil
	}
	return err
}

// Reopen goes on with another prefetch, which AMQP sets when a consumer starts. What had
// arrived comes out of Deliveries first, and then what the new consumer gets; tags go on
// rising by one. Until the old deliveries are acked they come on top of the new prefetch.
// What was on its way to the old consumer, the broker puts back into the queue; nothing is if
// as many deliveries as the old prefetch are not acked yet. If ctx ends first, the subscription
// goes on, with the one prefetch or the other; after any other error it has ended.
func (s *Subscription) Reopen(ctx context.Context, prefetch int) error {
	if prefetch < 1 {
		return fmt.Errorf("reopen queue %q: prefetch %d would mean no limit", s.queue, prefetch)
	}
	return s.ask(ctx, func() error {
		err := s.change(prefetch)
		if err != nil {
			err = fmt.Errorf("reopen queue %q: %w", s.queue, gone(err))
			s.finish(err)
		}
		return err
	})
}

// change replaces the consumer.
func (s *Subscription) change(prefetch int) error {
	if err := s.beginSwitch(); err != nil {
		return err
	}
	if err := s.ch.Cancel(s.tag, false); err != nil {
		return err
	}
	in, err := s.consume(prefetch)
	if err == nil {
		s.endSwitch(in)
	}
	return err
}

// ask puts a question to the broker when the one before is answered. If ctx ends first, fn
// goes on until there is an answer or the session ends.
func (s *Subscription) ask(ctx context.Context, fn func() error) error {
	return await(ctx, func() error {
		s.op.Lock()
		defer s.op.Unlock()
		return gone(fn())
	}, func() {})
}

func (s *Subscription) beginSwitch() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.finished {
		return errors.Join(ErrSessionGone, s.err)
	}
	s.switching = true
	return nil
}

func (s *Subscription) endSwitch(in <-chan amqp091.Delivery) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.finished { // the channel may be gone
		s.next, s.switching = append(s.next, in), false
		s.signal()
	}
}

// Cancel stops new deliveries. Deliveries is closed after those that had arrived; they can
// still be acked, until Close.
func (s *Subscription) Cancel() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	err := s.ask(ctx, func() error {
		if !s.finish(nil) {
			return nil // it has ended already; Err says why
		}
		return s.ch.Cancel(s.tag, false)
	})
	if err != nil {
		return fmt.Errorf("cancel the consumer of queue %q: %w", s.queue, err)
	}
	return nil
}

// Close ends the subscription and its channel; the broker requeues what was not acked. It is
// needed also after Deliveries was closed, unless the session has ended. After an error the
// end of the session does the same.
func (s *Subscription) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	err := s.ask(ctx, func() error {
		s.finish(nil)
		return notClosed(s.ch.Close())
	})
	if err != nil {
		return fmt.Errorf("close the channel of queue %q: %w", s.queue, err)
	}
	<-s.ended
	return nil
}

// finish notes that no consumer follows, and why. It reports false if that was known.
func (s *Subscription) finish(err error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.finished {
		return false
	}
	s.finished, s.switching, s.err = true, false, err
	s.signal()
	return true
}

// signal wakes pump if it waits for a change.
func (s *Subscription) signal() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// pump moves deliveries from one consumer after the other to out, until there is none.
func (s *Subscription) pump(in <-chan amqp091.Delivery) {
	defer close(s.ended)
	defer close(s.out)
	for in != nil {
		if !s.forward(in) {
			s.discard()
			return
		}
		in = s.following()
	}
}

// forward moves deliveries until the consumer is gone. It returns false if the channel is.
func (s *Subscription) forward(in <-chan amqp091.Delivery) bool {
	for d := range in {
		// All deliveries of the channel are ours, so tags count up. amqp091 drops one that
		// comes after its consumer was cancelled; a cumulative ack of later ones would ack it.
		if s.last++; d.DeliveryTag != s.last {
			s.finish(fmt.Errorf("queue %q: delivery %d came where %d was due", s.queue, d.DeliveryTag, s.last))
			return false
		}
		select {
		case s.out <- delivery(&d, s.queue):
		case e := <-s.closes:
			s.lost(e)
			return false
		}
	}
	if s.ch.IsClosed() {
		// amqp091 says closed before it closes the consumers, and then tells us.
		s.lost(<-s.closes)
		return false
	}
	return true
}

func (s *Subscription) lost(e *amqp091.Error) {
	s.finish(fmt.Errorf("%w: queue %q: %s", ErrSessionGone, s.queue, closeReason(e)))
}

// discard drops what nobody took: the broker has requeued it.
func (s *Subscription) discard() {
	for {
		select {
		case <-s.out:
		default:
			return
		}
	}
}

// following waits for the next consumer's deliveries if there will be any; nil if not.
func (s *Subscription) following() <-chan amqp091.Delivery {
	for {
		s.mu.Lock()
		next, switching, finished := s.next, s.switching, s.finished
		if len(next) > 0 {
			s.next = next[1:]
		}
		s.mu.Unlock()
		switch {
		case len(next) > 0:
			return next[0]
		case finished:
			return nil
		case !switching: // nobody here asked for it
			s.finish(fmt.Errorf("%w: queue %q was deleted, or a delivery was not acked in time", ErrConsumerCancelled, s.queue))
			return nil
		}
		<-s.changed
	}
}
