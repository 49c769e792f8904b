package saga

import (
	"testing"
	"time"

	"backstep/internal/message"
)

// keptDone brings a saga to where its participant is known to have done the step by its first attempt, while
// the second is on its way too, and that reply could not be handled. It returns the reply, and the second command.
func keptDone(t *testing.T, options ...StepOption) (w *world, s *script, id string, kept, second message.Message) {
	t.Helper()
	s = &script{}
	w = newWorld(t, Define("trip", 1, append(s.hooks(), RemoteStep[trip, booking]("hotel", "hotel", append([]StepOption{Retry(2, 1)}, options...)...))...))
	id = w.start("x")
	first := w.command()
	w.pass(id, 16*time.Minute) // no reply to the first
	second = w.scheduled()
	kept = answer(first, `{"status":"completed","result":{"Ref":"H1"}}`)
	s.fail("completed", errPassing)
	equal(t, "the reply", w.fails(kept, 0).Kind, message.Deferred)
	d := w.get(id)
	equal(t, "kept", d.steps(), []string{"hotel COMPLETED"})
	return w, s, id, kept, second
}

// What is known to be done stays so, whatever another attempt's reply says of that one: it crossed the first.
func TestKeptIsNotOverridden(t *testing.T) {
	t.Parallel()
	for name, options := range map[string][]StepOption{
		"a step": nil, "with attempts left": {Retry(5, 1)}, "a pivot": {Pivot()}, "the way is closed": {Pivot(), NothingToUndo()},
	} {
		for _, body := range []string{`{"status":"failed","error":"deadlock"}`, `{"status":"refused","error":"full"}`} {
			for _, parked := range []bool{false, true} {
				t.Run(name+" "+body, func(t *testing.T) {
					t.Parallel()
					w, s, id, kept, second := keptDone(t, options...)
					status := Running
					if parked {
						s.fail("completed", errPassing)
						equal(t, "the reply", w.fails(kept, handleFor).Kind, message.Parked)
						status = ManualAction
					}
					equal(t, "the other", one(t, "outcomes", w.deliver(answer(second, body))).Kind, message.Stale)
					d := w.get(id)
					equal(t, "after it", []any{d.Status, d.steps()}, []any{status, []string{"hotel COMPLETED"}})
					delete(kept.Headers, message.HeaderUnhandledFor)
					w.done(kept)
					equal(t, "in the end", w.get(id).Status, Completed)
				})
			}
		}
	}
}

// A saga that is to be undone makes no call again, also if it could not be undone at once.
func TestCancelledSagaMakesNoCallAgain(t *testing.T) {
	t.Parallel()
	s, d := &script{}, &desk{}
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("pay", d.options()...))...))
	id := w.start("x")
	m := w.command()
	call := w.leave(m)
	w.op(id, Operation{Verb: VerbCancel})
	d.fail(Execute, Fail("declined"))
	s.fail("compensated", errPassing)
	m.Answer = call(t.Context())
	w.fails(m, 0)
	equal(t, "status", w.get(id).Status, Running)
	w.done(w.scheduled())
	equal(t, "in the end", w.get(id).Status, Compensated)
	equal(t, "calls", len(d.calls), 1)
}
