package saga

import (
	"cmp"
	"context"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
)

const (
	sentAgain  = `SELECT COUNT(*) FROM outbox_events WHERE status = 'PENDING' AND generation = 1 AND message_id = ?`
	publishSQL = `UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6) WHERE status = 'PENDING'`
)

// rooms is a saga whose hotel has ten minutes.
func rooms(s *script, options ...StepOption) *Definition {
	options = append([]StepOption{Deadline(10 * time.Minute)}, options...)
	return Define("trip", 1, append(s.hooks(), s.part("flight"), RemoteStep[trip, booking]("hotel", "hotel", options...), s.part("car", Retry(1, 1)))...)
}

// elapse makes all that has happened to a saga older.
func (w *world) elapse(d time.Duration) {
	w.t.Helper()
	w.exec(`UPDATE saga_instances SET awaited_since = awaited_since - INTERVAL ? MICROSECOND, deadline_at = deadline_at - INTERVAL ? MICROSECOND,
               again_at = again_at - INTERVAL ? MICROSECOND, updated_at = updated_at - INTERVAL ? MICROSECOND`, us(d), us(d), us(d), us(d))
	w.exec(`UPDATE outbox_events SET published_at = published_at - INTERVAL ? MICROSECOND`, us(d))
}

// nothingWaits: all has been up for a day, and no reply is in the queue.
func (w *world) nothingWaits() {
	w.t.Helper()
	w.upFor(24 * time.Hour)
	w.consumes(RepliesQueue, "m", unknown, time.Hour)
}

// awaitsHotel begins a saga and returns the command of its remote step, which is published.
func (w *world) awaitsHotel() (id string, m message.Message) {
	w.t.Helper()
	id = w.start("x")
	w.done(w.command())
	m = w.command()
	w.exec(publishSQL)
	return id, m
}

