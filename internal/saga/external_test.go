package saga

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

func TestPrepare(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, s *script) {
		v := s.visit(t, "c")
		call := v.leave(v.m)
		got := v.get(v.id)
		if got.Status != Running || got.CommandID != v.m.MessageID {
			t.Errorf("while it is outside: %+v", got.Summary)
		}
		equal(t, "steps while it is outside", got.steps(), []string{"a COMPLETED", "pay RUNNING"})
		v.journal(Execute, "OPEN 1")
		equal(t, "calls before the commit", len(v.desk.calls), 0)
		v.m.Answer = call(t.Context())
		equal(t, "calls", v.desk.calls, []string{"execute " + v.id + ":pay:execute"})
		equal(t, "called before", v.desk.infos[0].Called, false)
		v.done(v.m)
		v.journal(Execute, "DONE 1")
		equal(t, "effects", v.effects(), []string{"a", "pay"})
		// It is undone by a call too, which is told what the action returned.
		s.fail("c", Fail("no"))
		v.done(v.command())
		v.undo()
		equal(t, "calls", v.desk.calls, []string{"execute " + v.id + ":pay:execute", "compensate " + v.id + ":pay:compensate"})
		equal(t, "what was to be undone", v.desk.done, []booking{{"pay of x"}})
		equal(t, "unknown", v.desk.infos[1].Unknown, false)
		v.journal(Compensate, "DONE 1")
		equal(t, "open calls", v.number(`SELECT COUNT(*) FROM saga_instances WHERE call_open`), 0)
		equal(t, "stale", v.deliver(v.m)[0].Kind, message.Stale)
		equal(t, "calls of a stale command", len(v.desk.calls), 2)
	})
}

// A saga of which the system says no has nothing to undo there.
func TestPrepareRefused(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, s *script) {
		v := s.visit(t)
		v.desk.fail(Execute, Fail("declined"))
		v.served(v.m)
		v.run()
		equal(t, "why", v.is(Compensated).LastError, "pay: declined")
		v.journal(Execute, "REFUSED 1")
		equal(t, "calls", len(v.desk.calls), 1)
		equal(t, "effects", v.effects(), []string{"a", "undo a a of x", "compensated (pay: declined)"})
	})
}

// As long as nobody knows, it is asked again, by the same key; when that was often enough, the step
// is undone as if it had happened.
func TestPrepareUnknown(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, s *script) {
		for _, last := range []error{nil, errPassing} {
			t.Run(fmt.Sprint(last), func(t *testing.T) {
				v := s.visit(t)
				v.desk.fail(Execute, errPassing, errPassing, last)
				for attempt := 1; attempt <= 3; attempt++ {
					v.served(v.m)
					equal(t, "called before", v.desk.infos[attempt-1].Called, attempt > 1)
					equal(t, "attempt", v.desk.infos[attempt-1].Attempt, attempt)
					equal(t, "key", v.desk.calls[attempt-1], "execute "+v.id+":pay:execute")
					if attempt < 3 {
						v.m = v.scheduled()
						v.journal(Execute, fmt.Sprintf("OPEN %d", attempt))
					}
				}
				if last == nil {
					v.journal(Execute, "DONE 3")
					equal(t, "error of what is done", v.get(v.id).Calls[0].Error, "")
					v.is(Completed)
					return
				}
				equal(t, "why", v.undo().LastError, "pay: gave up after 3 attempts: wrapped: try again")
				equal(t, "unknown", v.desk.infos[3].Unknown, true)
				equal(t, "what was to be undone", v.desk.done, []booking{{}})
				v.journal(Execute, "OPEN 3")
			})
		}
	})
}

// A call that panicked may have had its effect.
func TestCallPanics(t *testing.T) {
	t.Parallel()
	var s script
	v := s.visit(t)
	for attempt := range 3 {
		if attempt > 0 {
			v.m = v.scheduled()
		}
		v.leave(v.m)
		v.m.Failure = "panic in call: on fire"
		v.done(v.m)
	}
	v.undo()
	equal(t, "unknown", v.desk.infos[0].Unknown, true)
	v.is(Compensated)
}

