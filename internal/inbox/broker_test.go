package inbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"backstep/internal/message"
)

// broker is a Source with one queue and at most one subscription at a time. It keeps to what
// Subscription promises, and finds fault with acks a real broker would close the channel for.
type broker struct {
	queue string

	mu        sync.Mutex // guards below
	ready     []message.Delivery
	sub       *subscription
	refuse    int            // how many subscriptions
	prefetch  []int          // as asked for, in order
	delivered map[string]int // by message id
	acked     []string       // message ids, in order
	dead      []string       // nacked without requeue
	requeued  []string       // nacked with requeue
	log       []string       // acks and nacks as they came
	faults    []string

	slow time.Duration // to cancel a consumer
}

func newBroker(queue string, msgs ...message.Message) *broker {
	b := &broker{queue: queue, delivered: map[string]int{}}
	b.put(msgs...)
	return b
}

var errGone = errors.New("session gone")

// put publishes messages.
func (b *broker) put(msgs ...message.Message) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, m := range msgs {
		b.ready = append(b.ready, message.Delivery{Message: m, Queue: b.queue})
	}
	b.fill()
}

// drop ends the session, as the loss of the connection does.
func (b *broker) drop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sub != nil {
		b.sub.end(errGone)
	}
}

// look calls f with the broker locked.
func (b *broker) look(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f()
}

func (b *broker) ackedIDs() (ids []string) {
	b.look(func() { ids = slices.Clone(b.acked) })
	return ids
}

// settled reports whether n messages were acked or dead-lettered and none is left.
func (b *broker) settled(n int) func() bool {
	return func() (ok bool) {
		b.look(func() {
			ok = len(b.acked)+len(b.dead) >= n && len(b.ready) == 0 && (b.sub == nil || len(b.sub.unacked) == 0)
		})
		return ok
	}
}

func (b *broker) Subscribe(_ context.Context, queue string, prefetch int) (Subscription, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if queue != b.queue {
		return nil, fmt.Errorf("no queue %q", queue)
	}
	if b.refuse > 0 {
		b.refuse--
		return nil, errors.New("refused")
	}
	if b.sub != nil {
		return nil, errors.New("one consumer at a time")
	}
	b.sub = &subscription{b: b, prefetch: prefetch, out: make(chan message.Delivery, 10_000)}
	b.prefetch = append(b.prefetch, prefetch)
	b.fill()
	return b.sub, nil
}

// fill delivers what prefetch allows; b.mu is held.
func (b *broker) fill() {
	s := b.sub
	for s != nil && !s.cancelled && len(s.unacked) < s.prefetch && len(b.ready) > 0 {
		d := b.ready[0]
		b.ready = b.ready[1:]
		s.last++
		d.Tag = s.last
		b.delivered[d.MessageID]++
		s.unacked = append(s.unacked, d)
		s.out <- d
	}
}

// subscription is one consumer. Everything in it is guarded by b.mu.
type subscription struct {
	b         *broker
	prefetch  int
	last      uint64
	unacked   []message.Delivery
	cancelled bool
	ended     bool
	err       error
	out       chan message.Delivery
}

func (s *subscription) Deliveries() <-chan message.Delivery { return s.out }

func (s *subscription) Err() error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	return s.err
}

// take removes the deliveries an ack or nack is about; b.mu is held.
func (s *subscription) take(verb string, tag uint64, multiple bool) ([]message.Delivery, error) {
	s.b.log = append(s.b.log, fmt.Sprintf("%s %d multiple=%t", verb, tag, multiple))
	if s.ended {
		return nil, errGone
	}
	i := slices.IndexFunc(s.unacked, func(d message.Delivery) bool { return d.Tag == tag })
	if i < 0 {
		s.b.faults = append(s.b.faults, fmt.Sprintf("%s of unknown tag %d", verb, tag))
		s.end(fmt.Errorf("406: unknown delivery tag %d", tag))
		return nil, errGone
	}
	from := i
	if multiple {
		from = 0
	}
	taken := slices.Clone(s.unacked[from : i+1])
	s.unacked = slices.Delete(s.unacked, from, i+1)
	return taken, nil
}

func (s *subscription) Ack(tag uint64, multiple bool) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	taken, err := s.take("ack", tag, multiple)
	for _, d := range taken {
		s.b.acked = append(s.b.acked, d.MessageID)
	}
	s.b.fill()
	return err
}

func (s *subscription) Nack(tag uint64, multiple, requeue bool) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	taken, err := s.take(fmt.Sprintf("nack requeue=%t", requeue), tag, multiple)
	for _, d := range taken {
		if requeue {
			s.b.requeued = append(s.b.requeued, d.MessageID)
			s.giveBack(d)
		} else {
			s.b.dead = append(s.b.dead, d.MessageID)
		}
	}
	s.b.fill()
	return err
}

func (s *subscription) giveBack(ds ...message.Delivery) {
	for i := range ds {
		ds[i].Redelivered, ds[i].Tag = true, 0
	}
	s.b.ready = append(slices.Clone(ds), s.b.ready...)
}

func (s *subscription) Reopen(_ context.Context, prefetch int) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.ended || s.cancelled {
		return errGone
	}
	s.b.prefetch = append(s.b.prefetch, prefetch)
	s.b.log = append(s.b.log, fmt.Sprintf("reopen %d", prefetch))
	s.prefetch = prefetch
	s.b.fill()
	return nil
}

func (s *subscription) Cancel() error {
	time.Sleep(s.b.slow) // a broker that is slow to answer: that is what it is for
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.ended {
		return errGone
	}
	if !s.cancelled {
		s.cancelled = true
		s.b.log = append(s.b.log, "cancel")
		close(s.out)
	}
	return nil
}

func (s *subscription) Close() error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.end(nil)
	return nil
}

// end requeues what is not acked; b.mu is held.
func (s *subscription) end(err error) {
	if s.ended {
		return
	}
	s.ended, s.err = true, err
	s.giveBack(s.unacked...)
	s.unacked = nil
	if !s.cancelled {
		for len(s.out) > 0 {
			<-s.out
		}
		close(s.out)
	}
	s.cancelled = true
	s.b.sub = nil
	s.b.log = append(s.b.log, "closed")
}