// A command to another service that has had no reply by half of its deadline is emitted once more,
// if the time was fair, and the deadline does not move.
func TestUnansweredCommands(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, rooms(&s))
	pending := `UPDATE outbox_events SET status = 'PENDING' WHERE routing_key = 'hotel'`
	late := `UPDATE outbox_events SET published_at = published_at + INTERVAL 2 MINUTE WHERE routing_key = 'hotel'`
	down := `UPDATE saga_pulse SET downtime_us = 120000000`
	edited := `UPDATE saga_instances SET plan = 'flight (undoable), motel (undoable) (remote), car (undoable)'`
	type want struct {
		again bool
		body  string        // of what is made anew; "": as it was
		later time.Duration // the deadline is put off by about as much: it lacked that
	}
	for _, tt := range []struct {
		name  string
		after time.Duration
		given func()
		want  want
	}{
		{"half of it has passed", 5*time.Minute + time.Second, func() {}, want{again: true}},
		{"less has", 5*time.Minute - 10*time.Second, func() {}, want{}},
		{"an outage took some of it", 6 * time.Minute, func() { w.exec(down) }, want{}},
		{"an outage took some, half has passed", 7*time.Minute + time.Second, func() { w.exec(down) }, want{again: true}},
		{"it is not published", 6 * time.Minute, func() { w.exec(pending) }, want{later: 6 * time.Minute}},
		{"it is parked", 6 * time.Minute, func() { w.exec(`UPDATE outbox_events SET status = 'PARKED' WHERE routing_key = 'hotel'`) }, want{later: 6 * time.Minute}},
		{"it waits for its time", 6 * time.Minute, func() { w.exec(scheduleAllSQL) }, want{later: 6 * time.Minute}},
		{"it was published late", 6 * time.Minute, func() { w.exec(late) }, want{later: 2 * time.Minute}},
		{"it was published late, half has passed", 7*time.Minute + time.Second, func() { w.exec(late) }, want{again: true, later: 2 * time.Minute}},
		{"published late, before an outage", 8 * time.Minute, func() {
			w.exec(late)
			w.exec(down)
			w.exec(`UPDATE saga_pulse SET up_since = NOW(6) - INTERVAL 1 MINUTE`)
		}, want{later: 2 * time.Minute}},
		{"published late, much of it an outage", 12 * time.Minute, func() {
			w.exec(`UPDATE outbox_events SET published_at = published_at + INTERVAL 10 MINUTE WHERE routing_key = 'hotel'`)
			w.exec(`UPDATE saga_pulse SET downtime_us = 300000000, up_since = NOW(6) - INTERVAL 1 MINUTE`)
		}, want{later: 7 * time.Minute}},
		{"a later attempt, published before an outage", 8 * time.Minute, func() {
			w.exec(`UPDATE saga_instances SET attempt = 2`)
			w.exec(late)
			w.exec(down)
			w.exec(`UPDATE saga_pulse SET up_since = NOW(6) - INTERVAL 1 MINUTE`)
		}, want{again: true}},
		{"a later attempt was published late", 6 * time.Minute, func() {
			w.exec(`UPDATE saga_instances SET attempt = 2`)
			w.exec(late)
		}, want{later: 2 * time.Minute}},
		{"it is swept", 6 * time.Minute, func() { w.exec(`DELETE FROM outbox_events`) }, want{again: true}},
		{"it does not decode here, and is swept", 6 * time.Minute, func() {
			w.exec(`UPDATE saga_instances SET payload = '{"Name":5}'`)
			w.exec(`DELETE FROM outbox_events`)
		}, want{again: true, body: `{"input":{"Name":5}}`}},
		{"it has other steps", 6 * time.Minute, func() { w.exec(edited) }, want{}},
		{"it has other steps, and is swept", 6 * time.Minute, func() {
			w.exec(edited)
			w.exec(`DELETE FROM outbox_events`)
		}, want{}},
		{"nobody knows what is up", 6 * time.Minute, func() { w.exec(`UPDATE saga_pulse SET beat_at = NOW(6) - INTERVAL 8 SECOND`) }, want{}},
		{"all has just come up", 6 * time.Minute, func() { w.upFor(20 * time.Second) }, want{}},
		{"the reply may be in the queue", 6 * time.Minute, func() {
			w.upFor(time.Minute)
			w.consumes(RepliesQueue, "m", 2*time.Minute, unknown)
		}, want{}},
		{"nobody consumes replies", 6 * time.Minute, func() {
			w.upFor(time.Minute)
			w.exec(`DELETE FROM saga_consumers`)
		}, want{}},
		{"an operator has it", 6 * time.Minute, func() { w.exec(`UPDATE saga_instances SET status = 'MANUAL_ACTION'`) }, want{}},
		{"another release knows it", 6 * time.Minute, func() { w.exec(`UPDATE saga_instances SET version = 2`) }, want{}},
		{"it is at a step of ours", 6 * time.Minute, func() { w.exec(`UPDATE saga_instances SET current_step = 0`) }, want{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, table := range []string{"saga_consumers", "saga_instances", "saga_steps", "outbox_events", "scheduled_messages", "outbox_actions"} {
				w.exec(`DELETE FROM ` + table)
			}
			w.nothingWaits()
			id, m := w.awaitsHotel()
			w.elapse(tt.after)
			tt.given()
			before := w.get(id)
			var rung uint16
			k := w.keeper(KeeperConfig{Committed: func(shards uint16) { rung |= shards }})
			for range 2 {
				w.must(k.scanDeadlines(t.Context()))
			}
			after := w.get(id)
			sent := w.number(sentAgain, []byte(m.MessageID)) == 1
			if strings.HasSuffix(tt.name, "is swept") {
				for _, again := range w.commands() {
					sent = again.MessageID == m.MessageID && string(again.Body) == cmp.Or(tt.want.body, string(m.Body)) && again.ReplyTo == m.ReplyTo && again.Type == m.Type
				}
			}
			if sent != tt.want.again || (after.Rescues == 1) != tt.want.again || (rung != 0) != tt.want.again {
				t.Errorf("emitted again: %t, %d rescues, rung for %b; want %t", sent, after.Rescues, rung, tt.want.again)
			}
			if by := after.DeadlineAt.Sub(before.DeadlineAt); by < tt.want.later-time.Second || by > tt.want.later+10*time.Second {
				t.Errorf("the deadline is put off by %s, want %s", by, tt.want.later)
			}
			if tt.want.later > 0 && !after.AwaitedSince.After(before.AwaitedSince) { // or that would count again at the deadline
				t.Errorf("it is awaited since %s, as before", after.AwaitedSince)
			}
			if after.CommandID != before.CommandID || after.Status != before.Status || !after.UpdatedAt.Equal(before.UpdatedAt) {
				t.Errorf("the saga is %+v, was %+v", after, before)
			}
		})
	}
}

