package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	"backstep/internal/message"
	"backstep/internal/tracing"
)

// external is a function of a step that calls a system that is not ours.
type external struct {
	input  reflect.Type
	result reflect.Type // of the action; nil: it does not take it
	call   func(ctx context.Context, info Info, in any, done []byte) (outcome []byte, err error)
}

// Prepare has call made before the step's action runs, in no transaction: that is where a system
// that is not ours may be called. What call returns is kept, and the action reads it with Prepared.
// info.IdempotencyKey() is the same whenever this call is made, and it may be made more than once:
// the system has to take all of them for one. If info.Called is set, ask it first what it has.
//
// An error that Fail made says that the system said no, so there is nothing to undo. After any other
// nobody knows: the call is made again, as often as Retry says, and then the step is undone as if it
// had happened, its compensation with Info.Unknown.
func Prepare[In, Out any](call func(ctx context.Context, info Info, in In) (Out, error)) StepOption {
	if call == nil || !encodes[Out]() {
		panic(fmt.Sprintf("saga.Prepare needs a function with an outcome that JSON can say, not a %s", reflect.TypeFor[Out]()))
	}
	return func(s *step) {
		s.prepare = &external{input: reflect.TypeFor[In](), call: func(ctx context.Context, info Info, in any, _ []byte) ([]byte, error) {
			return encoded(call(ctx, info, as[In](in)))
		}}
	}
}

// PrepareCompensation is Prepare for the compensation. done is what the action returned, nothing if
// info.Unknown is set: then the system has to see to it that the action's call has no effect any
// more, also if it comes only now. An error that Fail made leads to MANUAL_ACTION.
func PrepareCompensation[In, Result, Out any](call func(ctx context.Context, info Info, in In, done Result) (Out, error)) StepOption {
	if call == nil || !encodes[Out]() {
		panic(fmt.Sprintf("saga.PrepareCompensation needs a function with an outcome that JSON can say, not a %s", reflect.TypeFor[Out]()))
	}
	return func(s *step) {
		s.prepareUndo = &external{input: reflect.TypeFor[In](), result: reflect.TypeFor[Result](), call: func(ctx context.Context, info Info, in any, b []byte) ([]byte, error) {
			var done Result
			if b != nil {
				if err := json.Unmarshal(b, &done); err != nil {
					return nil, fmt.Errorf("result of step %s: %w", info.Step, err)
				}
			}
			return encoded(call(ctx, info, as[In](in), done))
		}}
	}
}

func encoded(out any, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	return message.EncodeJSON(out)
}

// Prepared returns what the Prepare, or PrepareCompensation, of the step that ctx belongs to
// returned. It panics if the step has none.
func Prepared[Out any](ctx context.Context) (out Out, err error) {
	c, _ := ctx.Value(callKey{}).(*call)
	if c == nil || c.prepared == nil {
		panic("saga.Prepared outside of a step that has a Prepare in this direction")
	}
	if err = json.Unmarshal(c.prepared, &out); err != nil {
		err = fmt.Errorf("outcome of the call of step %s: %w", c.info.Step, err)
	}
	return out, err
}

// external returns the call that a step makes in a direction, nil if it makes none.
func (s *step) external(d Direction) *external {
	if d == Compensate {
		return s.prepareUndo
	}
	return s.prepare
}

// checkExternal refuses what is a programmer's mistake.
func (s *step) checkExternal(in, result reflect.Type) {
	for _, e := range []*external{s.prepare, s.prepareUndo} {
		switch {
		case e == nil:
		case s.remote:
			s.mistake("Prepare is for what runs here; this one is remote")
		case e.input != in:
			s.mistake("Prepare takes a %s, the step a %s", e.input, in)
		case e.result != nil && e.result != result:
			s.mistake("PrepareCompensation takes a %s, the step's result is a %s", e.result, result)
		}
	}
	if s.prepareUndo != nil && s.compensate == nil {
		s.mistake("PrepareCompensation needs a compensation")
	}
}

// elsewhere is the error of a step that this worker is not set up to run.
type elsewhere struct{ reason string }

func (e *elsewhere) Error() string { return e.reason }

