package saga

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// journey is a saga with a remote step, "car", between two that run here.
func (s *script) journey(options ...StepOption) *Definition {
	parts := append(s.hooks(), s.part("hotel"), RemoteStep[trip, booking]("car", "cars", options...), s.part("flight"))
	return Define("trip", 1, parts...)
}

// atCar starts a saga and returns the command that its participant gets.
func (w *world) atCar() (id string, car message.Message) {
	w.t.Helper()
	id = w.start(message.NewID())
	w.done(w.command())
	car = w.command()
	equal(w.t, "queue", car.RoutingKey, "cars")
	return id, car
}

const (
	rented    = `{"status":"completed","result":{"Ref":"car 7"}}`
	givenBack = `{"status":"completed"}`
	noCar     = `{"status":"refused","error":"no car"}`
	flat      = `{"status":"failed","error":"flat tyre"}`
)

// withRequestID has a reply echo that too.
func withRequestID(r, command message.Message) message.Message {
	r.Headers[message.HeaderRequestID] = command.Headers[message.HeaderRequestID]
	return r
}

// overdue makes the deadlines that sagas have pass, and has the engine look.
func (w *world) overdue(ids ...string) {
	w.t.Helper()
	for _, id := range ids {
		w.exec(`UPDATE saga_instances SET deadline_at = NOW(6) - INTERVAL 1 SECOND WHERE id = ? AND deadline_at IS NOT NULL`, []byte(id))
	}
	w.must(w.look(ids...))
}

// look has the engine look at deadlines, as it does again and again.
func (w *world) look(ids ...string) error {
	return sqltx.WithTx(w.t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		return w.engine.deadlinePassed(ctx, tx, ids)
	})
}

// late are the late replies that are kept of a saga.
func (w *world) late(id string) (out []string) {
	w.t.Helper()
	rows, err := w.db.QueryContext(w.t.Context(), `SELECT reason FROM saga_actions WHERE saga_id = ? AND action = 'late reply' ORDER BY id`, []byte(id))
	w.must(err)
	defer rows.Close()
	for rows.Next() {
		var reason string
		w.must(rows.Scan(&reason))
		out = append(out, reason)
	}
	w.must(rows.Err())
	return out
}

// tooLate delivers a reply that must change nothing and is kept.
func (w *world) tooLate(id string, r message.Message, kept string) {
	w.t.Helper()
	const messages = `SELECT (SELECT COUNT(*) FROM outbox_events) + (SELECT COUNT(*) FROM scheduled_messages)`
	before, rows, sent := w.get(id), len(w.late(id)), w.number(messages)
	if o := one(w.t, "outcomes", w.deliver(r)); o.Kind != message.Stale || o.Reason == "" {
		w.t.Errorf("a reply that comes too late is %s: %s", o.Kind, o.Reason)
	}
	w.noted(id, before)
	equal(w.t, "messages after a late reply", w.number(messages), sent)
	if list := w.late(id); len(list) != rows+1 || !strings.Contains(list[rows], kept) {
		w.t.Errorf("late replies kept: %q, want one more, of %s", list, kept)
	}
}

