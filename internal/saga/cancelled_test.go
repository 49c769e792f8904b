package saga

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// actions returns "what: why" of all that was done to a saga.
func (w *world) actions(id string) (out []string) {
	w.t.Helper()
	rows, err := w.db.QueryContext(w.t.Context(), `SELECT CONCAT(action, ': ', reason) FROM saga_actions WHERE saga_id = ? ORDER BY id`, []byte(id))
	w.must(err)
	defer rows.Close()
	for rows.Next() {
		var what string
		w.must(rows.Scan(&what))
		out = append(out, what)
	}
	w.must(rows.Err())
	return out
}

// refused delivers a wish that must change nothing, and is kept with the reason why not.
func (w *world) refused(id, why string) {
	w.t.Helper()
	before := w.get(id)
	o := one(w.t, "outcomes", w.deliver(cancelling(id, `{"reason":"sick"}`)))
	if o.Kind != message.Stale || !strings.Contains(o.Reason, why) {
		w.t.Errorf("the wish is %s: %s; want it stale because of %q", o.Kind, o.Reason, why)
	}
	w.noted(id, before)
	if list := w.actions(id); len(list) == 0 || !strings.HasPrefix(list[len(list)-1], "cancel refused: ") || !strings.Contains(list[len(list)-1], why) {
		w.t.Errorf("actions: %q", list)
	}
}

// B113: a saga is cancelled between any two of its steps, the next of which is under way. What has
// been done is undone, what is under way is not done any more, however often its command comes.
func TestCancelBetweenSteps(t *testing.T) { bothForms(t, testCancelBetweenSteps) }

func testCancelBetweenSteps(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("a", "b", "c"))
	for done, want := range [][]string{
		{"compensated (cancelled: sick)"},
		{"a", "undo a a of x1", "compensated (cancelled: sick)"},
		{"a", "b", "undo b b of x2", "undo a a of x2", "compensated (cancelled: sick)"},
	} {
		w.exec(`DELETE FROM effects`)
		id := w.start(fmt.Sprint("x", done))
		for range done {
			w.done(w.command())
		}
		underWay := w.command()
		w.done(cancelling(id, `{"reason":"sick"}`))
		for range 5 {
			equal(t, "the step under way", one(t, "outcomes", w.deliver(underWay)).Kind, message.Stale)
		}
		if done > 0 {
			w.refused(id, "already so")
		}
		w.run()
		w.refused(id, "already so")
		d := w.get(id)
		equal(t, "status, why", []string{string(d.Status), d.LastError}, []string{string(Compensated), "cancelled: sick"})
		equal(t, "effects", w.effects(), want)
		equal(t, "action", w.actions(id)[0], "cancel: sick")
	}
	equal(t, "who, of no application", actorOf(&message.Message{Properties: message.Properties{MessageID: "c"}}), `message "c"`)
	id := w.start("completed")
	w.run()
	w.refused(id, "too late to cancel it; compensate undoes it")
	equal(t, "status", w.get(id).Status, Completed)
}

// Twice in one batch, and together with what the saga awaits: one of two is refused, and the step
// in the same batch is done before it is undone.
func TestCancelInABatch(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a", "b", "c"))
	id := w.start("x")
	out := w.deliver(cancelling(id, `{"reason":"sick"}`), w.command(), cancelling(id, ``))
	equal(t, "outcomes", []message.OutcomeKind{out[0].Kind, out[1].Kind, out[2].Kind}, []message.OutcomeKind{message.Done, message.Done, message.Stale})
	w.run()
	d := w.get(id)
	equal(t, "effects", w.effects(), []string{"a", "undo a a of x", "compensated (cancelled: sick)"})
	equal(t, "steps", d.steps(), []string{"a COMPENSATED"})

	s.fail("c", Fail("no"))
	id = w.start("y") // and together with a failure, which comes first
	w.done(w.command())
	w.done(w.command())
	out = w.deliver(cancelling(id, ``), w.command())
	equal(t, "outcomes", []message.OutcomeKind{out[0].Kind, out[1].Kind}, []message.OutcomeKind{message.Stale, message.Done})
	w.run()
	d = w.get(id)
	equal(t, "status, why", []string{string(d.Status), d.LastError}, []string{string(Compensated), "c: no"})
}

// The pivot: until it has completed a saga can be cancelled, unless a participant may have it in hand
// and it cannot be undone.
func TestCancelAtThePivot(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"), s.part("b", Pivot()), s.part("c!"))...))
	id := w.start("x")
	w.done(w.command())
	b := w.command()
	w.done(cancelling(id, ``))
	equal(t, "the pivot under way", one(t, "outcomes", w.deliver(b)).Kind, message.Stale)
	w.run()
	equal(t, "status", w.get(id).Status, Compensated)
	id = w.start("y")
	w.done(w.command())
	w.done(w.command())
	w.refused(id, "its pivot, step b, is behind it: it cannot be undone; it can only go forward")
	w.run()
	w.refused(id, "is COMPLETED")

	r := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"), RemoteStep[trip, booking]("car", "cars", Pivot(), NothingToUndo()))...))
	id, car := r.atCar()
	r.refused(id, "nobody knows whether step car, its pivot, has happened")
	r.done(answer(car, rented))
	equal(t, "status", r.get(id).Status, Completed)
	id = r.start("in one batch") // its command has not been sent yet
	out := r.deliver(r.command(), cancelling(id, ``))
	equal(t, "outcomes", []message.OutcomeKind{out[0].Kind, out[1].Kind}, []message.OutcomeKind{message.Done, message.Done})
	equal(t, "next", r.command().RoutingKey, "a")
}

