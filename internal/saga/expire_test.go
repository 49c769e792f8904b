package saga

import (
	"context"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// A deadline that passes amid a call, whose worker has died, is noted once: the keeper looks again and
// again, and at others in the same transaction. When the command comes again the call is not made, and
// what it may have done is undone. Amid the call of a compensation there is nothing to note.
func TestDeadlineWhileACallIsOpen(t *testing.T) {
	t.Parallel()
	for name, limit := range map[string]func(o []StepOption) ([]StepOption, []Part[trip]){
		"of the step": func(o []StepOption) ([]StepOption, []Part[trip]) { return append(o, Deadline(1<<40)), nil },
		"of the saga": func(o []StepOption) ([]StepOption, []Part[trip]) { return o, []Part[trip]{Within[trip](1 << 40)} },
	} {
		t.Run(name, func(t *testing.T) {
			var s script
			var d desk
			options, within := limit(d.options())
			w := newWorld(t, Define("trip", 1, append(append(s.hooks(), within...), s.part("pay", options...), s.part("b"))...))
			ofSaga := `UPDATE saga_instances SET saga_deadline_at = saga_deadline_at - INTERVAL 1 DAY WHERE id = ?`
			id, other := w.start("x"), w.start("y")
			cmds := w.commands()
			w.leave(cmds[0])
			w.exec(ofSaga, []byte(id))
			w.overdue(id)
			noted := w.get(id)
			w.overdue(id)
			w.overdue(id, other)
			equal(t, "the saga, looked at again", w.get(id), noted)
			equal(t, "status while the call is open", noted.Status, Running)
			equal(t, "status of another", w.get(other).Status, Compensated)
			if why := noted.CancelReason; !strings.Contains(why, "not done within") {
				t.Errorf("it is noted that the saga is to be undone, because %q", why)
			}
			w.done(cmds[0])
			equal(t, "calls", len(d.calls), 0)
			w.done(w.outside(w.command()))
			equal(t, "status in the end", w.get(id).Status, Compensated)
			equal(t, "calls", d.calls, []string{"compensate " + id + ":pay:compensate"})
			equal(t, "unknown", d.infos[0].Unknown, true)

			s.fail("b", Fail("no"))
			id = w.start("z")
			w.done(w.outside(w.command()))
			w.done(w.command())
			m := w.command()
			w.leave(m)
			w.exec(ofSaga, []byte(id))
			w.overdue(id)
			before := w.get(id)
			w.overdue(id)
			equal(t, "the saga whose compensation calls", w.get(id), before)
			equal(t, "direction, command, why not any more", []any{before.Direction, before.CommandID, before.CancelReason}, []any{Compensate, m.MessageID, ""})
			w.done(w.outside(m))
			equal(t, "status in the end", w.get(id).Status, Compensated)
			equal(t, "unknown", d.infos[len(d.infos)-1].Unknown, false)
		})
	}
}

// The deadline of a saga whose pivot a participant has in hand cannot undo it any more: the saga
// waits, until the step's own deadline, and is not asked again before.
func TestSagaDeadlineAtARemotePivot(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"), Within[trip](1<<40),
		RemoteStep[trip, booking]("car", "cars", Pivot(), NothingToUndo(), Retry(2, 1)))...))
	id, car := w.atCar()
	w.exec(`UPDATE saga_instances SET saga_deadline_at = NOW(6) - INTERVAL 1 SECOND WHERE id = ?`, []byte(id))
	w.overdue(id)
	w.must(w.look(id))
	d := w.get(id)
	equal(t, "status, attempt", []any{d.Status, d.Attempt}, []any{Running, 1})
	equal(t, "commands", len(w.commands()), 0)
	if d.DeadlineAt.IsZero() {
		t.Error("the step has no deadline any more: a lost reply would be waited for for ever")
	}
	w.done(answer(car, rented))
	equal(t, "status", w.get(id).Status, Completed)
}

// A step behind the pivot has no deadline that could undo it, but a participant is asked again.
func TestDeadlineBehindThePivot(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Pivot()), RemoteStep[trip, booking]("car", "cars", NothingToUndo()))...))
	id, car := w.atCar()
	for range 4 {
		w.overdue(id)
		car = w.scheduled()
	}
	equal(t, "attempt", car.Headers[message.HeaderAttempt], int64(5))
	w.done(answer(car, noCar)) // for good, and there is no way back
	equal(t, "status", w.get(id).Status, ManualAction)
}

