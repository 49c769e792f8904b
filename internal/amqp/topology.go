package amqp

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
)

// Topology is the exchanges of the message contract and these queues. What loses messages
// when it is missing is declared here: queue type, dead-lettering, overflow, bindings. What
// an operator tunes is a policy (ApplyPolicies).
type Topology struct {
	Queues []string // work queues; each comes with <queue>.parked
}

// ParkedQueue returns the name of the queue that holds what was parked from queue.
func ParkedQueue(queue string) string { return queue + ".parked" }

// exchanges are all durable. The doorbell too, though it only carries transient messages:
// a transient exchange is gone when the broker restarts, and most relays may not declare it.
var exchanges = []struct{ name, kind string }{
	{message.CommandsExchange, amqp091.ExchangeDirect},
	{message.EventsExchange, amqp091.ExchangeTopic},
	{message.ParkedExchange, amqp091.ExchangeDirect},
	{message.WakeExchange, amqp091.ExchangeFanout},
}

// workArgs are the arguments of a work queue. At-least-once dead-lettering falls back to
// at-most-once, with only a line in the broker's log, unless the overflow is reject-publish.
func workArgs(queue string) amqp091.Table {
	return amqp091.Table{
		amqp091.QueueTypeArg:        amqp091.QueueTypeQuorum,
		amqp091.QueueOverflowArg:    amqp091.QueueOverflowRejectPublish,
		"x-dead-letter-exchange":    message.ParkedExchange,
		"x-dead-letter-routing-key": queue,
		"x-dead-letter-strategy":    "at-least-once",
	}
}

// parkedArgs are the arguments of a queue for parked messages. Without a delivery limit of
// its own it would have RabbitMQ 4's default: the 21st look at a message would drop it.
func parkedArgs() amqp091.Table {
	return amqp091.Table{
		amqp091.QueueTypeArg:     amqp091.QueueTypeQuorum,
		amqp091.QueueOverflowArg: amqp091.QueueOverflowRejectPublish,
		"x-delivery-limit":       int32(math.MaxInt32),
	}
}

// object is something to declare, and to look for.
type object struct {
	name    string // in words, such as `queue "orders"`
	declare func(*amqp091.Channel) error
	look    func(*amqp091.Channel) error // nil: AMQP cannot ask
}

func exchange(name, kind string) object {
	return object{
		fmt.Sprintf("exchange %q", name),
		func(ch *amqp091.Channel) error { return ch.ExchangeDeclare(name, kind, true, false, false, false, nil) },
		func(ch *amqp091.Channel) error {
			return ch.ExchangeDeclarePassive(name, kind, true, false, false, false, nil)
		},
	}
}

func queue(name string, args amqp091.Table) object {
	return object{
		fmt.Sprintf("queue %q", name),
		func(ch *amqp091.Channel) error {
			_, err := ch.QueueDeclare(name, true, false, false, false, args)
			return err
		},
		func(ch *amqp091.Channel) error {
			_, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
			return err
		},
	}
}

func binding(exchange, queue, key string) object {
	return object{
		name:    fmt.Sprintf("binding of queue %q to exchange %q", queue, exchange),
		declare: func(ch *amqp091.Channel) error { return ch.QueueBind(queue, key, exchange, false, nil) },
	}
}

// objects returns everything in an order in which it can be declared: what a queue
// dead-letters to before the queue.
func (t Topology) objects() []object {
	var all []object
	for _, e := range exchanges {
		all = append(all, exchange(e.name, e.kind))
	}
	for _, q := range t.Queues {
		parked := ParkedQueue(q)
		all = append(all,
			queue(parked, parkedArgs()), binding(message.ParkedExchange, parked, q),
			queue(q, workArgs(q)), binding(message.CommandsExchange, q, q))
	}
	return all
}

// Declare creates what does not exist yet. It fails at the first object that may not be
// declared, or that exists with other properties.
func (t Topology) Declare(ctx context.Context, s *Session) error {
	for _, q := range t.Queues {
		if n := len(ParkedQueue(q)); q == "" || n > maxShort {
			return fmt.Errorf("declare queue %q: its name must have 1 to %d bytes", q, maxShort-n+len(q))
		}
	}
	return s.channel(ctx, func(ch *amqp091.Channel) error {
		defer func() { _ = ch.Close() }() // all is said, or it is closed already
		for _, o := range t.objects() {
			if err := o.declare(ch); err != nil {
				return declareError(o, err)
			}
		}
		return nil
	})
}

func declareError(o object, err error) error {
	hint := ""
	switch {
	case isCode(err, amqp091.AccessRefused):
		hint = permission(err, "configure") + `; or run "backstep topology apply" once as a user that has it`
	case isCode(err, amqp091.PreconditionFailed):
		hint = "; it exists with other properties: empty it, delete it and declare it again"
	}
	return fmt.Errorf("declare %s: %w%s", o.name, gone(err), hint)
}

// Ensure declares the topology if we are permitted to, and otherwise looks whether it is
// there. ErrMissing means that something is not; the error names it. Where the broker does
// not let us look either, as 4.3.0 does without the right to configure, or cannot be asked,
// as for bindings, it is taken to be there: the relay gets a return if it is not.
func (t Topology) Ensure(ctx context.Context, s *Session) error {
	err := t.Declare(ctx, s)
	if !isCode(err, amqp091.AccessRefused) {
		return err
	}
	var missing []error
	for _, o := range t.objects() {
		if o.look == nil {
			continue
		}
		// An answer in the negative closes the channel, so each question has its own.
		err := s.channel(ctx, func(ch *amqp091.Channel) error {
			defer func() { _ = ch.Close() }() // all is said, or it is closed already
			return o.look(ch)
		})
		switch {
		case err == nil, isCode(err, amqp091.AccessRefused), isCode(err, amqp091.ResourceLocked):
		case isCode(err, amqp091.NotFound):
			missing = append(missing, fmt.Errorf(
				`%w: %s; run "backstep topology apply" as a user that may configure it`, ErrMissing, o.name))
		default:
			return fmt.Errorf("look for %s: %w", o.name, err)
		}
	}
	return errors.Join(missing...)
}
