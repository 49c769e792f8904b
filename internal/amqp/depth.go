package amqp

import (
	"context"
	"fmt"

	"github.com/rabbitmq/amqp091-go"
)

// Depth returns how many messages of a queue are ready for a consumer; those delivered and
// not acked are not among them. ErrMissing means there is no such queue.
func (s *Session) Depth(ctx context.Context, queue string) (ready int, err error) {
	err = s.channel(ctx, func(ch *amqp091.Channel) error {
		defer func() { _ = ch.Close() }() // all is said, or it is closed already
		q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
		ready = q.Messages
		return err
	})
	if isCode(err, amqp091.NotFound) {
		return 0, fmt.Errorf("%w: queue %q", ErrMissing, queue)
	}
	if err != nil {
		return 0, fmt.Errorf("look at queue %q: %w", queue, err)
	}
	return ready, nil
}
