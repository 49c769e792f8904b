package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rabbitmq/amqp091-go"
)

// Receiver consumes one queue, on a connection of its own.
type Receiver struct {
	conn    *amqp091.Connection
	in      <-chan amqp091.Delivery
	autoAck bool
}

// NewReceiver connects and consumes. With a prefetch of 0 the broker takes each message for
// acknowledged when it sends it.
func NewReceiver(url, queue string, prefetch int) (*Receiver, error) {
	conn, ch, err := dial(url)
	if err != nil {
		return nil, err
	}
	r := &Receiver{conn: conn, autoAck: prefetch == 0}
	if err = ch.Qos(prefetch, 0, false); err == nil {
		r.in, err = ch.Consume(queue, "", r.autoAck, false, false, false, nil)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("consume queue %q: %w", queue, err), conn.Close())
	}
	return r, nil
}

// Next waits for a message, acknowledges it, and returns its id and when it came.
func (r *Receiver) Next(ctx context.Context) (id string, at time.Time, err error) {
	select {
	case d, open := <-r.in:
		at = time.Now()
		if !open {
			return "", at, errors.New("the broker ended the consumer")
		}
		if !r.autoAck {
			err = d.Ack(false)
		}
		return d.MessageId, at, err
	case <-ctx.Done():
		return "", time.Time{}, ctx.Err()
	}
}

// Close disconnects.
func (r *Receiver) Close() { _ = r.conn.Close() } // whatever it says, the consumer is gone