// It happens once for each attempt, whatever becomes of the copy, and the deadline of the attempt passes
// when it would have: neither the row that is pending again nor its second publish puts it off.
func TestUnansweredOncePerAttempt(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		after func(w *world)
	}{
		{"it is pending again", func(*world) {}},
		{"it is published again", func(w *world) { w.exec(publishSQL) }},
		{"it is lost again, and swept", func(w *world) { w.exec(`DELETE FROM outbox_events`) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, rooms(&s, Retry(2, 1)))
			w.nothingWaits()
			id, m := w.awaitsHotel()
			due := w.get(id).DeadlineAt
			w.elapse(6 * time.Minute)
			k := w.keeper(KeeperConfig{})
			w.scan(k)
			equal(t, "emitted again", w.number(sentAgain, []byte(m.MessageID)), 1)
			tt.after(w)
			w.elapse(3 * time.Minute)
			w.scan(w.keeper(KeeperConfig{})) // restarted
			d := w.get(id)
			if off := d.DeadlineAt.Add(9 * time.Minute).Sub(due).Abs(); d.Rescues != 1 || off > 5*time.Second {
				t.Errorf("%d rescues, the deadline has moved by %s", d.Rescues, off)
			}
			equal(t, "rescues in the audit", w.number(`SELECT COUNT(*) FROM outbox_actions WHERE action = 'rescue'`), 1)
			w.elapse(61 * time.Second)
			w.scan(k)
			d = w.get(id)
			equal(t, "attempt, rescues", []int{d.Attempt, d.Rescues}, []int{2, 0})

			// The next attempt has its own half.
			second := w.scheduled()
			w.elapse(6 * time.Minute)
			w.exec(`DELETE FROM outbox_events`)
			w.commands()
			w.scan(k)
			again := w.command()
			equal(t, "the second attempt, again", []any{again.MessageID, again.Attempt()}, []any{second.MessageID, 2})
			w.done(answer(m, `{"status":"completed","result":{"Ref":"H1"}}`))
			w.run()
			equal(t, "status", w.get(id).Status, Completed)
		})
	}
}

// A compensation of another service is asked for again too, with what its action returned.
func TestUnansweredCompensation(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, rooms(&s))
	w.nothingWaits()
	s.fail("car", Fail("no car"))
	id, m := w.awaitsHotel()
	w.done(answer(m, `{"status":"completed","result":{"Ref":"H1"}}`))
	w.done(w.command())
	undo := w.command()
	equal(t, "direction", undo.Headers.String(message.HeaderDirection), "compensate")
	w.elapse(6 * time.Minute)
	w.exec(`DELETE FROM outbox_events`)
	w.scan(w.keeper(KeeperConfig{}))
	again := w.command()
	equal(t, "id", again.MessageID, undo.MessageID)
	equal(t, "body", string(again.Body), string(undo.Body))
	w.done(answer(again, `{"status":"completed"}`))
	w.run()
	equal(t, "status", w.get(id).Status, Compensated)
}

// The first step may be another service's, and the saga's own deadline come first.
func TestUnansweredFirstStep(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Define("trip", 1, Within[trip](6*time.Minute),
		RemoteStep[trip, booking]("hotel", "hotel", Deadline(10*time.Minute), NothingToUndo())))
	w.nothingWaits()
	id := w.start("x")
	m := w.command()
	w.exec(publishSQL)
	w.exec(`UPDATE saga_instances SET saga_deadline_at = saga_deadline_at - INTERVAL 301 SECOND`)
	w.elapse(301 * time.Second)
	before := w.get(id).DeadlineAt
	w.scan(w.keeper(KeeperConfig{}))
	equal(t, "emitted again", w.number(sentAgain, []byte(m.MessageID)), 1)
	equal(t, "the saga's deadline", w.get(id).DeadlineAt, before)
}

// Whose deadline has passed is not asked again, but undone.
func TestUnansweredTooLate(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, rooms(&s))
	w.nothingWaits()
	id, m := w.awaitsHotel()
	w.elapse(11 * time.Minute)
	w.scan(w.keeper(KeeperConfig{}))
	equal(t, "emitted again", w.number(sentAgain, []byte(m.MessageID)), 0)
	equal(t, "status", w.get(id).Status, Compensating)
}

// What has been answered, or was emitted by another worker, between the look and the locks is left alone.
func TestUnansweredLooksAgain(t *testing.T) {
	t.Parallel()
	for name, meanwhile := range map[string]func(w *world, m message.Message){
		"answered":         func(w *world, m message.Message) { w.done(answer(m, `{"status":"completed","result":{"Ref":"H1"}}`)) },
		"awaiting another": func(w *world, _ message.Message) { w.exec(`UPDATE saga_instances SET command_id = 'other'`) },
		"emitted": func(w *world, m message.Message) {
			w.scan(w.keeper(KeeperConfig{}))
			w.exec(`DELETE FROM outbox_events`)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, rooms(&s))
			w.nothingWaits()
			_, m := w.awaitsHotel()
			w.elapse(6 * time.Minute)
			k := w.keeper(KeeperConfig{})
			p := w.pulse()
			page, _, err := k.nextDue(t.Context(), selectUnansweredSQL, &k.asked, p)
			w.must(err)
			one(t, "unanswered", page)
			meanwhile(w, m)
			w.exec(`DELETE FROM outbox_events`)
			w.must(k.askAgainSome(t.Context(), page, p))
			equal(t, "commands", w.number(`SELECT COUNT(*) FROM outbox_events`), 0)
		})
	}
}

