package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/rabbitmq/amqp091-go"
)

// Body returns a JSON object of so many bytes, 10 or more.
func Body(size int) []byte {
	const head, tail = `{"pad":"`, `"}`
	return []byte(head + strings.Repeat("x", size-len(head)-len(tail)) + tail)
}

// Sender publishes as anybody would who uses amqp091-go and nothing else: persistent and
// mandatory, with confirms, on one channel of a connection of its own.
type Sender struct {
	conn     *amqp091.Connection
	ch       *amqp091.Channel
	confirms <-chan amqp091.Confirmation
	returns  <-chan amqp091.Return
}

// maxUnsettled is how many confirms a Sender keeps for Settle.
const maxUnsettled = 10_000

// NewSender connects.
func NewSender(url string) (*Sender, error) {
	conn, ch, err := dial(url)
	if err != nil {
		return nil, err
	}
	if err := ch.Confirm(false); err != nil {
		return nil, errors.Join(fmt.Errorf("ask for confirms: %w", err), conn.Close())
	}
	return &Sender{
		conn: conn, ch: ch,
		confirms: ch.NotifyPublish(make(chan amqp091.Confirmation, maxUnsettled)),
		returns:  ch.NotifyReturn(make(chan amqp091.Return, maxUnsettled)),
	}, nil
}

// Send publishes one message. Its id may be empty.
func (s *Sender) Send(exchange, key, id string, body []byte) error {
	return s.ch.Publish(exchange, key, true, false, amqp091.Publishing{
		DeliveryMode: amqp091.Persistent, ContentType: "application/json", MessageId: id, Body: body,
	})
}

// Settle waits for the confirm of the oldest message that is not confirmed yet.
func (s *Sender) Settle(ctx context.Context) error {
	select {
	case c, open := <-s.confirms:
		if !open || !c.Ack {
			return errors.New("the broker did not confirm a message")
		}
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case r, open := <-s.returns: // comes before the confirm
		if open {
			return fmt.Errorf("the broker returned a message to exchange %q, routing key %q: %s", r.Exchange, r.RoutingKey, r.ReplyText)
		}
	default:
	}
	return nil
}

// Close disconnects.
func (s *Sender) Close() { _ = s.conn.Close() } // what was to be confirmed has been

// Flood is many messages at once: the ceiling of a relay.
type Flood struct {
	Exchange, Key string
	Body          []byte
	Messages      int
	Window        int // unconfirmed in flight at most, 1 to maxUnsettled

	Confirmed func(n int) // is told how many are, now and then; must not wait
}

// Run publishes it all and returns how long that took, from before the first publish until the
// last confirm.
func (f Flood) Run(ctx context.Context, s *Sender) (time.Duration, error) {
	stop := context.AfterFunc(ctx, s.Close) // a publish does not heed ctx
	defer stop()
	began := time.Now()
	confirmed := 0
	for sent := 0; confirmed < f.Messages; {
		if sent < f.Messages && sent-confirmed < f.Window {
			if err := s.Send(f.Exchange, f.Key, "", f.Body); err != nil {
				return 0, errors.Join(ctx.Err(), fmt.Errorf("publish: %w", err))
			}
			sent++
			continue
		}
		if err := s.Settle(ctx); err != nil {
			return 0, errors.Join(ctx.Err(), fmt.Errorf("after %d confirms: %w", confirmed, err))
		}
		if confirmed++; confirmed%f.Window == 0 {
			f.Confirmed(confirmed)
		}
	}
	return time.Since(began), nil
}

// Pace calls do n times, once every so often. It gives up a beat that do is too slow for, and
// never makes up for it.
func Pace(ctx context.Context, every time.Duration, n int, do func(i int) error) error {
	beat := time.NewTicker(every)
	defer beat.Stop()
	for i := range n {
		select {
		case <-beat.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := do(i); err != nil {
			return err
		}
	}
	return nil
}

// dial opens a connection and a channel.
func dial(url string) (*amqp091.Connection, *amqp091.Channel, error) {
	properties := amqp091.NewConnectionProperties()
	properties.SetClientConnectionName("backstep/bench")
	conn, err := amqp091.DialConfig(url, amqp091.Config{Properties: properties, Heartbeat: 10 * time.Second})
	if err != nil {
		return nil, nil, fmt.Errorf("connect to RabbitMQ: %w", err)
	}
	ch, err := conn.Channel()
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("open a channel: %w", err), conn.Close())
	}
	return conn, ch, nil
}