// What a call came to is kept: the step's own failures do not make it again.
func TestOutcomeIsKept(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, s *script) {
		for what, errs := range map[string][]error{
			"it passes":       {errPassing, nil},
			"for good":        {Fail("no")},
			"again, for ever": {errPassing, errPassing, errPassing},
		} {
			t.Run(what, func(t *testing.T) {
				v := s.visit(t)
				s.fail("pay", errs...)
				v.served(v.m)
				for range len(errs) - 1 {
					v.done(v.scheduled()) // it does not go outside
				}
				equal(t, "calls", len(v.desk.calls), 1)
				v.journal(Execute, "DONE 1")
				if what == "it passes" {
					v.is(Completed)
					return
				}
				// The money is gone, so it has to come back.
				v.undo()
				equal(t, "unknown", v.desk.infos[1].Unknown, true)
			})
		}
	})
}

// An answer outlives a transaction that is rolled back.
func TestAnswerAgain(t *testing.T) {
	t.Parallel()
	var s script
	v := s.visit(t)
	s.fail("completed", errors.New("hook says no"))
	v.m = v.outside(v.m)
	if _, err := v.try(v.m); err == nil {
		t.Error("the batch did not fail")
	}
	v.journal(Execute, "OPEN 1")
	v.done(v.m)
	v.journal(Execute, "DONE 1")
	v.is(Completed)
	equal(t, "calls", len(v.desk.calls), 1)
}

// Whatever ends the saga while a call is open, what the call may have done is undone; and if it is
// known to have done nothing, nothing is.
func TestEndAmidCall(t *testing.T) {
	t.Parallel()
	ends := map[string]func(v *visit){
		"cancel": func(v *visit) { v.cancel(v.id) },
		"deadline": func(v *visit) {
			v.exec(`UPDATE saga_instances SET deadline_at = NOW(6) - INTERVAL 1 SECOND, saga_deadline_at = deadline_at`)
			v.exec(`UPDATE saga_instances SET saga_deadline_at = NULL`)
			for range 2 { // it is looked at again
				v.must(sqltx.Once(v.t.Context(), v.db, func(ctx context.Context, tx *sqltx.Tx) error {
					return v.engine.deadlinePassed(ctx, tx, []string{v.id})
				}))
			}
		},
	}
	answers := map[string]error{"done": nil, "refused": Fail("declined"), "unknown": errPassing, "none": errors.New("unused")}
	for what, end := range ends {
		for answer, err := range answers {
			for _, behind := range []int{0, 1} {
				t.Run(fmt.Sprintf("%s, then %s, %d behind", what, answer, behind), func(t *testing.T) {
					t.Parallel()
					var s script
					v := s.visit(t, []string{"c"}[:behind]...)
					v.desk.fail(Execute, err)
					answered := v.m
					if answer == "none" { // its worker has died; the command is delivered again
						v.leave(v.m)
					} else {
						answered = v.outside(v.m)
					}
					calls := len(v.desk.calls)
					end(v)
					if got := v.get(v.id); got.Status != Running || got.CommandID != v.m.MessageID {
						t.Errorf("before the call is resolved: %+v", got.Summary)
					}
					equal(t, "commands before the call is resolved", len(v.commands()), 0)
					v.done(answered)
					equal(t, "calls that resolve it", len(v.desk.calls), calls)
					if answer == "refused" {
						v.run()
						equal(t, "calls", len(v.desk.calls), calls)
					} else {
						v.undo()
						equal(t, "unknown", v.desk.infos[calls].Unknown, answer != "done")
					}
					got := v.is(Compensated)
					if answer != "refused" && !strings.Contains(got.LastError, map[string]string{"cancel": "not any more", "deadline": "not done within"}[what]) {
						t.Errorf("why: %q", got.LastError)
					}
					for _, e := range v.effects() {
						if e == "c" || e == "completed" {
							t.Errorf("it went on: %q", v.effects())
						}
					}
				})
			}
		}
	}
}

