package main

import (
	"context"
	"errors"
	"fmt"

	"backstep/internal/amqp"
	"backstep/internal/message"
)

// refusedError says that a message can never be sent as it is.
type refusedError struct{ reason string }

func (e *refusedError) Error() string { return e.reason }

// publish sends m and waits for the broker's confirm. A refusedError is about this message
// alone. After any other error all would fail, and whether m is in its queue may be unknown.
func (r *replayer) publish(ctx context.Context, m *message.Message) error {
	wait, cancel := context.WithTimeoutCause(ctx, confirmPatience, fmt.Errorf(
		"the broker has not confirmed it within %s; it may be in its queue all the same", confirmPatience))
	defer cancel()
	ch, err := r.pub.Acquire(wait)
	if err != nil {
		return errors.Join(err, context.Cause(wait))
	}
	defer ch.Release()
	if err := ch.Publish(wait, 1, m); err != nil {
		if errors.Is(err, amqp.ErrRefused) {
			return &refusedError{err.Error()}
		}
		return err
	}
	select {
	case res := <-ch.Results():
		return publishError(res)
	case <-wait.Done():
		return context.Cause(wait)
	}
}

// publishError is what a publish came to, as an error.
func publishError(res message.Result) error {
	switch res.Kind {
	case message.Confirmed:
		return nil
	case message.Aborted, message.Refused:
		return &refusedError{"the broker refuses it: " + res.Reason}
	case message.Returned:
		return fmt.Errorf("no queue took it (%s); run: backstep topology apply", res.Reason)
	case message.Nacked:
		return fmt.Errorf("the queue takes no more (%s): do its workers run?", res.Reason)
	}
	return fmt.Errorf("%s: %s; it may be in its queue all the same", res.Kind, res.Reason)
}
