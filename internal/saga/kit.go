package saga

import (
	"context"
	"slices"

	"backstep/internal/sqltx"
)

// What package sagatest, with which definitions are tested, needs from inside.

// StepOutline is what a definition says about one of its steps.
type StepOutline struct {
	Name, Queue string
	Remote      bool // its queue is another service's
	Calls       bool // it calls a system that is not ours, in either direction
	Undoable    bool // it has a compensation
	Pivot       bool
	PastPivot   bool // there is no way back from it, and it is tried without limit
	Attempts    int  // in all, of the action
	Undos       int  // likewise of the compensation
}

// Outline returns the steps in order.
func (d *Definition) Outline() []StepOutline {
	out := make([]StepOutline, len(d.steps))
	for i, s := range d.steps {
		out[i] = StepOutline{
			Name: s.name, Queue: s.queue, Remote: s.remote, Undoable: s.undoable(),
			Calls: s.prepare != nil || s.prepareUndo != nil,
			Pivot: s.pivot, PastPivot: i > d.pivot, Attempts: s.attempts(Execute), Undos: s.attempts(Compensate),
		}
	}
	return out
}

// Altered returns a copy of d for tests. When a function of a local step has succeeded, function is
// asked, and when a Prepare or PrepareCompensation has, call is. If that returns an error they have
// failed with it: what a function wrote in its transaction is undone, what was called has been, and
// the error means what it would mean if they had returned it.
func (d *Definition) Altered(function, call func(Info) error) *Definition {
	c := *d
	c.steps = make([]*step, len(d.steps))
	for i, s := range d.steps {
		copied := *s
		copied.action, copied.compensate = altered(s.action, function), altered(s.compensate, function)
		copied.prepare, copied.prepareUndo = s.prepare.altered(call), s.prepareUndo.altered(call)
		c.steps[i] = &copied
	}
	return &c
}

func (e *external) altered(alter func(Info) error) *external {
	if e == nil {
		return nil
	}
	c := *e
	c.call = func(ctx context.Context, info Info, in any, done []byte) ([]byte, error) {
		outcome, err := e.call(ctx, info, in, done)
		if err == nil {
			err = alter(info)
		}
		return outcome, err
	}
	return &c
}

func altered(run function, alter func(Info) error) function {
	if run == nil {
		return nil
	}
	return func(ctx context.Context, tx *sqltx.Tx, calls []*call) {
		for one := range slices.Chunk(calls, 1) { // each is undone alone
			c := one[0]
			// The error is the call's already, and the transaction's if that has ended.
			_ = apart(ctx, tx, func() error {
				if run(ctx, tx, one); c.err == nil && tx.Err() == nil {
					if err := alter(c.info); err != nil {
						c.fail(err)
					}
				}
				return c.err
			})
			if tx.Err() != nil {
				return
			}
		}
	}
}

// Expire moves those of the instances on whose deadline has passed, by the clock of deadlines. In
// a worker a Keeper does that, when the time has been fair.
func (e *Engine) Expire(ctx context.Context, tx *sqltx.Tx, ids []string) error {
	return e.deadlinePassed(ctx, tx, ids)
}