// A compensation that nobody knows to have happened is called again, and left to an operator in the
// end; when that one has it tried again, the call has the same key and says that it was made before.
func TestUnknownCompensation(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, s *script) {
		for what, err := range map[string]error{"unknown": errPassing, "refused": Fail("already")} {
			t.Run(what, func(t *testing.T) {
				v := s.visit(t, "c")
				s.fail("c", Fail("no"), Fail("no"))
				v.desk.fail(Compensate, err, err, err)
				v.served(v.m)
				v.done(v.command())
				v.served(v.command())
				if what == "unknown" {
					for range 2 {
						v.served(v.scheduled())
					}
					equal(t, "called before", v.desk.infos[3].Called, true)
					v.journal(Compensate, "OPEN 3")
				} else {
					v.journal(Compensate, "REFUSED 1")
				}
				if got := v.is(ManualAction); !strings.Contains(got.LastError, err.Error()) {
					t.Errorf("why: %q", got.LastError)
				}
				equal(t, "key", v.desk.calls[len(v.desk.calls)-1], "compensate "+v.id+":pay:compensate")
			})
		}
	})
}

// A worker that is not set up for a call that was made hands the command back: its own step would be
// a second one.
func TestElsewhere(t *testing.T) {
	t.Parallel()
	var s script
	v := s.visit(t)
	v.leave(v.m)
	var plain script
	here := v.engine
	v.engine = NewEngine(here.log, plain.define("a", "pay"))
	o := v.deliver(v.m)[0]
	if o.Kind != message.Deferred || !strings.Contains(o.Reason, "not set up to call") {
		t.Errorf("%s: %s", o.Kind, o.Reason)
	}
	equal(t, "calls of the plain step", len(plain.called()), 0)
	v.engine = here
	v.served(v.m)
	v.is(Completed)

	// And a step may say so itself, whatever form it has.
	bothForms(t, func(t *testing.T, s *script) {
		w := newWorld(t, s.define("a"))
		s.fail("a", Elsewhere("no map here"), Elsewhere("no map here"), nil)
		id := w.start("x")
		m := w.command()
		o := w.deliver(m)[0]
		for o.Kind == message.Deferred && o.Reason == "no map here" {
			o = w.deliver(m)[0]
		}
		equal(t, "outcome", o.Kind, message.Done)
		equal(t, "attempt", w.get(id).Attempt, 1)
	})
}

// Commands that go outside and others share a batch.
func TestCallsInABatch(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, s *script) {
		var d desk
		w := newWorld(t, s.paid(&d))
		_, m1 := w.atDesk("1")
		_, m2 := w.atDesk("2")
		_, m3 := w.atDesk("3")
		w.start("4")
		m4 := w.command()
		m1 = w.outside(m1)
		d.fail(Execute, Fail("no"))
		m2 = w.outside(m2)
		var kinds []message.OutcomeKind
		for _, o := range w.deliver(m1, m2, m3, m4, m3) {
			kinds = append(kinds, o.Kind)
		}
		equal(t, "outcomes", kinds, []message.OutcomeKind{message.Done, message.Done, message.Outside, message.Done, message.Stale})
		equal(t, "effects", w.effects(), []string{"a", "a", "a", "pay", "completed", "a"})
	})
}

func TestPrepareMistakes(t *testing.T) {
	t.Parallel()
	type other struct{}
	act := func(context.Context, *sqltx.Tx, trip) (booking, error) { return booking{}, nil }
	undo := func(context.Context, *sqltx.Tx, trip, booking) error { return nil }
	call := Prepare(func(context.Context, Info, trip) (string, error) { return "", nil })
	back := PrepareCompensation(func(context.Context, Info, trip, booking) (string, error) { return "", nil })
	for what, f := range map[string]func(){
		"no function":  func() { Prepare[trip, string](nil) },
		"no function ": func() { PrepareCompensation[trip, booking, string](nil) },
		"another input": func() {
			Step("a", "q", act, undo, Prepare(func(context.Context, Info, other) (string, error) { return "", nil }))
		},
		"another result": func() {
			Step("a", "q", act, undo, PrepareCompensation(func(context.Context, Info, trip, other) (string, error) { return "", nil }))
		},
		"no compensation": func() { Step("a", "q", act, nil, call, back) },
		"no JSON":         func() { Prepare(func(context.Context, Info, trip) (chan int, error) { return nil, nil }) },
		"remote":          func() { RemoteStep[trip, booking]("a", "q", call) },
		"nothing there":   func() { _, _ = Prepared[string](t.Context()) },
	} {
		t.Run(what, func(t *testing.T) {
			defer func() {
				if r := recover(); r == nil {
					t.Error("no panic")
				}
			}()
			f()
		})
	}
	Step("a", "q", act, undo, call, back)
}
