package saga

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"backstep/internal/sqltx"
)

// belated makes a saga one that has waited for its step for two minutes, one more than it may.
func (w *world) belated(id string) {
	w.t.Helper()
	w.wait(id, 2*time.Minute)
	w.exec(`UPDATE saga_instances SET deadline_at = awaited_since + INTERVAL 1 MINUTE WHERE id = ?`, []byte(id))
}

func timed(s *script) *Definition {
	return Define("trip", 1, append(s.hooks(), s.part("a"), s.part("b", Deadline(time.Minute), Retry(3, 1)))...)
}

// A deadline ends a step if the time was fair, and the step had all of it.
func TestDeadlines(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, timed(&s))
	type want struct {
		fires bool
		later time.Duration // it is put off by about as much
	}
	pending := `UPDATE outbox_events SET status = 'PENDING' WHERE status = 'PUBLISHED'`
	for _, tt := range []struct {
		name  string
		given func(id string)
		want  want
	}{
		{"the time is over", func(string) {}, want{fires: true}},
		{"nobody has consumed since the outage", func(string) {
			w.upFor(59 * time.Minute)
			w.exec(`DELETE FROM saga_consumers`)
		}, want{}},
		{"nobody has consumed for an hour since the outage", func(string) {
			w.upFor(61 * time.Minute)
			w.exec(`DELETE FROM saga_consumers`)
		}, want{fires: true}},
		{"its consumer has only just subscribed", func(string) {
			w.upFor(40 * time.Second)
			w.consumes("b", "n", unknown, 0)
		}, want{}},
		{"nobody knows what is up", func(string) { w.exec(`UPDATE saga_pulse SET beat_at = NOW(6) - INTERVAL 8 SECOND`) }, want{}},
		{"there never was a beat", func(string) { w.exec(`DELETE FROM saga_pulse`) }, want{}},
		{"all has just come up", func(string) { w.upFor(20 * time.Second) }, want{}},
		{"what the outage held up is not worked off", func(string) {
			w.upFor(40 * time.Second)
			w.consumes("b", "n", 50*time.Second, unknown)
		}, want{}},
		{"what the outage held up is worked off", func(string) {
			w.upFor(40 * time.Second)
			w.consumes("b", "n", 30*time.Second, unknown)
		}, want{fires: true}},
		{"nobody knows what is worked off", func(string) {
			w.upFor(59 * time.Minute)
			w.consumes("b", "n", unknown, unknown)
		}, want{}},
		{"nobody knows for an hour what is worked off", func(string) { w.consumes("b", "n", unknown, unknown) }, want{fires: true}},
		{"a backlog of hours", func(string) { w.consumes("b", "n", 25*time.Hour, unknown) }, want{}},
		{"another queue is not worked off", func(string) { w.consumes("a", "n", unknown, unknown) }, want{fires: true}},
		{"an outage took most of it", func(string) { w.exec(`UPDATE saga_pulse SET downtime_us = 100000000`) }, want{}},
		{"the command is not published", func(string) { w.exec(pending) }, want{later: 2 * time.Minute}},
		{"the command was refused", func(string) { w.exec(`UPDATE outbox_events SET status = 'PARKED'`) }, want{later: 2 * time.Minute}},
		{"the command waits for a worker that knows it", func(string) { w.exec(scheduleAllSQL) }, want{later: 2 * time.Minute}},
		{"the next attempt waits for its time", func(string) {
			w.exec(scheduleAllSQL)
			w.exec(`UPDATE saga_instances SET attempt = 2`)
		}, want{fires: true}},
		{"the next attempt is not published", func(string) {
			w.exec(pending)
			w.exec(`UPDATE saga_instances SET attempt = 2`)
		}, want{later: 2 * time.Minute}},
		{"the command was published late", func(string) {
			w.exec(`UPDATE outbox_events SET published_at = NOW(6) - INTERVAL 30 SECOND`)
		}, want{later: 90 * time.Second}},
		{"the command is swept", func(string) { w.exec(`DELETE FROM outbox_events`) }, want{fires: true}},
		{"the whole saga's time is over too", func(string) {
			w.exec(pending)
			w.exec(`UPDATE saga_instances SET saga_deadline_at = NOW(6) - INTERVAL 1 SECOND`)
		}, want{fires: true}},
		{"nobody here knows the definition", func(string) { w.exec(`UPDATE saga_instances SET version = 2`) }, want{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, table := range []string{"saga_consumers", "saga_instances", "saga_steps", "outbox_events", "scheduled_messages"} {
				w.exec(`DELETE FROM ` + table)
			}
			w.upFor(24 * time.Hour)
			w.consumes("b", "m", unknown, time.Minute)
			id := w.start("x")
			w.done(w.command())
			w.commands()
			w.belated(id)
			tt.given(id)
			before := w.get(id)
			k := w.keeper(KeeperConfig{Queues: map[string]func() Standing{"a": nil}})
			for range 2 { // once put off it is left alone
				w.must(k.scanDeadlines(t.Context()))
			}
			after := w.get(id)
			if fires := after.Status == Compensating; fires != tt.want.fires {
				t.Fatalf("it fires: %t, want %t; %+v", fires, tt.want.fires, after)
			}
			if tt.want.fires {
				if m := w.command(); m.RoutingKey != "a" {
					t.Errorf("what is awaited goes to %s", m.RoutingKey)
				}
				return
			}
			by := after.DeadlineAt.Sub(before.DeadlineAt)
			if off := by - tt.want.later; off < 0 || off > 10*time.Second {
				t.Errorf("it is put off by %s, want %s", by, tt.want.later)
			}
			if moved := after.AwaitedSince.Sub(before.AwaitedSince); moved != by {
				t.Errorf("it is awaited since %s later, want %s", moved, by)
			}
		})
	}
}