// Whose reply is here, though it could not be handled yet, is not asked again.
func TestUnansweredIsNotWhatIsKept(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{"done": `{"status":"completed","result":{"Ref":"H1"}}`, "refused": `{"status":"refused","error":"full"}`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, rooms(&s))
			w.nothingWaits()
			id, m := w.awaitsHotel()
			r := answer(m, body)
			w.cannotHandle(r)
			w.elapse(6 * time.Minute)
			w.scan(w.keeper(KeeperConfig{}))
			equal(t, "emitted again", w.number(sentAgain, []byte(m.MessageID)), 0)
			equal(t, "to be emitted", w.number(`SELECT COUNT(*) FROM saga_instances WHERE again_at IS NOT NULL`), 0)
			equal(t, "rescues", w.get(id).Rescues, 0)
			r.Failure = ""
			w.done(r)
		})
	}
}

// A look reads what is due and no saga that merely waits; many that are not ours do not hide one that is.
func TestUnansweredGetsPastOthers(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, rooms(&s))
	w.openSagas(2*duePage+50, time.Hour, time.Minute)
	w.exec(`UPDATE saga_instances SET version = 9, again_at = NOW(6) - INTERVAL 1 HOUR`)
	w.nothingWaits()
	_, m := w.awaitsHotel()
	w.exec(`UPDATE saga_instances SET again_at = NOW(6), awaited_since = NOW(6) - INTERVAL 5 MINUTE WHERE version = 1`)
	w.exec(`UPDATE outbox_events SET published_at = NOW(6) - INTERVAL 5 MINUTE`)
	w.alive()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	w.must(w.keeper(KeeperConfig{}).scanDeadlines(ctx))
	equal(t, "emitted again", w.number(sentAgain, []byte(m.MessageID)), 1)
}

// The saga's deadline that comes to nothing at a participant's pivot begins the step's anew, but no second
// copy goes out for it: it is the same command.
func TestUnansweredAtARemotePivot(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"), Within[trip](8*time.Minute),
		RemoteStep[trip, booking]("car", "cars", Pivot(), NothingToUndo(), Deadline(10*time.Minute)))...))
	w.nothingWaits()
	id, car := w.atCar()
	w.exec(publishSQL)
	w.elapse(6 * time.Minute)
	k := w.keeper(KeeperConfig{})
	w.scan(k)
	equal(t, "emitted again", w.number(sentAgain, []byte(car.MessageID)), 1)
	w.exec(publishSQL)
	w.exec(`UPDATE saga_instances SET deadline_at = NOW(6) - INTERVAL 1 SECOND, saga_deadline_at = NOW(6) - INTERVAL 1 SECOND`)
	w.scan(k)
	if left := time.Until(w.get(id).DeadlineAt); left < 9*time.Minute {
		t.Errorf("the step has %s left: its deadline does not begin anew", left)
	}
	w.elapse(7 * time.Minute)
	w.scan(k)
	equal(t, "rescues in the audit", w.number(`SELECT COUNT(*) FROM outbox_actions WHERE action = 'rescue'`), 1)
}

// Nor does the copy that goes out afterwards take back what the step was given.
func TestUnansweredAfterTheSagasDeadline(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"), Within[trip](4*time.Minute),
		RemoteStep[trip, booking]("car", "cars", Pivot(), NothingToUndo(), Deadline(10*time.Minute)))...))
	w.nothingWaits()
	id, car := w.atCar()
	w.exec(publishSQL)
	w.exec(`UPDATE saga_instances SET saga_deadline_at = saga_deadline_at - INTERVAL 245 SECOND`)
	w.elapse(245 * time.Second)
	k := w.keeper(KeeperConfig{})
	w.scan(k)
	anew := w.get(id).DeadlineAt
	w.elapse(time.Minute)
	w.scan(k)
	equal(t, "emitted again", w.number(sentAgain, []byte(car.MessageID)), 1)
	equal(t, "the step's deadline", w.get(id).DeadlineAt, anew.Add(-time.Minute))
}