// A saga that waits for a participant and does not fit its definition cannot take the reply. At its
// deadline it is an operator's, and goes on once it fits.
func TestDeadlineOfWhatDoesNotFit(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		spoil, mend, why string
		can              []Verb
	}{
		"input": {`payload = '{"Name":5}'`, `payload = '{"Name":"x"}'`, "input of saga", []Verb{VerbResolve}},
		"plan":  {`plan = 'a (undoable), car'`, `plan = NULL`, "a definition that changes needs a new version", nil},
		"both":  {`payload = '{"Name":5}', plan = 'car'`, `payload = '{"Name":"x"}', plan = NULL`, "a definition that changes needs a new version", nil},
		"step":  {`plan = NULL, current_step = 9`, `current_step = 1`, "its definition has 2", nil},
	} {
		for _, direction := range []Direction{Execute, Compensate} {
			t.Run(name+", "+string(direction), func(t *testing.T) {
				t.Parallel()
				var s script
				w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"), RemoteStep[trip, booking]("car", "cars", Deadline(time.Minute)))...))
				id, car := w.atCar()
				end, reply := Completed, rented
				if direction == Compensate {
					w.op(id, Operation{Verb: VerbCancel})
					end, reply, car = Compensated, `{"status":"completed"}`, w.command()
				}
				w.exec(`UPDATE saga_instances SET ` + tt.spoil)
				equal(t, "reply", w.deliver(answer(car, reply))[0].Kind, message.Parked)
				w.belated(id)
				w.upFor(time.Hour)
				w.consumes(RepliesQueue, "m", 0, unknown)
				w.scan(w.keeper(KeeperConfig{}))
				d := w.get(id)
				equal(t, "status", d.Status, ManualAction)
				if !strings.Contains(d.LastError, tt.why) {
					t.Errorf("it does not say %q: %s", tt.why, d.LastError)
				}
				if tt.can != nil {
					equal(t, "can", w.can(id), tt.can)
				}
				w.exec(`UPDATE saga_instances SET ` + tt.mend)
				w.done(answer(car, reply))
				w.run()
				equal(t, "in the end", w.get(id).Status, end)
			})
		}
	}
}

// What another release knows is left to it.
func TestDeadlineOfAnUnknownVersion(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a"))
	id := w.start("x")
	w.exec(`UPDATE saga_instances SET version = 7, deadline_at = NOW(6) - INTERVAL 1 MINUTE`)
	w.overdue(id)
	equal(t, "status", w.get(id).Status, Running)
}

// No release may ever read its input: it is resolved all the same, and no hook is called without it.
func TestResolveOfWhatDoesNotDecode(t *testing.T) {
	t.Parallel()
	for _, as := range []Status{Completed, Compensated} {
		var s script
		parts := append(s.hooks(), s.part("a"), s.part("b"), OnEndedByHand(func(context.Context, *sqltx.Tx, trip, Status, string) error {
			return Fail("a hook is called")
		}))
		w := newWorld(t, Define("trip", 1, parts...))
		id := w.start("x")
		w.exec(`UPDATE saga_instances SET payload = '{"Name":5}'`)
		w.park(w.command(), "input does not decode")
		for _, verb := range []Verb{VerbRetry, VerbSkip, VerbCancel, VerbCompensate} {
			_, err := (&operator{world: w}).operate(id, Operation{Verb: verb, Step: "a"})
			if !wasRefused(err) || !strings.Contains(err.Error(), "resolve") {
				t.Errorf("%s: %v", verb, err)
			}
		}
		w.exec(`UPDATE saga_instances SET plan = 'b, a'`) // then nobody here knows what has been done
		if _, err := (&operator{world: w}).operate(id, Operation{Verb: VerbResolve, As: as}); !wasRefused(err) {
			t.Errorf("with other steps: %v", err)
		}
		w.exec(`UPDATE saga_instances SET plan = NULL`)
		eff := (&operator{world: w}).does(id, Operation{Verb: VerbResolve, As: as})
		if !strings.Contains(eff.Detail, "no hook was called") {
			t.Errorf("it does not say what is left to do: %s", eff.Detail)
		}
		equal(t, "status", w.get(id).Status, as)
		equal(t, "called", len(s.called()), 0)
	}
}
