package saga

import (
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
)

// fails delivers a message as a lane does whose transaction fails, and returns what becomes of it then.
func (w *world) fails(m message.Message, before time.Duration) message.Outcome {
	w.t.Helper()
	_, err := w.try(m)
	if err == nil {
		w.t.Fatal("the transaction does not fail")
	}
	m.Failure = err.Error()
	if before > 0 {
		m.Headers[message.HeaderUnhandledFor] = before.String()
	}
	out := one(w.t, "outcomes", w.deliver(m))
	if out.Kind == message.Parked {
		w.park(m, out.Reason)
	}
	return out
}

// unhandled is one case of a reply whose handling fails in the hook that it leads to.
type unhandled struct {
	options []StepOption
	reply   string
	hook    string
	given   func(w *world, s *script, hotel message.Message) message.Message // before the reply; nil: nothing
	step    string                                                           // as it is kept
	end     Status                                                           // once the hook does not fail
}

var allUnhandled = map[string]unhandled{
	"completed":         {nil, `{"status":"completed","result":{"Ref":"H1"}}`, "completed", nil, "hotel COMPLETED", Completed},
	"completed, tried":  {[]StepOption{Retry(3, 1)}, `{"status":"completed","result":{"Ref":"H1"}}`, "completed", nil, "hotel COMPLETED", Completed},
	"completed pivot":   {[]StepOption{Pivot()}, `{"status":"completed","result":{"Ref":"H1"}}`, "completed", nil, "hotel COMPLETED", Completed},
	"the way is closed": {[]StepOption{Pivot(), NothingToUndo()}, `{"status":"completed","result":{"Ref":"H1"}}`, "completed", nil, "hotel COMPLETED", Completed},
	"refused":           {nil, `{"status":"refused","error":"full"}`, "compensated", nil, "hotel FAILED", Compensated},
	"compensated": {nil, `{"status":"completed"}`, "compensated", func(w *world, _ *script, hotel message.Message) message.Message {
		w.op(hotel.Headers.String(message.HeaderSagaID), Operation{Verb: VerbCancel})
		return w.command()
	}, "hotel COMPENSATED", Compensated},
}

// op is an operator's doing.
func (w *world) op(id string, op Operation) {
	w.t.Helper()
	(&operator{world: w}).does(id, op)
}

func (u unhandled) begin(t *testing.T) (w *world, s *script, id string, r message.Message) {
	t.Helper()
	s = &script{}
	w = newWorld(t, Define("trip", 1, append(s.hooks(), RemoteStep[trip, booking]("hotel", "hotel", u.options...), Within[trip](time.Hour))...))
	id = w.start("x")
	m := w.command()
	if u.given != nil {
		m = u.given(w, s, m)
	}
	return w, s, id, answer(m, u.reply)
}

// scene is a case that has come to its reply.
type scene struct {
	unhandled
	*operator
	id string
	r  message.Message
}

// eachUnhandled tests each case, from its reply on.
func eachUnhandled(t *testing.T, test func(t *testing.T, x scene)) {
	t.Parallel()
	for name, tt := range allUnhandled {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s, id, r := tt.begin(t)
			test(t, scene{tt, &operator{w, s}, id, r})
		})
	}
}

// A reply whose handling fails here comes back: what the participant said stands. That it has gone round
// for long before, since no worker knew its saga, does not count.
func TestReplyThatIsHandledLater(t *testing.T) {
	eachUnhandled(t, func(t *testing.T, x scene) {
		x.s.fail(x.hook, errPassing)
		before := x.get(x.id)
		x.r.Headers[message.HeaderDeferredFor] = "14m55s"
		out := x.fails(x.r, handleFor-deferFor)
		if out.Kind != message.Deferred || out.Counter != message.HeaderUnhandledFor || !strings.Contains(out.Reason, errPassing.Error()) {
			t.Errorf("the reply is %s: %s", out.Kind, out.Reason)
		}
		d := x.get(x.id)
		equal(t, "status, attempt, awaited", []any{d.Status, d.Attempt, d.CommandID}, []any{before.Status, before.Attempt, before.CommandID})
		equal(t, "kept", d.steps(), []string{x.step})
		x.done(x.r)
		d = x.get(x.id)
		equal(t, "in the end", []any{d.Status, d.steps()}, []any{x.end, []string{x.step}})
		equal(t, "commands", len(x.commands()), 0)
	})
}