// Of a remote step it is the replies that say what became of it.
func TestDeadlineOfRemoteStepWaitsForReplies(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Define("trip", 1, RemoteStep[trip, booking]("hotel", "hotels", Deadline(time.Minute))))
	w.upFor(40 * time.Second)
	w.consumes("hotels", "theirs", unknown, unknown)
	w.consumes(RepliesQueue, "m", 50*time.Second, unknown)
	id := w.start("x")
	w.commands()
	w.belated(id)
	k := w.keeper(KeeperConfig{})
	w.scan(k)
	if d := w.get(id); d.Status != Running {
		t.Errorf("before the replies are worked off it is %s", d.Status)
	}
	w.consumes(RepliesQueue, "m", unknown, idleEnough)
	w.scan(k)
	if d := w.get(id); d.Status != Compensating {
		t.Errorf("after they are worked off it is %s", d.Status)
	}
	// Nobody here knows what became of a remote step: its command is not rescued as local ones are.
	w.wait(id, 2*time.Hour)
	w.upFor(24 * time.Hour)
	w.consumes("hotels", "m", unknown, time.Hour)
	w.rescue(w.keeper(KeeperConfig{Consumer: "m", Queues: map[string]func() Standing{"hotels": nil}}))
	if n := w.number(`SELECT COUNT(*) FROM outbox_events WHERE generation > 0`); n > 0 {
		t.Error("a command to another service was emitted again")
	}
}

// An hour in which database, broker or workers are away makes no deadline pass: it goes on with as
// much time as it had left.
func TestOutagesSuspendDeadlines(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, timed(&s))
	k := w.keeper(KeeperConfig{Settle: time.Nanosecond})
	ctx := t.Context()
	w.must(k.beatOnce(ctx))
	id := w.start("x")
	w.done(w.command())
	w.commands()
	// An hour goes by in which nobody beats; 10 s of the minute are left.
	w.wait(id, time.Hour+50*time.Second)
	w.exec(`UPDATE saga_instances SET deadline_at = awaited_since + INTERVAL 1 MINUTE`)
	w.exec(`UPDATE saga_pulse SET beat_at = NOW(6) - INTERVAL 1 HOUR`)
	look := func(want Status, what string) {
		t.Helper()
		w.consumes("b", "m", unknown, time.Minute)
		w.must(k.beatOnce(ctx))
		w.must(k.scanDeadlines(ctx))
		if d := w.get(id); d.Status != want {
			t.Errorf("%s it is %s", what, d.Status)
		}
	}
	look(Running, "after the outage")
	// What is made now has its deadline by the same clock.
	second := w.start("y")
	w.done(w.command())
	w.commands()
	d := w.get(second)
	if left := d.DeadlineAt.Sub(d.AwaitedSince); left < 50*time.Second || left > 70*time.Second {
		t.Errorf("awaited since %s, with a deadline at %s; want a minute", d.AwaitedSince, d.DeadlineAt)
	}
	if n := w.number(`SELECT TIMESTAMPDIFF(MINUTE, deadline_at, NOW(6)) FROM saga_instances WHERE id = ?`, []byte(second)); n < 57 {
		t.Errorf("it is kept as %d minutes ago, by a clock that is not an hour behind", n)
	}
	look(Running, "a little later")
	w.exec(`UPDATE saga_instances SET deadline_at = deadline_at - INTERVAL 11 SECOND, awaited_since = awaited_since - INTERVAL 11 SECOND WHERE id = ?`, []byte(id))
	w.exec(`UPDATE outbox_events SET published_at = published_at - INTERVAL 11 SECOND`)
	look(Compensating, "after the seconds that were left")
	if d := w.get(second); d.Status != Running {
		t.Errorf("the other is %s", d.Status)
	}
}

