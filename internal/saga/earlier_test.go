package saga

import (
	"testing"
	"time"
)

// Workers of the release before this one, which know no again_at, request_id and undo_reason, move sagas
// on beside ours while a fleet is upgraded. They leave in the columns what was there.

func TestEarlierReleaseTurnsASaga(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, rooms(&s))
	id, hotel := w.awaitsHotel()
	(&operator{w, &s}).does(id, Operation{Verb: VerbCancel})
	undo := w.command()
	w.exec(`UPDATE saga_steps SET request_id = ? WHERE name = 'hotel'`, []byte("execute "+hotel.MessageID))
	w.done(answer(undo, `{"status":"failed","error":"busy"}`))
	chained(t, w.scheduled(), 2, undo.MessageID)
}

func TestEarlierReleaseTakesAReply(t *testing.T) {
	t.Parallel()
	for status, step := range map[Status]int{Completed: 2, ManualAction: 1, Running: 2} {
		t.Run(string(status), func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, rooms(&s))
			w.nothingWaits()
			id, _ := w.awaitsHotel()
			w.exec(`UPDATE saga_instances SET status = ?, current_step = ?, deadline_at = deadline_at + INTERVAL 1 MINUTE`, string(status), step)
			w.elapse(6 * time.Minute)
			before := w.get(id)
			w.scan(w.keeper(KeeperConfig{}))
			equal(t, "again_at left", w.number(`SELECT COUNT(*) FROM saga_instances WHERE again_at IS NOT NULL`), 0)
			equal(t, "commands", len(w.commands()), 0)
			equal(t, "the saga", w.get(id), before)
		})
	}
}

func TestEarlierReleaseStopsASaga(t *testing.T) {
	t.Parallel()
	var s script
	s.fail("b", Fail("no"))
	s.fail("undo a", Fail("stuck"))
	o := &operator{newWorld(t, s.define("a", "b")), &s}
	id := o.start("x")
	o.run()
	o.exec(`UPDATE saga_instances SET undo_reason = NULL`)
	s.fail("undo a")
	o.does(id, Operation{Verb: VerbRetry})
	o.run()
	d := o.get(id)
	equal(t, "status, why", []any{d.Status, d.LastError}, []any{Compensated, "b: no"})
}

// What an operator lets go on after its time is asked again at half of its step's deadline as any other.
func TestUnansweredAfterItsTime(t *testing.T) {
	t.Parallel()
	for _, op := range []Operation{{Verb: VerbRetry}, {Verb: VerbSkip, Step: "hotel"}} {
		t.Run(string(op.Verb), func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, Define("trip", 1, append(s.hooks(), Within[trip](time.Hour), s.part("flight"),
				RemoteStep[trip, booking]("hotel", "hotel", Deadline(10*time.Minute)), RemoteStep[trip, booking]("car", "cars", Deadline(10*time.Minute)))...))
			w.nothingWaits()
			id, m := w.awaitsHotel()
			w.park(m, "junk")
			w.exec(`UPDATE saga_instances SET saga_deadline_at = NOW(6) - INTERVAL 1 MINUTE`)
			(&operator{w, &s}).does(id, op)
			next := w.command()
			w.exec(publishSQL)
			w.elapse(6 * time.Minute)
			w.scan(w.keeper(KeeperConfig{}))
			equal(t, "emitted again", w.number(sentAgain, []byte(next.MessageID)), 1)
		})
	}
}