// One that cannot be handled for good leaves the saga to an operator, and moves it on once it can.
func TestReplyThatCannotBeHandled(t *testing.T) {
	eachUnhandled(t, func(t *testing.T, x scene) {
		x.s.fail(x.hook, errPassing, errPassing)
		out := x.fails(x.r, handleFor)
		equal(t, "the reply", out.Kind, message.Parked)
		d := x.get(x.id)
		equal(t, "status, steps", []any{d.Status, d.steps()}, []any{ManualAction, []string{x.step}})
		if !strings.Contains(d.LastError, errPassing.Error()) {
			t.Errorf("it is not said why: %s", d.LastError)
		}
		if len(d.Steps[0].Result) > 0 != strings.Contains(x.reply, "result") {
			t.Errorf("result %s of %s", d.Steps[0].Result, x.reply)
		}
		x.pass(x.id, 2*time.Hour)
		equal(t, "after its time", x.get(x.id).Status, ManualAction)
		equal(t, "commands", len(x.commands()), 0)
		x.s.fail(x.hook)
		delete(x.r.Headers, message.HeaderUnhandledFor)
		x.done(x.r)
		equal(t, "in the end", x.get(x.id).Status, x.end)
	})
}

// The lane may park it without asking, if its handler does not return.
func TestReplyThatIsParkedUnhandled(t *testing.T) {
	eachUnhandled(t, func(t *testing.T, x scene) {
		x.park(x.r, "its sender's fault")
		equal(t, "status", x.get(x.id).Status != ManualAction, true)
		x.r.Failure = "handler does not heed its context"
		x.park(x.r, x.r.Failure)
		d := x.get(x.id)
		equal(t, "status, steps", []any{d.Status, d.steps()}, []any{ManualAction, []string{x.step}})
		if !strings.Contains(d.LastError, x.r.Failure) {
			t.Errorf("it is not said why: %s", d.LastError)
		}
	})
}

// No deadline undoes what is known to be done, nor repeats what is known to be refused.
func TestDeadlineOfWhatIsKept(t *testing.T) {
	eachUnhandled(t, func(t *testing.T, x scene) {
		x.s.fail(x.hook, errPassing)
		x.fails(x.r, 0)
		x.pass(x.id, 2*time.Hour)
		d := x.get(x.id)
		equal(t, "status, steps", []any{d.Status, d.steps()}, []any{ManualAction, []string{x.step}})
		equal(t, "commands", len(x.commands()), 0)
		x.done(x.r)
		equal(t, "in the end", x.get(x.id).Status, x.end)
	})
}

// A pivot that is known to be done is not crossed backwards, whoever wants it, nor is that offered.
func TestCancelOfWhatIsKept(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"completed pivot", "the way is closed"} {
		w, s, id, r := allUnhandled[name].begin(t)
		s.fail("completed", errPassing)
		w.fails(r, 0)
		equal(t, "can", w.can(id), []Verb{VerbRetry})
		for _, verb := range []Verb{VerbCancel, VerbCompensate} {
			if eff, err := (&operator{world: w}).operate(id, Operation{Verb: verb}); err == nil || !strings.Contains(err.Error(), "its pivot, step hotel, has happened") {
				t.Errorf("%s: %+v, %v", verb, eff, err)
			}
		}
		equal(t, "cancelling", one(t, "outcomes", w.deliver(cancelling(id, `{}`))).Kind, message.Stale)
		w.done(r)
		equal(t, "in the end", w.get(id).Status, Completed)
	}
}

