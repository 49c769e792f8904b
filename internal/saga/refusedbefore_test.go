package saga

import (
	"fmt"
	"testing"
	"time"

	"backstep/internal/message"
)

// What a participant refused before an operator had it asked again does not end that attempt: it is
// what the operator wants to be asked once more. That it was done, whenever, still counts.
func TestRefusalFromBeforeARetry(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Pivot()),
		RemoteStep[trip, booking]("car", "cars", NothingToUndo(), Deadline(time.Minute)))...))
	o := &operator{w, s}
	for _, ends := range []string{"the retry", "the first"} {
		id, first := w.atCar()
		w.pass(id, 2*time.Minute)
		second := w.scheduled()
		w.done(answer(second, noCar))
		equal(t, "status", w.get(id).Status, ManualAction)
		o.does(id, Operation{Verb: VerbRetry})
		third := w.command()
		w.tooLate(id, answer(first, noCar), "attempt 1: refused no car")
		w.tooLate(id, answer(second, noCar), "attempt 2: refused no car")
		if ends == "the first" {
			w.done(answer(first, rented))
		} else {
			w.done(answer(third, rented))
		}
		equal(t, ends+": status", w.get(id).Status, Completed)
	}

	// Its own refusal counts, and that of an attempt which nobody but the engine made.
	id, first := w.atCar()
	w.pass(id, 2*time.Minute)
	w.scheduled()
	w.done(answer(first, noCar))
	equal(t, "refused by the first", w.get(id).Status, ManualAction)
	o.does(id, Operation{Verb: VerbRetry})
	w.done(answer(w.command(), noCar))
	equal(t, "refused again", w.get(id).Status, ManualAction)
}

// What counts is a retry of this step, in this direction, after the attempt that was refused: nothing
// else that was done to the saga takes the participant's no back.
func TestRefusalFromBeforeSomethingElse(t *testing.T) {
	t.Parallel()
	for name, secondIsOut := range map[string]func(t *testing.T, o *operator) (id string, refused message.Message){
		"a late reply": func(_ *testing.T, o *operator) (string, message.Message) {
			id, first := o.atCar()
			o.pass(id, 2*time.Minute)
			o.scheduled()
			o.tooLate(id, answer(first, flat), "attempt 1: failed flat tyre")
			return id, first
		},
		"the retry that made it": func(_ *testing.T, o *operator) (string, message.Message) {
			id, _ := o.atCar()
			o.exec(publishSQL)
			o.does(id, Operation{Verb: VerbRetry})
			second := o.command()
			equal(t, "attempt", second.Attempt(), 2)
			o.pass(id, 2*time.Minute)
			o.scheduled()
			return id, second
		},
		"a retry of the step before": func(_ *testing.T, o *operator) (string, message.Message) {
			o.s.fail("a", errPassing)
			id := o.start("x")
			o.done(o.command())
			o.does(id, Operation{Verb: VerbRetry}) // the second attempt waits no longer
			o.done(o.scheduled())
			first := o.command()
			o.pass(id, 2*time.Minute)
			o.scheduled()
			return id, first
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &script{}
			o := &operator{newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Pivot(), Retry(3, time.Hour), RetryCap(time.Hour)),
				RemoteStep[trip, booking]("car", "cars", NothingToUndo(), Deadline(time.Minute)))...)), s}
			id, m := secondIsOut(t, o)
			equal(t, "status", o.get(id).Status, Running)
			o.done(answer(m, noCar))
			equal(t, "refused", o.get(id).Status, ManualAction)
		})
	}
}

// Nor does a retry of its action say anything of a compensation.
func TestRefusalOfACompensationWhoseActionWasRetried(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := &operator{newWorld(t, rooms(s, Retry(3, 1))), s}
	s.fail("car", Fail("no car"))
	id, _ := o.awaitsHotel()
	o.does(id, Operation{Verb: VerbRetry})
	o.done(answer(o.command(), `{"status":"completed","result":{"Ref":"H1"}}`))
	o.done(o.command())
	undo := o.command()
	equal(t, "direction, attempt", []any{undo.Headers.String(message.HeaderDirection), undo.Attempt()}, []any{"compensate", 1})
	o.pass(id, time.Hour)
	o.scheduled()
	o.done(answer(undo, noCar))
	equal(t, "status", o.get(id).Status, ManualAction)
}

// Steps whose names differ in case or accents only are two: a retry of the one is none of the other.
func TestRefusalOfAStepWithASimilarName(t *testing.T) {
	t.Parallel()
	for _, names := range [][2]string{{"Hotel", "hotel"}, {"hôtel", "hotel"}} {
		t.Run(fmt.Sprint(names), func(t *testing.T) {
			t.Parallel()
			s := &script{}
			w := newWorld(t, Define("trip", 1, append(s.hooks(),
				RemoteStep[trip, booking](names[0], "q1", Retry(5, 1)), RemoteStep[trip, booking](names[1], "q2", Retry(5, 1)))...))
			id := w.start("x")
			w.command()
			w.exec(publishSQL)
			for range 3 {
				w.pass(id, 16*time.Minute)
				w.scheduled()
			}
			(&operator{w, s}).does(id, Operation{Verb: VerbRetry})
			w.done(answer(w.command(), `{"status":"completed","result":{"Ref":"H1"}}`))
			first := w.command()
			w.pass(id, 16*time.Minute)
			w.scheduled()
			equal(t, "the refusal", one(t, "outcomes", w.deliver(answer(first, `{"status":"refused","error":"full"}`))).Kind, message.Done)
			equal(t, "status", w.get(id).Status, Compensating)
		})
	}
}
