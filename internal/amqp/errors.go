package amqp

import (
	"crypto/tls"
	"errors"
	"fmt"
	"strings"

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

	// ErrDenied means the broker is there and lets us not in: user or password are wrong, or the
	// virtual host does not exist or is not for this user. Only a person can cure it.
	ErrDenied = errors.New("amqp: denied by the broker")

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

// explain adds to why a connection could not be made what a person can do about it.
func explain(err error, rawURL string) error {
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return fmt.Errorf("%w; amqps:// needs the port for TLS, usually 5671", err)
	}
	uri, perr := amqp091.ParseURI(rawURL)
	e, ok := errors.AsType[*amqp091.Error](err)
	if perr != nil || !ok || errors.Is(err, amqp091.ErrSASL) {
		return err
	}
	hint := ""
	switch {
	case e.Code == amqp091.NotAllowed && strings.Contains(e.Reason, "not found"):
		hint = fmt.Sprintf("create it: rabbitmqctl add_vhost '%s'", uri.Vhost)
	case e.Code == amqp091.NotAllowed && strings.Contains(e.Reason, "connection limit"):
		return err // there is room again when others have gone
	case e.Code == amqp091.NotAllowed, errors.Is(err, amqp091.ErrVhost):
		hint = fmt.Sprintf("does virtual host %q exist? If so, permit it: rabbitmqctl set_permissions -p '%[1]s' '%s' CONFIGURE WRITE READ", uri.Vhost, uri.Username)
	case e.Code == amqp091.AccessRefused && uri.Username == "guest":
		hint = "is the password right? Besides, guest may only connect from the broker's own host"
	case e.Code == amqp091.AccessRefused:
		hint = fmt.Sprintf("are user %q and its password right?", uri.Username)
	default:
		return err
	}
	return &deniedError{err, hint}
}

// deniedError is ErrDenied in the broker's words, and what to do about it.
type deniedError struct {
	error
	hint string
}

func (e *deniedError) Error() string   { return e.error.Error() + "; " + e.hint }
func (e *deniedError) Unwrap() []error { return []error{ErrDenied, e.error} }

// permission says which right on an object is missing, if that is what err is about.
func permission(err error, right string) string {
	if !isCode(err, amqp091.AccessRefused) {
		return ""
	}
	return fmt.Sprintf("; the user lacks the permission to %s it (rabbitmqctl set_permissions)", right)
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
