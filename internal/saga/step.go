package saga

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Step is a local step: action runs in a transaction on queue's workers, and what it returns
// is stored and handed to compensation should the saga have to be undone. A nil compensation
// means there is nothing to undo. Either may Emit events and must touch nothing but tx. An
// error made by Fail is final; any other is retried.
func Step[In, Result any](
	name string, queue Queue,
	action func(ctx context.Context, tx *sqltx.Tx, in In) (Result, error),
	compensation func(ctx context.Context, tx *sqltx.Tx, in In, done Result) error,
	options ...StepOption,
) Part[In] {
	s := &step{name: name, queue: string(queue), retry: defaultRetry}
	if action != nil {
		s.action = each(func(ctx context.Context, tx *sqltx.Tx, c *call) error {
			result, err := action(ctx, tx, as[In](c.in))
			if err != nil {
				return err
			}
			c.result, err = message.EncodeJSON(result)
			return err
		})
	}
	if compensation != nil {
		s.compensate = each(func(ctx context.Context, tx *sqltx.Tx, c *call) error {
			done, err := doneOf[Result](c)
			if err != nil {
				return err
			}
			return compensation(ctx, tx, as[In](c.in), done)
		})
	}
	return part[In, Result](s, options)
}

// BatchStep is Step for functions that handle many sagas with few statements. The rules are the
// same, and so is what becomes of a saga: a call that is to fail gets Fail, and, if there are
// others, nothing may have been written for it. An error that is returned says that nobody knows
// which is to blame: all writes are undone and the calls are made one by one, so a function must
// also be right for one call.
func BatchStep[In, Result any](
	name string, queue Queue,
	action, compensation func(ctx context.Context, tx *sqltx.Tx, calls []*Call[In, Result]) error,
	options ...StepOption,
) Part[In] {
	s := &step{name: name, queue: string(queue), retry: defaultRetry}
	if action != nil {
		s.action = together(func(ctx context.Context, tx *sqltx.Tx, calls []*call) error {
			typed := make([]*Call[In, Result], len(calls))
			for i, c := range calls {
				typed[i] = &Call[In, Result]{Info: c.info, In: as[In](c.in), call: c}
			}
			if err := action(ctx, tx, typed); err != nil {
				return err
			}
			for i, c := range calls {
				var err error
				if c.result, err = message.EncodeJSON(typed[i].Result); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if compensation != nil {
		s.compensate = together(func(ctx context.Context, tx *sqltx.Tx, calls []*call) error {
			typed := make([]*Call[In, Result], len(calls))
			for i, c := range calls {
				done, err := doneOf[Result](c)
				if err != nil {
					return err
				}
				typed[i] = &Call[In, Result]{Info: c.info, In: as[In](c.in), Result: done, call: c}
			}
			return compensation(ctx, tx, typed)
		})
	}
	return part[In, Result](s, options)
}

// RemoteStep is a step that another service takes part in: its command goes to that service's
// queue, and the saga waits for the reply, a message of type ReplyType; docs/messages.md has the
// contract. Result is what the reply says the action returned; it is handed to the compensation,
// which is the same service's too, unless NothingToUndo says that there is none.
func RemoteStep[In, Result any](name string, queue Queue, options ...StepOption) Part[In] {
	s := &step{name: name, queue: string(queue), remote: true, retry: retryPolicy{1, defaultRetry.base, defaultRetry.cap}, deadline: remoteDeadline}
	return part[In, Result](s, options)
}

// remoteDeadline is how long a remote step may take by default.
const remoteDeadline = 15 * time.Minute

// Call is one saga's turn in a BatchStep.
type Call[In, Result any] struct {
	Info
	In     In
	Result Result // the action sets it, the compensation gets it

	call *call
}

// Fail makes this saga's turn one that failed with err, and no other's.
func (c *Call[In, Result]) Fail(err error) { c.call.err = err }

// Context returns the context of this saga's turn, for ResultOf and Prepared.
func (c *Call[In, Result]) Context() context.Context { return c.call.ctx }

// Failed reports whether Fail was called.
func (c *Call[In, Result]) Failed() bool { return c.call.err != nil }

// Emit is saga.Emit for this saga.
func (c *Call[In, Result]) Emit(events ...message.Message) { c.call.emit(c.call.ctx, events) }

// doneOf returns what the action of the step that is to be undone returned, or nothing if that is
// not known.
func doneOf[Result any](c *call) (done Result, err error) {
	if c.done == nil {
		return done, nil
	}
	if done, err = decoded[Result](c.done); err != nil {
		err = fmt.Errorf("result of step %s: %w", c.info.Step, err)
	}
	return done, err
}

// part applies the options and refuses what is a programmer's mistake.
func part[In, Result any](s *step, options []StepOption) Part[In] {
	for _, o := range options {
		o(s)
	}
	s.checkResult = func(b []byte) error {
		_, err := decoded[Result](b)
		return err
	}
	in := reflect.TypeFor[In]()
	switch {
	case s.name == "" || len(s.name) > maxName:
		s.mistake("its name must have 1 to %d bytes", maxName)
	case strings.TrimSpace(s.name) != s.name:
		s.mistake("its name begins or ends with a blank, which nobody sees")
	case s.queue == "" || len(s.queue) > message.MaxIDBytes:
		s.mistake("its queue must have 1 to %d bytes", message.MaxIDBytes)
	case s.action == nil && !s.remote:
		s.mistake("it needs an action")
	case !encodes[Result]():
		s.mistake("JSON cannot say its result %s", reflect.TypeFor[Result]())
	case s.retry.attempts < 1 || s.retry.base <= 0 || s.retry.cap < s.retry.base:
		s.mistake("%d attempts with a back-off of %s to %s", s.retry.attempts, s.retry.base, s.retry.cap)
	case s.retry.cap > maxWait:
		s.mistake("a back-off of up to %s; %s is the limit, or workers would refuse the command as too old", s.retry.cap, maxWait)
	case s.timeout < 0 || s.deadline < 0:
		s.mistake("a time-out of %s and a deadline of %s", s.timeout, s.deadline)
	case s.remote && s.deadline == 0:
		s.mistake("a remote step needs a deadline: its reply may be lost")
	case s.remote && (s.lock != nil || s.timeout > 0):
		s.mistake("Locks and Timeout are for what runs here; this one is remote")
	case s.final && !s.remote:
		s.mistake("NothingToUndo is for remote steps; leave the compensation nil")
	case s.lock != nil && s.lock.input != in:
		s.mistake("Locks takes a %s, the step a %s", s.lock.input, in)
	}
	s.checkExternal(in, reflect.TypeFor[Result]())
	return func(d *Definition) { d.steps = append(d.steps, s) }
}
