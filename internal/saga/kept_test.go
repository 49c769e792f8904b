package saga

import (
	"errors"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
)

// cannotHandle delivers a reply whose handling has failed before: what it says is kept, and it comes back.
func (w *world) cannotHandle(r message.Message) {
	w.t.Helper()
	r.Failure = "boom"
	equal(w.t, "a reply that cannot be handled", one(w.t, "outcomes", w.deliver(r)).Kind, message.Deferred)
}

// A refusal that is kept says only of a first attempt that nothing has happened: the command of an
// earlier one may come yet.
func TestCancelOfALaterAttemptThatWasRefused(t *testing.T) {
	t.Parallel()
	for _, attempt := range []int{1, 2} {
		s := &script{}
		w := newWorld(t, remoteTrip(s, Retry(3, 1)))
		id := w.start("x")
		w.done(w.command())
		m, next := w.command(), "flight compensate"
		if attempt == 2 {
			w.pass(id, time.Hour)
			m, next = w.scheduled(), "hotel compensate"
		}
		w.cannotHandle(answer(m, noCar))
		w.done(cancelling(id, `{}`))
		undo := w.command()
		equal(t, "next", undo.RoutingKey+" "+undo.Headers.String(message.HeaderDirection), next)
	}
}

// Of a compensation that was refused nothing is kept: it is to be done all the same.
func TestRefusedCompensationIsNotKept(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, remoteTrip(s))
	s.fail("car", Fail("no car"))
	id := w.start("x")
	w.done(w.command())
	w.done(answer(w.command(), rented))
	w.done(w.command())
	undo := w.command()
	before := w.get(id).Steps
	w.cannotHandle(answer(undo, noCar))
	equal(t, "steps", w.get(id).Steps, before)
}

// What a participant said counts no more once the saga has stopped because of it: whether its pivot has
// happened nobody knows, so nobody can undo it.
func TestCancelOfAPivotOfWhichNobodyKnows(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := &operator{newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"),
		RemoteStep[trip, booking]("car", "cars", Pivot(), NothingToUndo(), Deadline(time.Minute)))...)), s}
	id, _ := o.atCar()
	o.pass(id, 2*time.Minute)
	before := o.get(id)
	equal(t, "status, command", []any{before.Status, before.CommandID}, []any{ManualAction, ""})
	for _, verb := range []Verb{VerbCancel, VerbCompensate} {
		_, err := o.operate(id, Operation{Verb: verb})
		if refused, ok := errors.AsType[*RefusedError](err); !ok || !strings.Contains(refused.Why, "nobody knows whether step car, its pivot, has happened") {
			t.Errorf("%s: %v", verb, err)
		}
	}
	equal(t, "the saga", o.get(id), before)
}

// What is to be undone may have been done by the same batch: the participant hears what it returned.
func TestCancelInOneBatchWithAReply(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, remoteTrip(s))
	id := w.start("x")
	w.done(w.command())
	w.done(answer(w.command(), `{"status":"completed","result":{"Ref":"H1"}}`), cancelling(id, `{}`))
	undo := w.command()
	equal(t, "next", undo.RoutingKey+" "+undo.Headers.String(message.HeaderDirection), "hotel compensate")
	equal(t, "body", string(undo.Body), `{"input":{"Name":"x","Keys":null},"result":{"Ref":"H1"}}`)
}

// What is on its way to a participant is not sent once more by a retry, as what it may have lost is.
func TestRetryOfWhatIsOnItsWayToAParticipant(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := &operator{newWorld(t, rooms(s)), s}
	id := o.start("x")
	o.done(o.command())
	o.command()
	for _, status := range []string{"PENDING", "PARKED"} {
		o.exec(`UPDATE outbox_events SET status = ?`, status)
		o.already(id, Operation{Verb: VerbRetry})
		equal(t, status+": commands", len(o.commands()), 0)
	}
}

// The next attempt of a remote step has all of its time, from when it goes out.
func TestDeadlineOfTheNextAttempt(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, rooms(s, Retry(3, time.Hour), RetryCap(time.Hour)))
	id, _ := w.awaitsHotel()
	w.pass(id, 20*time.Minute)
	for column, want := range map[string]int{"deadline_at": 600, "again_at": 300} {
		n := w.number(`
SELECT TIMESTAMPDIFF(SECOND, m.due_at, i.` + column + ` + INTERVAL (SELECT downtime_us FROM saga_pulse) MICROSECOND)
  FROM saga_instances i JOIN scheduled_messages m ON m.message_id = i.command_id`)
		if n < want-5 || n > want+5 {
			t.Errorf("its %s is %d s after it goes out, want %d", column, n, want)
		}
	}
}

// A participant may say no and not why.
func TestRefusalWithoutAWord(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, remoteTrip(s))
	id := w.start("x")
	w.done(w.command())
	w.done(answer(w.command(), `{"status":"refused"}`))
	equal(t, "reason", w.get(id).LastError, "hotel: refused, and the reply does not say why")
}

// What is kept of a reply is known without the saga's lock, whichever attempt it was to, and a retry that goes on with it
// is offered though an operator's retry has made the command that is awaited.
func TestKeptIsKnown(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, Define("trip", 1, append(s.hooks(), RemoteStep[trip, booking]("hotel", "hotel", Retry(2, 1)))...))
	id := w.start("x")
	first := w.command()
	equal(t, "nothing is known", w.engine.Kept(w.get(id)), StepStatus(""))
	w.exec(publishSQL)
	o := &operator{w, s}
	o.does(id, Operation{Verb: VerbRetry})
	w.exec(publishSQL)
	equal(t, "a retry while it is asked", w.offers(id, Operation{Verb: VerbRetry}), false)
	w.cannotHandle(answer(first, `{"status":"completed","result":{"Ref":"H1"}}`))
	equal(t, "kept", w.engine.Kept(w.get(id)), StepCompleted)
	equal(t, "a retry is offered", w.offers(id, Operation{Verb: VerbRetry}), true)
	o.does(id, Operation{Verb: VerbRetry})
	d := w.get(id)
	equal(t, "in the end", []any{d.Status, w.engine.Kept(d)}, []any{Completed, StepStatus("")})
	d.Version = 7
	equal(t, "of a definition that is not known", w.engine.Kept(d), StepStatus(""))
}
