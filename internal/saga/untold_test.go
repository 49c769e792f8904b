package saga

import (
	"context"
	"slices"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// What a hook emits is sent if it succeeds.
func TestEventsOfHooks(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, s.define("a"))
	tells := func(name string) {
		s.on(name, func(ctx context.Context, _ *sqltx.Tx) error {
			Emit(ctx, message.Message{Properties: message.Properties{MessageID: message.NewID(), Type: name}, Exchange: message.EventsExchange, RoutingKey: name})
			return nil
		})
	}
	tells("completed")
	tells("compensated")
	s.fail("a", nil, Fail("no"))
	var sent []string
	for _, name := range []string{"x", "y"} {
		w.start(name)
		w.done(w.command())
		for _, m := range w.outbox() {
			sent = append(sent, m.RoutingKey)
		}
	}
	equal(t, "events", sent, []string{"completed", "compensated"})
}

// A participant's command is not for the workers of sagas.
func TestCommandOfARemoteStepComesHere(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, remoteTrip(s))
	id := w.start("x")
	w.done(w.command())
	m := w.command()
	before := w.get(id)
	o := one(t, "outcomes", w.deliver(m))
	equal(t, "outcome", []any{o.Kind, o.Reason}, []any{message.Parked, `step hotel of saga type "trip" is remote; queue hotel is not ours to consume`})
	equal(t, "the saga", w.get(id), before)
}

// A later step has no more time than its saga.
func TestDeadlineOfAStepWithinTheSagas(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"), s.part("b", Deadline(time.Hour)), Within[trip](10*time.Minute))...))
	id := w.start("x")
	w.done(w.command())
	d := w.get(id)
	equal(t, "step, deadline", []any{d.CurrentStep, d.DeadlineAt}, []any{1, d.SagaDeadline})
	if d.SagaDeadline.IsZero() {
		t.Error("the saga has no deadline")
	}
}

// A step that runs with what an earlier call came to has its rows locked too.
func TestLocksOfAStepWhoseCallIsDone(t *testing.T) {
	t.Parallel()
	s, d := &script{}, &desk{}
	var rows locker
	take := func(ctx context.Context, tx *sqltx.Tx, keys []string) error { return rows.take(ctx, tx, keys) }
	options := append(d.options(), Retry(3, 1), Locks(func(in trip) []string { return []string{in.Name} }, take))
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("pay", options...))...))
	s.fail("pay", errPassing)
	id := w.start("x")
	w.done(w.outside(w.command()))
	equal(t, "locked with the answer", rows.asked, [][]string{{"x"}})
	w.done(w.scheduled()) // it is not called again
	equal(t, "locked at the second attempt", rows.asked, [][]string{{"x"}, {"x"}})
	equal(t, "status", w.get(id).Status, Completed)
}

// Kinds of rows are locked in one order, whatever the order of the batch: two batches would wait for
// each other.
func TestKindsAreLockedInOneOrder(t *testing.T) {
	t.Parallel()
	s := &script{}
	var order []string
	keys := func(in trip) []string { return []string{in.Name} }
	takeRows := func(context.Context, *sqltx.Tx, []string) error { order = append(order, "rows"); return nil }
	takeOther := func(context.Context, *sqltx.Tx, []string) error { order = append(order, "other"); return nil }
	w := newWorld(t, Define("one", 1, s.part("a", Locks(keys, takeRows))), Define("two", 1, s.part("b", Locks(keys, takeOther))))
	var first []string
	for _, turned := range []bool{false, true} {
		for _, version := range []string{"one", "two"} {
			d, err := w.engine.Definition(version, 1)
			w.must(err)
			w.def = d
			w.start(message.NewID())
		}
		msgs := w.commands()
		if turned {
			slices.Reverse(msgs)
		}
		order = nil
		w.done(msgs...)
		if !turned {
			first = order
		}
		equal(t, "locked", order, first)
		equal(t, "kinds", len(order), 2)
	}
}