// What is no reply to anything is parked, and the saga still waits.
func TestRepliesThatAreParked(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.journey())
	id, car := w.atCar()
	before := w.get(id)
	for name, tt := range map[string]struct {
		spoil func(m *message.Message)
		why   string
	}{
		"unknown status":      {func(m *message.Message) { m.Body = []byte(`{"status":"done"}`) }, `status "done"`},
		"no status":           {func(m *message.Message) { m.Body = []byte(`{}`) }, `status ""`},
		"cut off":             {func(m *message.Message) { m.Body = []byte(`{"status":`) }, "does not decode"},
		"a list":              {func(m *message.Message) { m.Body = []byte(`[]`) }, "does not decode"},
		"empty":               {func(m *message.Message) { m.Body = nil }, "does not decode"},
		"result of no use":    {func(m *message.Message) { m.Body = []byte(`{"status":"completed","result":{"Ref":7}}`) }, "result that does not decode"},
		"unknown saga":        {func(m *message.Message) { m.Headers[message.HeaderSagaID] = "nobody" }, "no saga with id"},
		"unknown step":        {func(m *message.Message) { m.Headers[message.HeaderStep] = "boat" }, `step "boat"`},
		"no step":             {func(m *message.Message) { delete(m.Headers, message.HeaderStep) }, `step ""`},
		"a step that is ours": {func(m *message.Message) { m.Headers[message.HeaderStep] = "hotel" }, `no such remote step`},
		"unknown direction":   {func(m *message.Message) { m.Headers[message.HeaderDirection] = "up" }, `direction "up"`},
		"no direction":        {func(m *message.Message) { delete(m.Headers, message.HeaderDirection) }, `direction ""`},
	} {
		r := answer(car, rented)
		tt.spoil(&r)
		if o := one(t, "outcomes", w.deliver(r)); o.Kind != message.Parked || !strings.Contains(o.Reason, tt.why) {
			t.Errorf("%s: %s, %s; want it parked because of %q", name, o.Kind, o.Reason, tt.why)
		}
	}
	equal(t, "saga", w.get(id), before)
	equal(t, "late replies", len(w.late(id)), 0)
	w.done(answer(car, rented))
	w.run()
	equal(t, "status", w.get(id).Status, Completed)
}

// Replies that nobody waits for: each is kept, and none changes anything.
func TestRepliesOutOfTurn(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.journey())
	id := w.start("x")
	hotel := w.command()
	early := answer(hotel, rented)
	early.Headers[message.HeaderStep] = "car"
	w.tooLate(id, early, "execute step car, attempt 1: completed, result")
	w.done(hotel)
	car := w.command()
	back := answer(car, givenBack)
	back.Headers[message.HeaderDirection] = "compensate"
	w.tooLate(id, back, "compensate step car")
	future := answer(car, rented)
	future.Headers[message.HeaderAttempt] = int64(7)
	w.tooLate(id, future, "attempt 7")

	// Two in one batch, and then more: the first counts, whatever the others say.
	out := w.deliver(answer(car, rented), answer(car, rented))
	equal(t, "outcomes", []message.OutcomeKind{out[0].Kind, out[1].Kind}, []message.OutcomeKind{message.Done, message.Stale})
	flight := w.command()
	w.tooLate(id, answer(car, rented), "completed")
	w.tooLate(id, answer(car, noCar), "refused no car") // it contradicts itself
	w.tooLate(id, answer(car, flat), "failed flat tyre")
	w.done(flight)
	w.tooLate(id, answer(car, noCar), "refused no car")
	d := w.get(id)
	equal(t, "status", d.Status, Completed)
	equal(t, "steps", d.steps(), []string{"hotel COMPLETED", "car COMPLETED", "flight COMPLETED"})
	equal(t, "result", string(d.Steps[1].Result), `{"Ref":"car 7"}`)
	equal(t, "late replies", len(w.late(id)), 8)
}

// A refusal is no: what came before is undone, the step itself is not. That it has completed all
// the same is kept, and left to a person: the participant broke its word.
func TestRemoteRefusal(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.journey(Retry(3, 1)))
	id, car := w.atCar()
	w.done(answer(car, noCar))
	undo := w.command()
	equal(t, "next", undo.RoutingKey, "hotel")
	w.tooLate(id, answer(car, rented), "completed, result {\"Ref\":\"car 7\"}")
	w.done(undo)
	w.tooLate(id, answer(car, rented), "completed")
	d := w.get(id)
	equal(t, "status, why", []string{string(d.Status), d.LastError}, []string{string(Compensated), "car: no car"})
	equal(t, "steps", d.steps(), []string{"hotel COMPENSATED", "car FAILED"})
}

