package saga

import (
	"strings"
	"testing"
)

// Amid a call that is to be undone nobody is asked again, and no operator is told so.
func TestOperationsOnceCancelIsNoted(t *testing.T) {
	t.Parallel()
	s, d := &script{}, &desk{}
	o := &operator{newWorld(t, s.paid(d, "c")), s}
	id := o.start("x")
	m := amid[0].to(o)
	skip := Operation{Verb: VerbSkip, Step: "pay"}
	refused := func(says string) {
		t.Helper()
		if _, err := o.operate(id, skip); err == nil || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "retry") || strings.Contains(err.Error(), "resolve") {
			t.Errorf("skip: %v, want %q", err, says)
		}
	}
	refused("that is found out when the call ends or its command comes again")
	o.does(id, Operation{Verb: VerbCancel})
	refused("it is to be undone, when the call ends or its command comes again")
	list, _, err := List(t.Context(), o.db, Filter{Status: Running})
	if err != nil || len(list) != 1 || list[0].CancelReason == "" {
		t.Errorf("%+v, %v", list, err)
	}
	const columns = "message_id, ordering_key, exchange, routing_key, properties, headers, payload"
	o.exec("INSERT INTO scheduled_messages (" + columns + ", due_at) SELECT " + columns + ", NOW(6) + INTERVAL 1 HOUR FROM outbox_events WHERE message_id = '" + m.MessageID + "'")
	if eff := o.does(id, Operation{Verb: VerbRetry}); eff.Detail != "it is undone now; the call of step pay is not made once more" {
		t.Errorf("retry says %q", eff.Detail)
	}
}

// A cancellation that is noted names what was left out as any other does.
func TestNotedCancelNamesWhatWasLeftOut(t *testing.T) {
	t.Parallel()
	s, d := &script{}, &desk{}
	o := &operator{newWorld(t, s.paid(d)), s}
	id := o.start("x")
	o.park(o.command(), "poison")
	o.does(id, Operation{Verb: VerbSkip, Step: "a"})
	o.leave(o.command())
	eff := o.does(id, Operation{Verb: VerbCancel})
	if !strings.Contains(eff.Detail, "left out, so not undone if that was done by hand: a") {
		t.Error(eff.Detail)
	}
}

// A retry of what is to be undone says so, and a skip that is refused does not promise that the call is asked about, in
// MANUAL_ACTION too.
func TestOperationsOnceWhatIsUnwantedHasStopped(t *testing.T) {
	t.Parallel()
	s, d := &script{}, &desk{}
	o := &operator{newWorld(t, s.paid(d)), s}
	id := o.start("x")
	o.done(o.command())
	m := o.command()
	o.leave(m)
	o.does(id, Operation{Verb: VerbCancel})
	o.park(m, "poison")
	_, err := o.operate(id, Operation{Verb: VerbSkip, Step: "pay"})
	if err == nil || strings.Contains(err.Error(), "retry finds out") || !strings.Contains(err.Error(), "put it right by hand and resolve the saga; or retry, which has it undone") {
		t.Errorf("skip: %v", err)
	}
	eff := o.does(id, Operation{Verb: VerbRetry})
	equal(t, "retry says", eff.Detail, "it is undone when its command comes again, which goes out; the call of step pay is not made once more")
	o.done(o.command())
	equal(t, "status", o.get(id).Status, Compensating)
	equal(t, "calls", len(d.calls), 0)
}

// A step that called another system has all its attempts again; how often it was called is counted on.
func TestRetryOfWhatCallsCountsAnew(t *testing.T) {
	t.Parallel()
	s, d := &script{}, &desk{}
	o := &operator{newWorld(t, s.paid(d)), s}
	id := o.start("x")
	o.done(o.command())
	o.park(o.command(), "poison")
	equal(t, "retry says", o.does(id, Operation{Verb: VerbRetry}).Detail, "attempt 1 to execute step pay goes out; its attempts are counted anew, its calls (TIMES) on")
}
