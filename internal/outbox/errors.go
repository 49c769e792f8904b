package outbox

import "errors"

var (
	// ErrRefused means a message can never be published as it is. A Channel's Publish wraps it.
	ErrRefused = errors.New("outbox: message refused")
	// ErrInvalid means a message cannot be stored: its id, key, destination or headers are not
	// what AMQP can carry, or its body is too large.
	ErrInvalid = errors.New("outbox: invalid message")
	// ErrNoRow means there is no outbox row of that id, or not any more.
	ErrNoRow = errors.New("outbox: no such row")
)