// Elsewhere returns the error with which a step says that this worker is not set up to run it, and
// another may be. The command comes back later, and no attempt is spent; a command that has been
// deferred for 15 min is parked.
func Elsewhere(format string, args ...any) error { return &elsewhere{fmt.Sprintf(format, args...)} }

// callOutcome is what became of a call. The message comes back with it.
type callOutcome struct {
	outcome []byte
	err     error // permanent: the system said no; any other: nobody knows
}

// errUnasked is the answer to a call that nobody wants any more: the saga is to be undone.
var errUnasked = errors.New("its call is not made any more")

// begin sees to the calls that commands need before they can be run. It returns those that can be
// run now; for the others it commits that the call is going to be made, and has the lane make it.
func (b *batch) begin(ctx context.Context, todo []*command) (ready []*command, err error) {
	if err := b.loadCalls(ctx, todo); err != nil {
		return nil, err
	}
	for _, c := range todo {
		in := c.in
		e := in.step().external(in.direction)
		a, answered := c.Answer.(*callOutcome)
		switch {
		case c.reply != nil:
		case e == nil && in.callOpen:
			*c.out = deferred("step %s of saga %s has called a system that this worker is not set up to call", in.step().name, in.id)
			continue
		case e == nil:
		case answered:
			b.note(c, a)
		case c.answer != nil, c.Failure != "":
		case in.cancelReason != "" && in.direction == Execute:
			c.answer = &callOutcome{err: errUnasked} // a call made now could be the first that arrives
		default:
			if err := b.callOut(tracing.Extract(ctx, c.Headers), c, e); err != nil {
				return nil, err
			}
			continue
		}
		ready = append(ready, c)
	}
	return ready, nil
}

func deferred(format string, args ...any) message.Outcome {
	return message.Outcome{Kind: message.Deferred, After: deferFor, Reason: fmt.Sprintf(format, args...)}
}

// callOut commits the intent of c's call, and has the lane make it.
func (b *batch) callOut(ctx context.Context, c *command, e *external) error {
	in, s := c.in, c.in.step()
	if in.status == ManualAction {
		if err := b.resume(ctx, in); err != nil {
			return err
		}
	}
	ev := EvCallBegun
	if in.direction == Compensate {
		ev = EvCompensationBegun
	}
	info := c.info()
	in.callOpen, in.wide = true, true
	if err := b.move(ctx, in, ev, change{}); err != nil {
		return err
	}
	b.calls = append(b.calls, callRow{in: in, step: in.current, direction: in.direction, status: callOpen, calls: 1})
	headers, input, done := c.Headers, in.input, c.done // the rest is the transaction's
	*c.out = message.Outcome{Kind: message.Outside, Limit: s.timeout, Call: func(ctx context.Context) any {
		ctx, span := tracing.Call(tracing.Extract(ctx, headers), info.SagaID, info.Step, string(info.Direction), info.Attempt)
		var a callOutcome
		a.outcome, a.err = e.call(ctx, info, input, done)
		tracing.End(span, a.err)
		return &a
	}}
	return nil
}

// info is what the functions of a command's step are told.
func (c *command) info() Info {
	return Info{
		SagaID: c.in.id, Step: c.in.step().name, Direction: c.in.direction, Attempt: c.in.attempt,
		Unknown: c.in.direction == Compensate && c.done == nil,
		Called:  c.in.callOpen,
	}
}

// note writes down what became of a call.
func (b *batch) note(c *command, a *callOutcome) {
	in := c.in
	row := callRow{in: in, step: in.current, direction: in.direction, status: callDone, outcome: a.outcome}
	switch {
	case a.err == nil:
	case IsPermanent(a.err):
		row.status, row.err = callRefused, clip(a.err.Error())
		in.callOpen, in.wide = false, true // it is known not to have happened
	default:
		row.status, row.err = callOpen, clip(a.err.Error())
	}
	b.calls = append(b.calls, row)
	c.answer = a
}

// unknowable reports whether a saga is to be undone although nobody knows what became of the call of
// its step.
func (in *instance) unknowable() bool {
	return in.callOpen && in.direction == Execute && in.cancelReason != ""
}