// B83 where steps run here: a compensation can come before, or instead of, its action only if
// somebody keeps the action's command back; what it finds then is a saga that waits for another.
func TestActionAfterItsCompensation(t *testing.T) { bothForms(t, testActionAfterItsCompensation) }

func testActionAfterItsCompensation(t *testing.T, s *script) {
	t.Parallel()
	parts := s.hooks()
	for _, name := range []string{"a", "b", "c"} {
		parts = append(parts, s.part(name, Deadline(1<<40)))
	}
	w := newWorld(t, Define("trip", 1, parts...))
	for held := range 3 {
		w.exec(`DELETE FROM effects`)
		id := w.start(fmt.Sprint("x", held))
		for range held {
			w.done(w.command())
		}
		action := w.command()
		w.overdue(id) // and nobody knows of the action
		for range 5 {
			equal(t, "the action, while it is undone", one(t, "outcomes", w.deliver(action)).Kind, message.Stale)
		}
		w.run()
		for range 5 {
			equal(t, "the action, after that", one(t, "outcomes", w.deliver(action)).Kind, message.Stale)
		}
		equal(t, "status", w.get(id).Status, Compensated)
		equal(t, "effects", len(w.effects()), 2*held+1)
	}
}

// B90, B97, B113: the message that a saga awaits and a wish to cancel it, both twice, in several lanes
// at once. What comes out is what one order or the other leads to, none is stuck, no deadlock surfaces,
// those that are retried are 1 per 1,000 messages at most, and none is charged as an attempt.
func TestCancelAndReplyAtOnce(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.journey())
	const sagas, lanes = 200, 8
	var ids []string
	for i := range sagas {
		ids = append(ids, w.start(fmt.Sprint(i)))
	}
	var delivered, conflicts atomic.Int64
	for round := 0; ; round++ {
		cmds := w.commands()
		if len(cmds) == 0 {
			break
		}
		var msgs []message.Message
		for _, m := range cmds {
			if m.RoutingKey == "cars" && m.Headers.String(message.HeaderDirection) == string(Execute) {
				m = answer(m, rented)
			} else if m.RoutingKey == "cars" {
				m = answer(m, givenBack)
			}
			again := m
			if m.Type == ReplyType {
				again.MessageID = message.NewID()
			}
			msgs = append(msgs, m, again)
		}
		for i, id := range ids {
			if i%4 == round { // of each four one is cancelled at its first step, one at its second, one at its third
				msgs = append(msgs, cancelling(id, ``), cancelling(id, ``))
			}
		}
		rand.Shuffle(len(msgs), func(i, k int) { msgs[i], msgs[k] = msgs[k], msgs[i] })
		var wg sync.WaitGroup
		for lane := range lanes {
			var mine []message.Message
			for i := lane; i < len(msgs); i += lanes {
				mine = append(mine, msgs[i])
			}
			wg.Go(func() {
				for part := range slices.Chunk(mine, 16) {
					delivered.Add(int64(len(part)))
					conflicts.Add(-1) // all runs but one
					err := sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
						conflicts.Add(1)
						w.engine.HandleBatch(ctx, tx, part)
						return tx.Err()
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
	}
	counts, err := Counts(t.Context(), w.db)
	w.must(err)
	equal(t, "sagas that have ended", counts[Completed]+counts[Compensated], sagas)
	if counts[Completed] < sagas/4 || counts[Compensated] == 0 {
		t.Errorf("%v: the test shows nothing", counts)
	}
	t.Logf("%d completed, %d compensated; %d messages, %d batches run again", counts[Completed], counts[Compensated], delivered.Load(), conflicts.Load())
	if conflicts.Load()*1000 > delivered.Load() {
		t.Errorf("%d conflicts by %d messages", conflicts.Load(), delivered.Load())
	}
	for i, id := range ids {
		d := w.get(id)
		kept := w.actions(id)
		granted, refused := 0, 0
		for _, a := range kept {
			if strings.HasPrefix(a, "cancel: ") {
				granted++
			} else if strings.HasPrefix(a, "cancel refused: ") {
				refused++
			}
		}
		if (granted == 1) != (d.Status == Compensated) || granted > 1 || i%4 < 3 && granted+refused != 2 {
			t.Errorf("saga %s is %s; of two wishes %d were granted and %d refused: %q", id, d.Status, granted, refused, kept)
		}
		for _, st := range d.Steps {
			done := st.Status == StepCompleted
			if d.Status == Completed && !done || d.Status == Compensated && done {
				t.Errorf("saga %s is %s, its step %s %s", id, d.Status, st.Name, st.Status)
			}
		}
	}
	hotels := w.number(`SELECT SUM(IF(what = 'hotel', 1, -1)) FROM effects WHERE what LIKE '%hotel%'`)
	equal(t, "hotels taken", hotels, counts[Completed])
	flights := w.number(`SELECT SUM(IF(what = 'flight', 1, -1)) FROM effects WHERE what LIKE '%flight%'`)
	equal(t, "flights taken", flights, counts[Completed])
	equal(t, "completed, compensated", w.number(`SELECT COUNT(*) FROM effects WHERE what = 'completed' OR what LIKE 'compensated%'`), sagas)
	equal(t, "attempts that failed", w.number(`SELECT COUNT(*) FROM saga_steps WHERE attempts > 1`), 0)
}
