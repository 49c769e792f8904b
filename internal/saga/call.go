package saga

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

// Info is what a step function may know about the saga it runs in.
type Info struct {
	SagaID    string
	Step      string
	Direction Direction
	Attempt   int
	Unknown   bool // in a compensation: nobody knows whether the action happened, nor what it returned
	Called    bool // its Prepare was called before, and that call may have had its effect
}

// IdempotencyKey is the same for every attempt of this step in this direction.
func (i Info) IdempotencyKey() string {
	return i.SagaID + ":" + i.Step + ":" + string(i.Direction)
}

// ActionKey is the IdempotencyKey of the step's action: in a compensation, of what is to be undone.
func (i Info) ActionKey() string {
	i.Direction = Execute
	return i.IdempotencyKey()
}

// InfoFrom returns the Info of the step that ctx belongs to.
func InfoFrom(ctx context.Context) Info {
	if c, _ := ctx.Value(callKey{}).(*call); c != nil {
		return c.info
	}
	return Info{}
}

// Emit adds events to the transaction of the step or hook that ctx belongs to, and takes them
// back if that fails. All that a batch emits is written by one statement, behind the commands.
// It panics outside of a step or hook.
func Emit(ctx context.Context, events ...message.Message) {
	c, _ := ctx.Value(callKey{}).(*call)
	if c == nil {
		panic("saga.Emit outside of a step or hook")
	}
	c.emit(ctx, events)
}

type callKey struct{}

// call is one saga's turn in a step.
type call struct {
	ctx  context.Context // of this saga's span, not of the batch
	info Info
	in   any
	done []byte // in a compensation: what the action returned; nil: not known

	timeout time.Duration // 0: none of its own
	earlier *results

	prepared []byte // what its Prepare returned; nil: it has none

	result []byte
	err    error
	events []message.Message
}

func withCall(ctx context.Context, c *call) context.Context {
	return context.WithValue(ctx, callKey{}, c)
}

func (c *call) emit(ctx context.Context, events []message.Message) {
	for _, m := range events {
		m.Headers = maps.Clone(m.Headers) // the caller's are not ours to write to
		tracing.Carry(ctx, &m)
		c.events = append(c.events, m)
	}
}

// fail makes the call one that did nothing.
func (c *call) fail(err error) { c.result, c.events, c.err = nil, nil, err }

// function runs calls of one step in one direction. Each has its result or its error then,
// unless the transaction has ended.
type function func(ctx context.Context, tx *sqltx.Tx, calls []*call)

// each makes a function of one that handles one call: what it wrote is undone if it fails.
func each(one func(ctx context.Context, tx *sqltx.Tx, c *call) error) function {
	return func(_ context.Context, tx *sqltx.Tx, calls []*call) {
		for _, c := range calls {
			err := apart(c.ctx, tx, func() error {
				return limited(c.ctx, []*call{c}, func(ctx context.Context) error { return one(ctx, tx, c) })
			})
			if err != nil {
				c.fail(err)
			}
			if tx.Err() != nil {
				return
			}
		}
	}
}

// together makes a function of one that handles many calls. If that fails, they are run one by
// one, so that the one which is to blame is the only one that fails.
func together(many func(ctx context.Context, tx *sqltx.Tx, calls []*call) error) function {
	var run function
	run = func(ctx context.Context, tx *sqltx.Tx, calls []*call) {
		err := apart(ctx, tx, func() error {
			err := limited(ctx, calls, func(ctx context.Context) error { return many(ctx, tx, calls) })
			if err == nil && len(calls) == 1 {
				err = calls[0].err // alone, also what was written for it can be undone
			}
			return err
		})
		for _, c := range calls {
			if err != nil {
				c.fail(nil)
			} else if c.err != nil {
				c.fail(c.err)
			}
		}
		switch {
		case err == nil, tx.Err() != nil:
		case len(calls) == 1:
			calls[0].fail(err)
		default:
			for i, c := range calls {
				if run(c.ctx, tx, calls[i:i+1]); tx.Err() != nil {
					return
				}
			}
		}
	}
	return run
}

// limited calls f; its context, and those of the calls, end when the step's time is over. What takes
// longer has failed, also if it does not say so.
func limited(ctx context.Context, calls []*call, f func(ctx context.Context) error) error {
	d := calls[0].timeout
	if d == 0 {
		return f(ctx)
	}
	deadline := time.Now().Add(d)
	for _, c := range calls {
		whole := c.ctx
		var cancel context.CancelFunc
		c.ctx, cancel = context.WithDeadline(whole, deadline)
		defer func() { cancel(); c.ctx = whole }()
	}
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	err := f(ctx)
	if time.Now().Before(deadline) || IsPermanent(err) {
		return err
	}
	return fmt.Errorf("not done within %s: %w", d, cmp.Or(err, context.DeadlineExceeded))
}

// apart runs f; if it fails, its own writes are undone and no others.
func apart(ctx context.Context, tx *sqltx.Tx, f func() error) error {
	sp := tx.Savepoint()
	err := f()
	if err == nil {
		sp.Release()
		return nil
	}
	if tx.Err() == nil {
		if rerr := sp.Rollback(ctx); rerr != nil {
			tx.Fail(rerr) // or half of f would be committed
		}
	}
	return err
}
