package saga

import (
	"testing"
	"time"

	"backstep/internal/message"
)

// chained demands that a command is of such an attempt, and says that its first one had this id.
func chained(t *testing.T, m message.Message, attempt int, first string) {
	t.Helper()
	equal(t, "attempt, and first id", []any{m.Attempt(), m.Headers.String(message.HeaderRequestID)}, []any{attempt, first})
}

// A command that was lost, and whose row was swept, is made anew with the id that it had, and with that of
// the first attempt, in either direction.
func TestLostCommandKeepsItsFirstID(t *testing.T) {
	t.Parallel()
	var s script
	s.fail("b", errPassing, errPassing, Fail("no"))
	s.fail("undo a", errPassing)
	w := newWorld(t, s.define("a", "b"))
	id := w.start("x")
	again := func(attempt int, first string) message.Message {
		t.Helper()
		lost := w.get(id).CommandID
		w.exec(`DELETE FROM scheduled_messages`)
		w.wait(id, 2*time.Minute)
		w.exec(`DELETE FROM outbox_events`)
		w.upFor(time.Hour)
		for _, q := range []string{"a", "b"} {
			w.consumes(q, "m", unknown, time.Hour)
		}
		k := w.keeper(KeeperConfig{Consumer: "m", Queues: map[string]func() Standing{"a": nil, "b": nil}})
		w.rescue(k)
		for command, g := range k.gone {
			g.since = g.since.Add(-2 * time.Minute)
			k.gone[command] = g
		}
		w.rescue(k)
		m := w.command()
		equal(t, "id", m.MessageID, lost)
		chained(t, m, attempt, first)
		return m
	}
	w.command()
	a := again(1, w.get(id).CommandID)
	w.done(a)
	first := w.command()
	w.done(first)
	w.done(again(2, first.MessageID))
	w.done(again(3, first.MessageID)) // after one that was made anew

	undo := w.command()
	chained(t, undo, 1, undo.MessageID)
	w.done(undo)
	w.done(again(2, undo.MessageID))
	equal(t, "status", w.get(id).Status, Compensated)
}

// To a participant all attempts at a step are one: they have the first one's id, whatever made another of
// them, and whether or not replies say whose they are.
func TestParticipantIsToldTheFirstID(t *testing.T) {
	t.Parallel()
	for name, behind := range map[string][]Part[trip]{"the first step": nil, "a later one": {(&script{}).part("a")}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			parts := append(append(s.hooks(), behind...), RemoteStep[trip, booking]("car", "cars", Retry(4, 1)))
			w := newWorld(t, Define("trip", 1, parts...))
			o := &operator{w, &s}
			id := w.start("x")
			for range behind {
				w.done(w.command())
			}
			attempts := func(m message.Message) {
				t.Helper()
				first := m.MessageID
				chained(t, m, 1, first)
				w.overdue(id)
				chained(t, w.scheduled(), 2, first)
				w.overdue(id)
				m = w.scheduled()
				chained(t, m, 3, first)
				r := answer(m, `{"status":"failed","error":"busy"}`)
				w.done(r)
				m = w.scheduled()
				chained(t, m, 4, first)
				o.does(id, Operation{Verb: VerbRetry})
				chained(t, w.command(), 5, first)
			}
			attempts(w.command())
			o.does(id, Operation{Verb: VerbCancel})
			attempts(w.command()) // to undo it is another thing
			// A person has it tried that has given up.
			w.overdue(id)
			if d := w.get(id); d.Status != ManualAction {
				t.Fatalf("it is %s", d.Status)
			}
			first := ""
			w.must(w.db.QueryRowContext(t.Context(), `SELECT SUBSTRING_INDEX(request_id, ' ', -1) FROM saga_steps WHERE name = 'car'`).Scan(&first))
			w.outbox()
			o.does(id, Operation{Verb: VerbRetry})
			chained(t, w.command(), 6, first)
		})
	}
}

// So it is if the saga awaits nothing any more, because nobody knows whether its first attempt happened.
func TestRetryOfAStoppedParticipant(t *testing.T) {
	t.Parallel()
	var s script
	o := &operator{newWorld(t, Define("trip", 1, append(s.hooks(), RemoteStep[trip, booking]("car", "cars", Pivot(), NothingToUndo()))...)), &s}
	id := o.start("x")
	first := o.command()
	o.overdue(id)
	equal(t, "status, and what it awaits", []any{o.get(id).Status, o.get(id).CommandID}, []any{ManualAction, ""})
	o.outbox()
	o.does(id, Operation{Verb: VerbRetry})
	chained(t, o.command(), 2, first.MessageID)
}
