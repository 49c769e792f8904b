package saga

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// A saga that cannot be ended at its deadline, because its hook fails whenever it is tried, is not stuck
// for ever: it becomes a person's, whoever tries, and does not keep workers from their other sagas.
func TestDeadlineOfOneThatAlwaysFails(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]func(ctx context.Context, tx *sqltx.Tx) error{
		"an error": func(context.Context, *sqltx.Tx) error { return errors.New("boom") },
		"for good": func(context.Context, *sqltx.Tx) error { return Fail("boom") },
		"a panic":  func(context.Context, *sqltx.Tx) error { panic("boom") },
		"SQL": func(ctx context.Context, tx *sqltx.Tx) error {
			_, err := tx.Exec(ctx, `UPDATE boom SET n = 1`)
			return err
		},
		"no end": func(ctx context.Context, _ *sqltx.Tx) error { <-ctx.Done(); return fmt.Errorf("boom: %w", ctx.Err()) },
	} {
		for _, whole := range []bool{false, true}[:map[bool]int{false: 1, true: 2}[name == "an error"]] {
			t.Run(fmt.Sprintf("%s, of the whole saga %t", name, whole), func(t *testing.T) {
				t.Parallel()
				var s script
				w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Deadline(time.Minute)), Within[trip](time.Hour))...))
				w.upFor(24 * time.Hour)
				id := w.start("x")
				m := w.command()
				s.on("compensated", fails)
				look := func() {
					t.Helper()
					w.belated(id)
					if whole {
						w.exec(`UPDATE saga_instances SET saga_deadline_at = deadline_at`)
					}
					w.alive()
					k := w.keeper(KeeperConfig{}) // workers come and go
					k.endLimit = 400 * time.Millisecond
					if err := k.scanDeadlines(t.Context()); err == nil || !strings.Contains(err.Error(), id) {
						t.Errorf("the look gave %v", err)
					}
				}
				for n := 1; n < maxEnds; n++ {
					look()
					d := w.get(id)
					if d.Status != Running || d.CommandID != m.MessageID || !strings.Contains(d.LastError, fmt.Sprintf("try %d of 5", n)) || !strings.Contains(d.LastError, "boom") {
						t.Fatalf("after try %d: %+v", n, d.Summary)
					}
					equal(t, "actions", len(d.Actions), n)
				}
				d := w.get(id)
				w.alive()
				w.must(w.keeper(KeeperConfig{}).scanDeadlines(t.Context())) // it is not tried all the time
				equal(t, "before its time", w.get(id), d)

				look()
				d = w.get(id)
				if d.Status != ManualAction || !strings.HasPrefix(d.LastError, "its deadline has passed, but it could not be ended 5 times: ") || !strings.Contains(d.LastError, "boom") {
					t.Errorf("in the end: %+v", d.Summary)
				}
				equal(t, "effects", w.effects(), []string{"manual action (" + d.LastError + ")"})
				equal(t, "events", one(t, "events", w.outbox()).RoutingKey, "saga.manual_action")
				equal(t, "the step's command", one(t, "outcomes", w.deliver(m)).Kind, message.Stale)

				s.on("compensated", nil) // and when it is mended, the person says so
				o := &operator{w, &s}
				o.does(id, Operation{Verb: VerbCancel})
				equal(t, "status", w.get(id).Status, Compensated)
			})
		}
	}
}

// What comes after a failure to end it is not told with that any more.
func TestStepIsDoneAfterAll(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Deadline(time.Minute)), s.part("b"))...))
	w.upFor(24 * time.Hour)
	id := w.start("x")
	m := w.command()
	w.belated(id)
	s.fail("compensated", errPassing)
	w.alive()
	if err := w.keeper(KeeperConfig{}).scanDeadlines(t.Context()); err == nil {
		t.Error("it was ended")
	}
	w.done(m)
	d := w.get(id)
	equal(t, "status, error", []any{d.Status, d.CurrentStep, d.LastError}, []any{Running, 1, ""})
}

// B86: a saga whose definition was edited in place, and which waits for what never comes, is not ended by
// the steps of another: a person has to see to it. With the right definition a reply moves it on.
func TestDeadlineOfAnEditedDefinition(t *testing.T) {
	t.Parallel()
	var s script
	hotel := RemoteStep[trip, booking]("hotel", "hotels", Deadline(time.Minute))
	w := newWorld(t, Define("trip", 1, append(s.hooks(), hotel)...))
	w.upFor(24 * time.Hour)
	id := w.start("x")
	m := w.command()
	w.belated(id)
	w.engine = NewEngine(w.engine.log, Define("trip", 1, append(s.hooks(), hotel, s.part("b"))...))
	w.scan(w.keeper(KeeperConfig{}))
	d := w.get(id)
	if d.Status != ManualAction || !strings.Contains(d.LastError, "saga "+id+" awaits step 1") {
		t.Errorf("it is %s: %s", d.Status, d.LastError)
	}
	equal(t, "calls", s.called(), []string{"manual action (" + d.LastError + ")"})
	w.engine = NewEngine(w.engine.log, w.def)
	w.done(answer(m, rented))
	equal(t, "status", w.get(id).Status, Completed)
}

