package inbox

import (
	"context"
	"math"
	"sync"

	"backstep/internal/crash"
	"backstep/internal/message"
)

// session is a subscription and what of it is not settled. It belongs to the lane's goroutine,
// but for the calls, which hand their answers over.
type session struct {
	Subscription
	open      bool            // it has its full prefetch
	cancelled <-chan struct{} // closed when the lane stops and no more deliveries come

	outside map[uint64]string // by tag: ids of deliveries that have left their batch for a call
	ids     map[string]bool   // the same ids
	answers chan reply
	kept    []message.Delivery // answered, and their transaction was not begun
	calls   sync.WaitGroup
}

// reply is a delivery that comes back from outside.
type reply struct {
	message.Delivery
	called bool // if not, the lane is stopping, and it was not its turn yet
}

func newSession(sub Subscription, cancelled <-chan struct{}) *session {
	return &session{Subscription: sub, cancelled: cancelled, outside: map[uint64]string{}, ids: map[string]bool{}, answers: make(chan reply)}
}

// send has a delivery wait for a slot, until ctx ends, and then for its call, until inHand ends:
// after that nobody wants the answer.
func (s *session) send(ctx, inHand context.Context, l *Lane, d message.Delivery, o message.Outcome) {
	crash.Point("call.intended")
	s.outside[d.Tag], s.ids[d.MessageID] = d.MessageID, true
	s.calls.Go(func() {
		r := reply{Delivery: d}
		select {
		case l.slots <- struct{}{}:
			if r.called = ctx.Err() == nil && inHand.Err() == nil; r.called {
				l.call(inHand, &r.Delivery, o)
			}
			<-l.slots
		case <-ctx.Done():
		case <-inHand.Done():
		}
		select {
		case s.answers <- r:
		case <-inHand.Done():
		}
	})
}

// back takes a reply. It reports false if there is nothing to process: the delivery goes back to
// the broker.
func (s *session) back(r *reply) bool {
	if r.called {
		return true
	}
	s.settled(&r.Delivery)
	s.requeue(&r.Delivery)
	return false
}

// settled notes that a delivery is not outside, or not any more.
func (s *session) settled(d *message.Delivery) {
	if !s.isOutside(d) {
		return
	}
	crash.Point("call.recorded")
	delete(s.ids, s.outside[d.Tag])
	delete(s.outside, d.Tag)
}

func (s *session) isOutside(d *message.Delivery) bool {
	_, ok := s.outside[d.Tag]
	return ok
}

// isCopy reports whether d is a second copy of a message that is outside. To make its call twice
// at a time is of no use, and as long as the first is not settled, the broker keeps that.
func (s *session) isCopy(d *message.Delivery) bool { return s.ids[d.MessageID] && !s.isOutside(d) }

// lowestOutside returns the lowest tag that is: no ack may be cumulative beyond it.
func (s *session) lowestOutside() uint64 {
	lowest := uint64(math.MaxUint64)
	for tag := range s.outside {
		lowest = min(lowest, tag)
	}
	return lowest
}

// giveBack hands groups that were not begun back to the broker at once, and keeps those of which
// an answer is here.
func (s *session) giveBack(groups []*group) {
	for _, g := range groups {
		for i := range g.ds {
			if d := &g.ds[i]; s.isOutside(d) {
				s.kept = append(s.kept, *d)
			} else {
				s.requeue(d)
			}
		}
	}
}

// requeue is for deliveries with tags in hand below them, when the lane stops: as long as its consumer
// lives, the broker would give them to it again, and each time is one of those that a message may have.
func (s *session) requeue(d *message.Delivery) {
	<-s.cancelled
	_ = s.Nack(d.Tag, false, true) // after an error the broker has requeued it already
}
