package amqp

import (
	"errors"
	"fmt"

	"github.com/rabbitmq/amqp091-go"
)

var (
	// ErrSessionGone means the session, or the channel, that something belonged to has ended.
	// The broker has requeued what was not acked on it, so an ack must not go anywhere else.
	ErrSessionGone = errors.New("amqp: session is gone")

	// ErrStopped means the client has been stopped: there will be no session any more.
	ErrStopped = errors.New("amqp: client has stopped")

	// ErrRefused means a message can never be published as it is. Nothing was written.
	ErrRefused = errors.New("amqp: message cannot be published")

	// ErrWindowFull means as many messages are in flight, or have results nobody took, as the
	// window allows. Nothing was written; take results first.
	ErrWindowFull = errors.New("amqp: window is full")

	// ErrConsumerCancelled means the broker cancelled a consumer: its queue was deleted, or it
	// did not ack in time. Subscribing again is the cure, or finds out what is missing.
	ErrConsumerCancelled = errors.New("amqp: consumer cancelled by the broker")

	// ErrMissing means an exchange or queue does not exist and we may not declare it.
	ErrMissing = errors.New("amqp: missing on the broker")
)

// gone returns err as ErrSessionGone if it says that the channel or connection is closed.
func gone(err error) error {
	if errors.Is(err, amqp091.ErrClosed) {
		return ErrSessionGone
	}
	return err
}

// isCode reports whether the broker answered with this reply code.
func isCode(err error, code int) bool {
	e, ok := errors.AsType[*amqp091.Error](err)
	return ok && e != nil && e.Server && e.Code == code
}

// closeReason says in words why a channel or connection ended; nil means we closed it.
func closeReason(e *amqp091.Error) string {
	switch {
	case e == nil:
		return "closed by us"
	case e.Server:
		return fmt.Sprintf("closed by the broker: %d %s", e.Code, e.Reason)
	}
	return "connection lost: " + e.Reason
}
