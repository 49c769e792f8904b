package amqp

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/rabbitmq/amqp091-go"
)

// closeTimeout bounds the farewell to a broker that may not be there any more.
const closeTimeout = 5 * time.Second

// Session is one connection to the broker. Channels, deliveries and confirms belong to it and
// end with it; nothing of it means anything to another.
type Session struct {
	conn    *amqp091.Connection
	socket  *writeBehind
	done    chan struct{}
	err     *amqp091.Error // why it ended; set before done is closed, nil if we ended it
	blocked atomic.Pointer[string]
}

func newSession(conn *amqp091.Connection, socket *writeBehind) *Session {
	return &Session{conn: conn, socket: socket, done: make(chan struct{})}
}

// Done is closed when the connection has ended, for whatever reason.
func (s *Session) Done() <-chan struct{} { return s.done }

// watch notes alarms and the end of the connection, and returns when it has ended. Nothing
// is missed if the connection ended before the call: amqp091 closes the channels it is given.
func (s *Session) watch(onBlocked func(reason string)) {
	blocks := s.conn.NotifyBlocked(make(chan amqp091.Blocking, 16))
	closes := s.conn.NotifyClose(make(chan *amqp091.Error, 1))
	defer close(s.done)
	for {
		select {
		case s.err = <-closes:
			return
		case b, ok := <-blocks:
			switch {
			case !ok:
				blocks = nil
			case b.Active:
				s.blocked.Store(&b.Reason)
				onBlocked(b.Reason)
			default:
				s.blocked.Store(nil)
				onBlocked("")
			}
		}
	}
}

// why says in words why the session ended. It must have ended.
func (s *Session) why() string { return closeReason(s.err) }

// close says farewell, if the broker listens, and returns when the session has ended. Under an
// alarm it does not.
func (s *Session) close() {
	if s.blocked.Load() == nil {
		// An error means that it is closed already, or that the broker did not answer in time;
		// either way it is closed now.
		_ = s.conn.CloseDeadline(time.Now().Add(closeTimeout))
	}
	s.cut()
	<-s.done
	<-s.socket.done
}

// cut closes the socket. The reader notices and ends the session.
func (s *Session) cut() { _ = s.socket.Close() } // closed already is as good

// frameMax is the largest frame the broker takes, with its 8 bytes of framing.
func (s *Session) frameMax() int { return s.conn.Config.FrameSize }

// channel opens a channel and sets it up. If either fails, or ctx ends first, nothing of it
// stays open.
func (s *Session) channel(ctx context.Context, setUp func(*amqp091.Channel) error) error {
	var ch *amqp091.Channel
	return await(ctx, func() (err error) {
		if ch, err = s.conn.Channel(); err != nil {
			return fmt.Errorf("open channel: %w", gone(err))
		}
		if err = setUp(ch); err != nil {
			_ = ch.Close() // it may be closed already
		}
		return gone(err)
	}, func() { _ = ch.Close() })
}

// hangUp closes a channel without waiting for it: under an alarm the broker does not read the
// request, and the answer comes with the end of the session at the latest.
func hangUp(ch *amqp091.Channel) {
	go func() { _ = ch.Close() }() // an error means it is closed
}

// await runs fn, which waits for answers of the broker in calls that know no context. If ctx
// ends first it returns the context's error at once, and undo is called when fn has succeeded
// after all. fn ends with its session at the latest.
func await(ctx context.Context, fn func() error, undo func()) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	answer := make(chan error) // unbuffered: either we take the answer or undo is called
	go func() {
		err := fn()
		select {
		case answer <- err:
		case <-ctx.Done():
			if err == nil {
				undo()
			}
		}
	}()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