// "failed" is tried again under a new id, up to the limit; then nobody knows, and the step is
// undone as if it had happened. Of the replies to earlier attempts those count that settle it.
func TestRemoteFailure(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.journey(Retry(3, 1)))
	id, car := w.atCar()
	w.done(withRequestID(answer(car, flat), car))
	second := w.scheduled()
	equal(t, "attempt, request", []any{second.Headers[message.HeaderAttempt], second.RequestID()}, []any{int64(2), car.RequestID()})
	w.tooLate(id, answer(car, flat), "attempt 1: failed flat tyre")
	w.done(withRequestID(answer(second, flat), second))
	third := w.scheduled()
	equal(t, "request", third.RequestID(), car.RequestID())
	w.done(answer(third, flat))
	back := w.command()
	var body remoteCommand
	w.must(json.Unmarshal(back.Body, &body))
	equal(t, "compensation", []string{back.RoutingKey, string(body.Result)}, []string{"cars", ""})
	// It may pass as well.
	w.done(answer(back, flat))
	again := w.scheduled()
	w.done(answer(back, givenBack)) // to the attempt before
	w.run()
	w.tooLate(id, answer(again, givenBack), "compensate step car, attempt 2: completed")
	d := w.get(id)
	equal(t, "status, why", []string{string(d.Status), d.LastError}, []string{string(Compensated), "car: gave up after 3 attempts: flat tyre"})

	id, car = w.atCar()
	w.done(answer(car, flat))
	equal(t, "request", w.scheduled().Headers.String(message.HeaderRequestID), car.MessageID)
	w.done(answer(car, rented)) // an earlier copy of it did it
	w.run()
	equal(t, "status", w.get(id).Status, Completed)
}

// A compensation that its participant refuses is a person's.
func TestRemoteCompensationRefused(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.journey())
	s.fail("flight", Fail("fog"))
	id, car := w.atCar()
	w.done(answer(car, rented))
	w.done(w.command())
	back := w.command()
	w.done(answer(back, `{"status":"refused","error":"the car is on the moon"}`))
	d := w.get(id)
	equal(t, "status", d.Status, ManualAction)
	if !strings.Contains(d.LastError, "the car is on the moon") {
		t.Errorf("why: %s", d.LastError)
	}
	w.tooLate(id, answer(back, givenBack), "compensate step car")
}

// The reply to a command that an operator was told is parked settles it: one copy had come through.
func TestReplyToAParkedCommand(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.journey())
	id, car := w.atCar()
	w.must(sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		return w.engine.CommandParked(ctx, tx, &car, "unroutable")
	}))
	equal(t, "status", w.get(id).Status, ManualAction)
	w.done(answer(car, rented))
	w.run()
	equal(t, "status", w.get(id).Status, Completed)
}

// B84: the reply comes when its step is being undone, since nobody knew, or has been.
func TestReplyAfterTheDeadline(t *testing.T) {
	t.Parallel()
	for _, body := range []string{rented, noCar, flat} {
		var s script
		w := newWorld(t, s.journey())
		id, car := w.atCar()
		w.overdue(id)
		back := w.command()
		equal(t, "compensation", []string{back.RoutingKey, back.Headers.String(message.HeaderDirection)}, []string{"cars", "compensate"})
		w.tooLate(id, answer(car, body), "execute step car")
		w.done(answer(back, givenBack))
		w.tooLate(id, answer(car, body), "execute step car")
		w.run()
		w.tooLate(id, answer(car, body), "execute step car")
		w.tooLate(id, answer(back, givenBack), "compensate step car")
		d := w.get(id)
		equal(t, "status", d.Status, Compensated)
		equal(t, "steps", d.steps(), []string{"hotel COMPENSATED", "car COMPENSATED"})
		if !strings.Contains(d.LastError, "car: not done within 15m") {
			t.Errorf("why: %s", d.LastError)
		}
	}
}

