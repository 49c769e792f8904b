package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"backstep/internal/amqp"
	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/tracing"
)

// order is one order.create to submit, and what became of it.
type order struct {
	Line      int    `json:"line"` // in the input, or its number among generated ones
	MessageID string `json:"message_id"`
	Kind      kind   `json:"kind,omitempty"` // of a generated one
	Confirmed bool   `json:"confirmed"`
	Reason    string `json:"reason,omitempty"` // why it is not confirmed

	body []byte
	msg  message.Message // made once: all copies are identical
}

// message makes the order's message. Its id is a UUIDv7, so it tells when it was made.
func (o *order) message(ctx context.Context) {
	o.MessageID = message.NewID()
	o.msg = message.Message{
		Properties: message.Properties{
			MessageID: o.MessageID, Type: handlers.OrderCreateType, CorrelationID: o.MessageID,
			ContentType: "application/json", DeliveryMode: 2, Timestamp: time.Now().UTC().Truncate(time.Second),
			AppID: "backstep-cli",
		},
		Headers: message.Headers{
			message.HeaderRequestID:   o.MessageID,
			message.HeaderOrderingKey: o.MessageID,
			message.HeaderAttempt:     int64(1),
		},
		Body:     o.body,
		Exchange: message.CommandsExchange, RoutingKey: handlers.OrdersQueue, Mandatory: true,
	}
	tracing.Create(ctx, &o.msg).End()
}

// submitter publishes orders and waits for the broker's confirm of each.
type submitter struct {
	broker   *broker
	patience time.Duration  // how long nothing may be confirmed before it gives up
	settled  func(o *order) // is called with each when it is confirmed or given up
}

// window is how many orders are in flight.
const window = 500

// submit returns when every order is confirmed or given up. What the broker refuses for now,
// and what was in flight when the connection was lost, is published again under the same id:
// a copy changes nothing. ErrReported-like counting is the caller's: see order.Confirmed.
func (s *submitter) submit(ctx context.Context, orders []order) {
	pub := amqp.NewPublisher(s.broker.client, amqp.PublisherConfig{Channels: 1, Window: window})
	defer pub.Close()
	todo := make([]*order, len(orders))
	for i := range orders {
		todo[i] = &orders[i]
	}
	alive, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	timer := time.AfterFunc(s.patience, func() {
		giveUp(fmt.Errorf("nothing was confirmed for %s; broker: %s", short(s.patience), s.broker.client.State()))
	})
	defer timer.Stop()
	for round := 0; len(todo) > 0; round++ {
		if round > 0 && !pause(alive, retryPause) {
			break
		}
		ch, err := pub.Acquire(alive)
		if err != nil {
			break
		}
		f := flow{submitter: s, ch: ch, todo: todo, inFlight: map[uint64]*order{}, timer: timer}
		todo = f.run(alive)
		ch.Release()
	}
	for _, o := range todo {
		if o.Reason == "" {
			o.Reason = "not published"
		}
		if err := context.Cause(alive); err != nil {
			o.Reason += ": " + err.Error()
		}
		s.settled(o)
	}
}

// retryPause is how long to wait before what was refused is published again.
const retryPause = 200 * time.Millisecond

func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// flow is the use of one channel.
type flow struct {
	*submitter
	ch       *amqp.ConfirmChannel
	todo     []*order // to be published
	again    []*order // to be published on another channel
	inFlight map[uint64]*order
	tag      uint64
	timer    *time.Timer
	broken   bool // the channel is of no more use; results of what is in flight still come
}

// run publishes until nothing is left to do on this channel, and returns what is to be
// published again.
func (f *flow) run(ctx context.Context) []*order {
	for {
		if !f.broken && len(f.todo) > 0 && len(f.inFlight) < window {
			f.publish(ctx)
			select {
			case r := <-f.ch.Results():
				f.take(r)
			default:
			}
			continue
		}
		if len(f.inFlight) == 0 {
			return append(f.again, f.todo...)
		}
		select {
		case r := <-f.ch.Results():
			f.take(r)
		case <-ctx.Done():
			for _, o := range f.inFlight {
				o.Reason = "published, but not confirmed: it may be in the queue"
				f.again = append(f.again, o)
			}
			return append(f.again, f.todo...)
		}
	}
}

func (f *flow) publish(ctx context.Context) {
	o := f.todo[0]
	if o.MessageID == "" {
		o.message(ctx)
	}
	f.tag++
	err := f.ch.Publish(ctx, f.tag, &o.msg)
	switch {
	case errors.Is(err, amqp.ErrRefused):
		f.todo = f.todo[1:]
		o.Reason = err.Error()
		f.settled(o)
	case err != nil:
		f.broken = true
		o.Reason = err.Error()
		f.again, f.todo = append(f.again, o), f.todo[1:]
	default:
		f.inFlight[f.tag] = o
		f.todo = f.todo[1:]
	}
}

// take notes what became of one message.
func (f *flow) take(r message.Result) {
	o := f.inFlight[r.Tag]
	delete(f.inFlight, r.Tag)
	switch r.Kind {
	case message.Confirmed:
		o.Confirmed, o.Reason = true, ""
		f.timer.Reset(f.patience)
		f.settled(o)
	case message.Nacked, message.Lost:
		o.Reason = r.Kind.String() + ": " + r.Reason
		f.broken = f.broken || r.Kind == message.Lost
		f.again = append(f.again, o)
	case message.Returned:
		o.Reason = fmt.Sprintf("no queue took it (%s); run: backstep topology apply", r.Reason)
		f.settled(o)
	default: // Aborted, Refused
		f.broken = true
		o.Reason = r.Kind.String() + ": " + r.Reason
		f.settled(o)
	}
}