// An operator's retry goes on with what a participant is known to have done. It is not asked again, which
// would make it unknown, nor can that be left out.
func TestRetryOfWhatIsKept(t *testing.T) {
	for name, deferredFor := range map[string]time.Duration{"handed back": 0, "parked": handleFor} {
		t.Run(name, func(t *testing.T) {
			eachUnhandled(t, func(t *testing.T, x scene) {
				if x.step == "hotel FAILED" {
					return // see TestCancelOfWhatWasRefused
				}
				x.s.fail(x.hook, errPassing, errPassing, errPassing)
				x.fails(x.r, deferredFor)
				x.exec(publishSQL)
				d := x.get(x.id)
				skip := Operation{Verb: VerbSkip, Step: "hotel", Direction: d.Direction}
				if _, err := x.operate(x.id, skip); !wasRefused(err) || !strings.Contains(err.Error(), "is known to be done") {
					t.Errorf("skip: %v", err)
				}
				if _, err := x.operate(x.id, Operation{Verb: VerbRetry}); err == nil {
					t.Error("a retry succeeds whose hook fails")
				}
				equal(t, "the saga after it", x.get(x.id), d)
				x.s.fail(x.hook)
				x.does(x.id, Operation{Verb: VerbRetry})
				d = x.get(x.id)
				equal(t, "status, steps", []any{d.Status, d.steps()}, []any{x.end, []string{x.step}})
				equal(t, "commands", len(x.commands()), 0)
				equal(t, "the reply", one(t, "outcomes", x.deliver(x.r)).Kind, message.Stale)
			})
		})
	}
}

// What the participant has refused has not happened: it is not undone, and a pivot can be cancelled.
func TestCancelOfWhatWasRefused(t *testing.T) {
	t.Parallel()
	for name, options := range map[string][]StepOption{"a step": nil, "a pivot": {Pivot(), NothingToUndo()}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tt := allUnhandled["refused"]
			tt.options = options
			w, s, id, r := tt.begin(t)
			s.fail("compensated", errPassing)
			w.fails(r, handleFor)
			s.fail("compensated")
			(&operator{w, s}).does(id, Operation{Verb: VerbCancel})
			equal(t, "status", w.get(id).Status, Compensated)
			equal(t, "commands", len(w.commands()), 0)
		})
	}
}

// The same retry again, after ErrOutcomeUnknown say, changes nothing, and is no error.
func TestRetryOfWhatIsKeptAgain(t *testing.T) {
	t.Parallel()
	for name, tt := range allUnhandled {
		if tt.step == "hotel FAILED" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s, id, r := tt.begin(t)
			s.fail(tt.hook, errPassing)
			w.fails(r, 0)
			o := &operator{w, s}
			o.does(id, Operation{Verb: VerbRetry})
			o.already(id, Operation{Verb: VerbRetry})
		})
	}
}

// A retry that goes on, repeated, when the next step is a participant's too.
func TestRetryOfWhatIsKeptAmid(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, Define("trip", 1, append(s.hooks(), RemoteStep[trip, booking]("hotel", "hotel"), RemoteStep[trip, booking]("car", "car"))...))
	id := w.start("x")
	r := answer(w.command(), `{"status":"completed","result":{"Ref":"H1"}}`)
	r.Failure = "broken"
	w.deliver(r)
	w.exec(publishSQL)
	o := &operator{w, s}
	o.does(id, Operation{Verb: VerbRetry})
	m := w.command()
	equal(t, "type", m.Type, "trip.car")
	o.already(id, Operation{Verb: VerbRetry})
	w.exec(publishSQL)
	o.already(id, Operation{Verb: VerbRetry})
	w.done(answer(m, `{"status":"refused","error":"no"}`))
	m = w.command()
	equal(t, "body", string(m.Body), `{"input":{"Name":"x","Keys":null},"result":{"Ref":"H1"}}`)
	// and its compensation cannot be handled either
	r = answer(m, `{"status":"completed"}`)
	r.Failure = "broken"
	equal(t, "kind", w.deliver(r)[0].Kind, message.Deferred)
	w.exec(publishSQL)
	o.does(id, Operation{Verb: VerbRetry})
	equal(t, "status", w.get(id).Status, Compensated)
	equal(t, "commands", len(w.commands()), 0)
}