// Between its attempts a step keeps the deadline that it had.
func TestRetriesKeepTheDeadline(t *testing.T) {
	t.Parallel()
	var s script
	s.fail("b", errPassing)
	w := newWorld(t, timed(&s))
	id := w.start("x")
	w.done(w.command())
	before := w.get(id)
	w.done(w.command())
	if after := w.get(id); after.Attempt != 2 || !after.DeadlineAt.Equal(before.DeadlineAt) || before.DeadlineAt.IsZero() {
		t.Errorf("deadline of attempt %d at %s, want %s as before", after.Attempt, after.DeadlineAt, before.DeadlineAt)
	}
}

// Many whose time is not fair do not hide one whose time is.
func TestDeadlinesGetPastOthers(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, timed(&s))
	w.openSagas(duePage+50, time.Hour, time.Minute)
	w.exec(`UPDATE saga_instances SET version = 9, deadline_at = NOW(6) - INTERVAL 1 HOUR`)
	w.upFor(24 * time.Hour)
	id := w.start("x")
	w.done(w.command())
	w.commands()
	w.belated(id)
	k := w.keeper(KeeperConfig{})
	for range 2 {
		w.scan(k)
	}
	if d := w.get(id); d.Status != Compensating {
		t.Errorf("it is %s", d.Status)
	}
}

// Two workers that look at once end it once.
func TestDeadlinePassesOnce(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, timed(&s))
	w.upFor(24 * time.Hour)
	id := w.start("x")
	w.done(w.command())
	w.commands()
	w.belated(id)
	w.alive()
	errs := make(chan error)
	for range 4 {
		go func() { errs <- w.keeper(KeeperConfig{}).scanDeadlines(t.Context()) }()
	}
	for range 4 {
		w.must(<-errs)
	}
	w.command() // one
	err := sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		return errors.Join(w.engine.deadlinePassed(ctx, tx, nil), w.engine.deadlinePassed(ctx, tx, []string{"nobody"}))
	})
	w.must(err)
}

// A saga that cannot be ended, because its hook fails, does not keep others from it.
func TestDeadlineOfOneThatFails(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a", Deadline(time.Minute)))...))
	w.upFor(24 * time.Hour)
	var ids []string
	for _, name := range []string{"bad", "good"} {
		ids = append(ids, w.start(name))
	}
	w.commands()
	for _, id := range ids {
		w.belated(id)
	}
	s.fail("compensated", errPassing, errPassing) // together, and alone
	k := w.keeper(KeeperConfig{})
	w.alive()
	if err := k.scanDeadlines(t.Context()); err == nil || !strings.Contains(err.Error(), ids[0]) {
		t.Errorf("scanDeadlines = %v, want an error that names the saga", err)
	}
	if bad, good := w.get(ids[0]), w.get(ids[1]); bad.Status != Running || good.Status != Compensated {
		t.Errorf("the one that fails is %s, the other %s", bad.Status, good.Status)
	}
	if bad := w.get(ids[0]); !strings.Contains(bad.LastError, "try 1 of 5 to end it") || !strings.Contains(bad.LastError, errPassing.Error()) {
		t.Errorf("of the one that fails it is said: %q", bad.LastError)
	}
	w.belated(ids[0]) // the back-off is over
	w.scan(k)
	if d := w.get(ids[0]); d.Status != Compensated {
		t.Errorf("when the hook works again it is %s", d.Status)
	}
}