// B84 c: reply and deadline at the same moment. One of the two wins, and all that follows is its.
func TestReplyAtTheDeadline(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.journey())
	const sagas = 60
	cars := map[string]message.Message{}
	for range sagas {
		id, car := w.atCar()
		cars[id] = car
	}
	w.exec(`UPDATE saga_instances SET deadline_at = NOW(6) - INTERVAL 1 SECOND`)
	var wg sync.WaitGroup
	gate := make(chan struct{})
	for id, car := range cars {
		wg.Go(func() {
			<-gate
			if err := w.look(id); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			<-gate
			if err := w.lane(answer(car, rented)); err != nil {
				t.Error(err)
			}
		})
	}
	close(gate)
	wg.Wait()
	next := w.commands()
	equal(t, "next commands", len(next), sagas)
	went := map[string]int{}
	for _, m := range next {
		id := m.Headers.String(message.HeaderSagaID)
		went[m.RoutingKey]++
		lates := len(w.late(id))
		if m.RoutingKey == "cars" {
			equal(t, "late replies of a saga whose deadline won", lates, 1)
			w.done(answer(m, givenBack))
			continue
		}
		equal(t, "late replies of a saga whose reply won", lates, 0)
		w.done(m)
	}
	w.run()
	counts, err := Counts(t.Context(), w.db)
	w.must(err)
	equal(t, "ended", []int{counts[Completed], counts[Compensated]}, []int{went["flight"], went["cars"]})
	t.Logf("the reply won %d times, the deadline %d times", went["flight"], went["cars"])
}

// lane handles messages as a lane does: a conflict with another one is run again.
func (w *world) lane(msgs ...message.Message) error {
	return sqltx.WithTx(w.t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		w.engine.HandleBatch(ctx, tx, msgs)
		return tx.Err()
	})
}

// B88: nobody can answer what nobody sees. The command and the state that awaits it become visible at
// once: at the start, and at each advance, whatever causes it. While the commit is outstanding others
// see all as it was.
func TestCommandIsNotSeenBeforeItsSaga(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), RemoteStep[trip, booking]("car", "cars"), s.part("hotel"), s.part("flight"))...))
	s.fail("flight", errPassing, Fail("full"))
	var id string
	slowly := func(what string, do func(tx *sqltx.Tx)) []message.Message {
		t.Helper()
		var before Detail
		if id != "" {
			before = w.get(id)
		}
		tx, err := w.db.BeginTx(t.Context(), nil)
		w.must(err)
		do(sqltx.Join(tx))
		equal(t, what+": messages before the commit", len(w.outbox())+w.number(`SELECT COUNT(*) FROM scheduled_messages`), 0)
		if before.ID != "" {
			equal(t, what+": the saga before the commit", w.get(id), before)
		} else {
			equal(t, what+": sagas before the commit", w.number(`SELECT COUNT(*) FROM saga_instances`), 0)
		}
		w.must(tx.Commit())
		cmds := w.commands()
		if w.number(`SELECT COUNT(*) FROM scheduled_messages`) > 0 {
			cmds = append(cmds, w.scheduled())
		}
		equal(t, what+": awaited", w.get(id).CommandID, append(cmds, message.Message{})[0].MessageID)
		return cmds
	}
	advance := func(what string, m message.Message) []message.Message {
		t.Helper()
		return slowly(what, func(tx *sqltx.Tx) {
			equal(t, what, one(t, "outcomes", w.engine.HandleBatch(t.Context(), tx, []message.Message{m})).Kind, message.Done)
		})
	}
	m := one(t, "commands", slowly("start", func(tx *sqltx.Tx) {
		var err error
		id, _, err = Start(t.Context(), tx, w.def, "x", trip{})
		w.must(err)
	}))
	// The reply to each is Done: the saga is there, and awaits it.
	m = one(t, "hotel", advance("reply", answer(m, rented)))
	m = one(t, "flight", advance("step", m))
	m = one(t, "flight again", advance("retry", m))
	m = one(t, "undo hotel", advance("failure", m))
	m = one(t, "undo car", advance("compensation", m))
	equal(t, "commands at the end", len(advance("the last reply", answer(m, givenBack))), 0)
	equal(t, "status", w.get(id).Status, Compensated)
}