// So it is if the hook fails where a lane runs the step: that ends too, with what the hook said.
func TestHookThatAlwaysFailsInALane(t *testing.T) {
	t.Parallel()
	no := Fail("no")
	for name, fails := range map[string]func(s *script){
		"nothing to undo":   func(s *script) { s.fail("a", no, no, no, no) },
		"something to undo": func(s *script) { s.fail("b", no, no, no, no) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, s.define("a", "b"))
			fails(&s)
			s.on("compensated", func(context.Context, *sqltx.Tx) error { return errors.New("boom") })
			id := w.start("x")
			for w.get(id).Status != ManualAction {
				var m message.Message
				if list := w.commands(); len(list) > 0 {
					m = one(t, "commands", list)
				} else {
					m = w.scheduled()
				}
				_, err := w.try(m)
				if err != nil { // the failure is counted
					m.Failure = err.Error()
					_, err = w.try(m)
				}
				if err != nil { // and if that fails too, it is parked
					w.park(m, m.Failure)
				}
			}
			if d := w.get(id); !strings.Contains(d.LastError, "boom") {
				t.Errorf("because %q", d.LastError)
			}
		})
	}
}

// What counts is how often this command's saga could not be ended, whatever else was done to it, and its
// deadline stands still during outages all the same.
func TestDeadlineThatFailsIsCountedAlone(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Deadline(time.Minute)))...))
	w.upFor(24 * time.Hour)
	id := w.start("x")
	m := w.command()
	w.exec(`
INSERT INTO saga_actions (saga_id, action, actor, reason, after_json)
SELECT ?, what.action, 'me', 'test', JSON_OBJECT('command_id', what.command)
  FROM (SELECT 'cancel refused' AS action, ? AS command UNION ALL SELECT 'deadline failed', 'an earlier one') AS what,
       (SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4) AS times`, []byte(id), m.MessageID)
	w.belated(id)
	w.exec(`UPDATE saga_pulse SET downtime_us = 3600000000`)
	w.exec(`UPDATE saga_instances SET deadline_at = deadline_at - INTERVAL 1 HOUR`)
	s.fail("compensated", errPassing)
	w.alive()
	if err := w.keeper(KeeperConfig{}).scanDeadlines(t.Context()); err == nil {
		t.Error("it was ended")
	}
	d := w.get(id)
	equal(t, "status, tries", []any{d.Status, strings.Contains(d.LastError, "try 1 of 5")}, []any{Running, true})
	if n := w.number(`SELECT TIMESTAMPDIFF(SECOND, NOW(6), deadline_at + INTERVAL 1 HOUR) FROM saga_instances`); n > 60 {
		t.Errorf("it is tried again in %d s, by the clock of deadlines", n)
	}
}

// That the database was at odds with others says nothing about the saga: its hook is called again.
func TestDeadlineAtAConflict(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Deadline(time.Minute)))...))
	w.upFor(24 * time.Hour)
	id := w.start("x")
	w.commands()
	w.belated(id)
	before := w.get(id)
	s.on("compensated", func(context.Context, *sqltx.Tx) error {
		return &mysql.MySQLError{Number: 1213, Message: "Deadlock found"}
	})
	w.alive()
	if err := w.keeper(KeeperConfig{}).scanDeadlines(t.Context()); err == nil {
		t.Error("it was ended")
	}
	equal(t, "the saga", w.get(id), before)
}

// Why a saga is being undone is not forgotten for why its deadline could not end what it is at.
func TestDeadlineOfACompensationThatFails(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, rooms(&s))
	s.fail("car", Fail("no car"))
	id, m := w.awaitsHotel()
	w.done(answer(m, rented))
	w.done(w.command())
	w.exec(`UPDATE saga_instances SET deadline_at = NOW(6) - INTERVAL 1 SECOND`)
	w.must(sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		return w.engine.endFailed(ctx, tx, id, errPassing, false)
	}))
	d := w.get(id)
	equal(t, "reason", d.LastError, "car: no car")
	equal(t, "action", one(t, "actions", d.Actions).Action, "deadline failed")
}
