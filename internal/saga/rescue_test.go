package saga

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
)

// wait makes a saga one that has changed so long ago, and whose command was published then.
func (w *world) wait(id string, ago time.Duration) {
	w.t.Helper()
	w.exec(`UPDATE saga_instances SET updated_at = NOW(6) - INTERVAL ? MICROSECOND, awaited_since = updated_at WHERE id = ?`, us(ago), []byte(id))
	w.exec(`UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6) - INTERVAL ? MICROSECOND
             WHERE message_id = (SELECT command_id FROM saga_instances WHERE id = ?)`, us(ago), []byte(id))
}

// watched returns a keeper in a world that has been up for so long. It is the consumer "m" of a queue
// out of which nothing has come for an hour.
func (w *world) watched(queue string, up time.Duration) *Keeper {
	w.t.Helper()
	w.upFor(up)
	w.consumes(queue, "m", unknown, time.Hour)
	return w.keeper(KeeperConfig{Consumer: "m", Queues: map[string]func() Standing{queue: nil}})
}

// again is how many commands were emitted again.
func (w *world) again() int {
	w.t.Helper()
	return w.number(`SELECT COUNT(*) FROM outbox_events WHERE generation > 0`)
}

// generation is how often a command was emitted again.
func (w *world) generation(m message.Message) int {
	w.t.Helper()
	return w.number(`SELECT generation FROM outbox_events WHERE message_id = ?`, []byte(m.MessageID))
}

// schedule moves the published commands to what waits for its time.
const scheduleAllSQL = `
INSERT INTO scheduled_messages (due_at, message_id, ordering_key, exchange, routing_key, properties, headers, payload)
SELECT NOW(6) + INTERVAL 1 HOUR, message_id, ordering_key, exchange, routing_key, properties, headers, payload FROM outbox_events`

// A command is emitted again if it must have been lost, and only then.
func TestRescue(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a", "b"))
	const limit = time.Minute
	by := func(consumer string, latest, idle time.Duration) func() {
		return func() { w.consumes("a", consumer, latest, idle) }
	}
	but := func(query string) func() { return func() { w.exec(query) } }
	lost := by("m", unknown, time.Hour) // if nothing else is the matter
	type given []func()
	for _, tt := range []struct {
		name  string
		waits time.Duration // since the command was published
		given given
		want  bool
	}{
		{"nothing comes out of the queue", 2 * limit, given{by("m", unknown, limit+time.Second)}, true},
		{"nothing has for a while", 2 * limit, given{by("m", unknown, limit-10*time.Second)}, false},
		{"it was published just now", limit - 10*time.Second, given{by("m", 0, time.Hour)}, false},
		{"what came later was delivered", 2 * limit, given{by("m", limit-10*time.Second, unknown)}, true},
		{"what came a little later was delivered", 2 * limit, given{by("m", limit+10*time.Second, unknown)}, false},
		{"what came earlier is delivered: a backlog", 20 * limit, given{by("m", 30*limit, unknown)}, false},
		{"nobody knows what is delivered", 20 * limit, given{by("m", unknown, unknown)}, false},
		{"one consumer is behind", 2 * limit, given{by("m", 0, unknown), by("n", 3*limit, unknown)}, false},
		{"the one that is behind is dead", 2 * limit, given{by("m", 0, unknown), by("n", 3*limit, unknown),
			but(`UPDATE saga_consumers SET beat_at = NOW(6) - INTERVAL 20 SECOND WHERE consumer = 'n'`)}, true},
		{"nobody consumes", 2 * limit, nil, false},
		{"somebody else consumes it", 2 * limit, given{by("n", unknown, time.Hour)}, false},
		{"somebody else consumes it, and it is hours ago", 3 * time.Hour, given{by("n", unknown, time.Hour), func() { w.consumes("b", "m", unknown, time.Hour) }}, false},
		{"it is another's turn", 2 * limit, given{lost, by("l", unknown, time.Hour)}, false},
		{"it is another's turn, who leaves it", 20 * limit, given{lost, by("l", unknown, time.Hour)}, true},
		{"it is not published", 2 * limit, given{lost, but(`UPDATE outbox_events SET status = 'PENDING'`)}, false},
		{"it was refused", 2 * limit, given{lost, but(`UPDATE outbox_events SET status = 'PARKED'`)}, false},
		{"it waits for its time", 2 * limit, given{lost, but(scheduleAllSQL)}, false},
		{"nobody knows what is up", 2 * limit, given{lost, but(`UPDATE saga_pulse SET beat_at = NOW(6) - INTERVAL 8 SECOND`)}, false},
		{"an operator has it", 2 * limit, given{lost, but(`UPDATE saga_instances SET status = 'MANUAL_ACTION'`)}, false},
		{"another release has its steps", 2 * limit, given{lost, but(`UPDATE saga_instances SET plan = 'x'`)}, false},
		{"its input does not decode here", 2 * limit, given{lost, but(`UPDATE saga_instances SET payload = '{"Name":5}'`)}, true},
		{"a backlog of more than an hour", time.Hour + limit, given{by("m", 2*time.Hour, unknown)}, true},
		{"a backlog of more than an hour, for the second time", time.Hour + limit,
			given{by("m", 2*time.Hour, unknown), but(`UPDATE saga_instances SET rescues = 1`)}, false},
		{"a backlog of more than two hours, for the second time", 2*time.Hour + limit,
			given{by("m", 3*time.Hour, unknown), but(`UPDATE saga_instances SET rescues = 1`)}, true},
		{"published late, before an outage", 3 * time.Hour,
			given{but(`UPDATE outbox_events SET published_at = NOW(6) - INTERVAL 90 MINUTE`), by("m", 2*time.Hour, unknown), func() { w.upFor(30 * time.Minute) }}, false},
		{"a backlog of an outage", 3 * time.Hour, given{by("m", 4*time.Hour, unknown), func() { w.upFor(limit) }}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, table := range []string{"saga_consumers", "saga_instances", "outbox_events", "scheduled_messages", "outbox_actions"} {
				w.exec(`DELETE FROM ` + table)
			}
			id := w.start("x")
			w.upFor(24 * time.Hour)
			w.wait(id, tt.waits)
			for _, happens := range tt.given {
				happens()
			}
			var rung uint16
			k := w.keeper(KeeperConfig{
				Consumer: "m", Queues: map[string]func() Standing{"a": nil, "b": nil}, RescueAfter: limit,
				Committed: func(shards uint16) { rung |= shards },
			})
			before := w.get(id)
			for range 2 { // the second finds it on its way
				w.must(k.rescue(t.Context()))
			}
			again := w.number(`SELECT COUNT(*) FROM outbox_events WHERE status = 'PENDING' AND generation = 1 AND message_id = ?`, []byte(before.CommandID))
			if (again == 1) != tt.want {
				t.Errorf("emitted again: %t, want %t", again == 1, tt.want)
			}
			after := w.get(id)
			if !tt.want {
				equal(t, "the saga", after, before)
				return
			}
			if after.Rescues != before.Rescues+1 || after.CommandID != before.CommandID || !after.UpdatedAt.After(before.UpdatedAt) || rung != 1<<message.Shard(id) {
				t.Errorf("after the rescue: %+v, rung for %b", after, rung)
			}
			if n := w.number(`SELECT COUNT(*) FROM outbox_actions WHERE action = 'rescue' AND message_id = ?`, []byte(before.CommandID)); n != 1 {
				t.Errorf("%d entries in the audit, want 1", n)
			}
		})
	}
}

// A command whose row has been swept is made anew, with the id it had and in the trace of its saga.
// It may have been published just before it was missed, so it is waited for once more.
func TestRescueOfWhatIsSwept(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a", "b"))
	id := w.start("x")
	w.done(w.command())
	lost := w.command()
	w.exec(`UPDATE saga_instances SET trace_id = '0af7651916cd43dd8448eb211c80319c'`)
	w.wait(id, 2*time.Minute)
	w.exec(`DELETE FROM outbox_events`)
	k := w.watched("b", time.Hour)
	w.rescue(k)
	if n := len(w.outbox()); n > 0 {
		t.Fatalf("%d messages although it may be on its way", n)
	}
	for command, g := range k.gone {
		g.since = g.since.Add(-2 * time.Minute)
		k.gone[command] = g
	}
	w.rescue(k)
	m := w.command()
	if m.MessageID != lost.MessageID || m.RoutingKey != "b" || m.OrderingKey != lost.OrderingKey || string(m.Body) != string(lost.Body) || !m.Mandatory {
		t.Errorf("emitted again: %+v, lost: %+v", m, lost)
	}
	if trace := m.Headers.String("traceparent"); !strings.HasPrefix(trace, "00-0af7651916cd43dd8448eb211c80319c-") {
		t.Errorf("it is in the trace %q", trace)
	}
	if d := w.get(id); d.Rescues != 1 {
		t.Errorf("%d rescues, want 1", d.Rescues)
	}
	w.done(m)
	if d := w.get(id); d.Status != Completed || d.Rescues != 0 {
		t.Errorf("after it was delivered: %+v", d)
	}
	w.rescue(k)
	if n := len(w.outbox()); n > 0 {
		t.Errorf("%d messages after the end", n)
	}
}

// That its input does not decode is for whoever gets the command to say: it goes out all the same.
func TestRescueOfWhatDoesNotDecode(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a"))
	id := w.start("x")
	lost := w.command()
	w.exec(`UPDATE saga_instances SET payload = '{"Name":5}'`)
	w.wait(id, 2*time.Minute)
	w.exec(`DELETE FROM outbox_events`)
	w.upFor(time.Hour)
	w.consumes("a", "m", unknown, time.Hour)
	k := w.keeper(KeeperConfig{Consumer: "m", Queues: map[string]func() Standing{"a": nil}})
	w.rescue(k)
	for command, g := range k.gone {
		g.since = g.since.Add(-2 * time.Minute)
		k.gone[command] = g
	}
	w.rescue(k)
	m := w.command()
	equal(t, "command, rescues", []any{m.MessageID, w.get(id).Rescues}, []any{lost.MessageID, 1})
	equal(t, "what becomes of it", w.deliver(m)[0].Kind, message.Parked)
}

// What is lost again and again is an operator's matter. If it comes after all, the saga goes on.
func TestRescuesWithoutProgress(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a", "b"))
	id := w.start("x")
	first := w.command()
	k := w.watched("a", time.Hour)
	for i := range maxRescues + 2 {
		w.wait(id, 2*time.Minute)
		w.rescue(k)
		d := w.get(id)
		if want := i+1 <= maxRescues; (d.Status == Running) != want || want && d.Rescues != i+1 {
			t.Fatalf("after %d looks: %s, %d rescues", i+1, d.Status, d.Rescues)
		}
	}
	d := w.get(id)
	if d.Status != ManualAction || d.CommandID != first.MessageID || !strings.Contains(d.LastError, "queue a 6 times") {
		t.Errorf("in the end: %+v", d)
	}
	equal(t, "events", one(t, "events", w.outbox()).RoutingKey, "saga.manual_action")
	if n := w.generation(first); n != maxRescues {
		t.Errorf("emitted again %d times, want %d", n, maxRescues)
	}
	w.done(first)
	w.run()
	if d := w.get(id); d.Status != Completed {
		t.Errorf("after it came: %+v", d)
	}
}

// A call that kills its worker is begun each time its command comes: that is no progress.
func TestRescuesOfACall(t *testing.T) {
	t.Parallel()
	for _, direction := range []Direction{Execute, Compensate} {
		t.Run(string(direction), func(t *testing.T) {
			t.Parallel()
			s, d := &script{}, &desk{}
			w := newWorld(t, s.paid(d, "b"))
			id, m := w.atDesk("x")
			if direction == Compensate {
				w.done(w.outside(m))
				s.fail("b", Fail("no"))
				w.done(w.command())
				m = w.command()
			}
			w.upFor(24 * time.Hour)
			w.consumes("pay", "m", unknown, time.Hour)
			k := w.keeper(KeeperConfig{Consumer: "m", Queues: map[string]func() Standing{"pay": nil}})
			for n := range maxRescues {
				w.leave(m)
				w.wait(id, 2*time.Hour)
				w.rescue(k)
				equal(t, "rescues", w.get(id).Rescues, n+1)
			}
			w.leave(m)
			w.wait(id, 2*time.Hour)
			w.rescue(k)
			equal(t, "status", w.get(id).Status, ManualAction)
			equal(t, "calls", w.journal(id, direction), "OPEN 6")
			w.leave(m) // it came out of the queue after all
			equal(t, "rescues of what came back", w.get(id).Rescues, 0)
			w.wait(id, 2*time.Hour)
			w.rescue(k)
			w.done(w.outside(m))
			equal(t, "rescues of the next", w.get(id).Rescues, 0)
		})
	}
}

// What somebody else has emitted again meanwhile, or what has been delivered, is left alone.
func TestRescueLooksAgain(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a", "b"))
	id := w.start("x")
	m := w.command()
	w.wait(id, 2*time.Minute)
	k := w.watched("a", time.Hour)
	v, err := k.look(t.Context())
	w.must(err)
	page, err := k.open(t.Context(), Running, v.until["a"])
	w.must(err)
	lost, err := k.lost(t.Context(), page, v)
	w.must(err)
	one(t, "lost commands", lost)
	w.exec(`UPDATE saga_instances SET status = 'MANUAL_ACTION'`)
	w.must(k.emitAgain(t.Context(), lost, v))
	equal(t, "an operator has it: emitted again", w.generation(m), 0)
	w.exec(`UPDATE saga_instances SET status = 'RUNNING'`)
	emit := func(what string) {
		t.Helper()
		w.must(k.emitAgain(t.Context(), lost, v))
		if n := w.generation(m); n != 1 {
			t.Errorf("%s: emitted again %d times, want once", what, n)
		}
	}
	w.rescue(w.watched("a", time.Hour))
	emit("it is on its way")
	w.exec(`UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6)`)
	emit("it is published")
	if d := w.get(id); d.Rescues != 1 {
		t.Errorf("%d rescues, want 1", d.Rescues)
	}
	w.exec(`UPDATE outbox_events SET published_at = NOW(6) - INTERVAL 2 MINUTE`)
	w.done(m)
	emit("it was delivered")
}

// openSagasSQL makes sagas that await a command, changed one after the other within a time that
// ended so long ago.
const openSagasSQL = `
INSERT INTO saga_instances (id, type, version, correlation_id, status, command_id, payload, awaited_since, updated_at)
WITH RECURSIVE n (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < 99)
SELECT CONCAT('saga-', i), 'trip', 1, CONCAT('c-', i), 'RUNNING', CONCAT('command-', i), '{"Name":"x"}',
       NOW(6) - INTERVAL ? MICROSECOND, NOW(6) - INTERVAL ? + (? - i) * ? MICROSECOND
  FROM (SELECT a.n * 10000 + b.n * 100 + c.n AS i FROM n AS a, n AS b, n AS c WHERE a.n < 3) AS numbers
 WHERE i < ?`

// openSagas makes n of them, the last of which has changed longest ago.
func (w *world) openSagas(n int, ago, span time.Duration) {
	w.t.Helper()
	w.exec(openSagasSQL, us(ago), us(ago), n, us(span)/int64(n), n)
}

// A backlog, however long, is left alone while workers, however slow, take from it in its order:
// nothing is emitted again, and no saga is so much as read. What was lost among it is found as soon
// as they have come past it.
func TestBacklogIsNotAmplified(t *testing.T) {
	t.Parallel()
	const n = 20_000
	var s script
	w := newWorld(t, s.define("a"))
	// They were published within ten minutes, the last one two minutes ago.
	w.openSagas(n, 2*time.Minute, 10*time.Minute)
	w.exec(`
INSERT INTO outbox_events (message_id, ordering_key, exchange, routing_key, properties, headers, payload, status, published_at)
SELECT command_id, id, 'backstep.commands', 'a', '{}', '{}', payload, 'PUBLISHED', updated_at FROM saga_instances`)
	k := w.watched("a", 50*time.Minute)
	for at := 12 * time.Minute; at >= 2*time.Minute; at -= time.Minute {
		// One has come to what was published then; the other is a little ahead.
		w.exec(`DELETE FROM saga_instances WHERE updated_at < NOW(6) - INTERVAL ? MICROSECOND`, us(at))
		w.consumes("a", "m", at, unknown)
		w.consumes("a", "n", max(at-30*time.Second, 0), unknown)
		w.alive()
		v, err := k.look(t.Context())
		w.must(err)
		if v.until["a"].IsZero() {
			t.Fatal("nobody can tell what was delivered: the test shows nothing")
		}
		page, err := k.open(t.Context(), Running, v.until["a"])
		w.must(err)
		if len(page) > 0 {
			t.Errorf("%d sagas are read of a backlog of %s", len(page), at)
		}
		w.rescue(k)
	}
	if again := w.again(); again > 0 {
		t.Errorf("%d commands were emitted again", again)
	}

	w.exec(`INSERT INTO saga_instances (id, type, version, correlation_id, status, command_id, payload, awaited_since, updated_at)
            VALUES ('lost', 'trip', 1, 'lost', 'RUNNING', 'command-100', '{"Name":"x"}', NOW(6) - INTERVAL 9 MINUTE, NOW(6) - INTERVAL 9 MINUTE)`)
	w.exec(`UPDATE outbox_events SET published_at = NOW(6) - INTERVAL 9 MINUTE WHERE message_id = 'command-100'`)
	w.rescue(k)
	if again := w.again(); again != 1 {
		t.Errorf("%d commands were emitted again, want the lost one", again)
	}
}

// Many that wait for something else do not hide one that is lost, nor does it take a look more than
// it may read.
func TestRescueGetsPastWhatWaits(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a"))
	const n = maxOpen + 2*openPage
	w.openSagas(n, 2*time.Minute, 10*time.Minute)
	w.exec(`
INSERT INTO outbox_events (message_id, ordering_key, exchange, routing_key, properties, headers, payload)
SELECT command_id, id, 'backstep.commands', 'a', '{}', '{}', payload FROM saga_instances`)
	w.exec(`UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6) - INTERVAL 2 MINUTE WHERE message_id = ?`, fmt.Appendf(nil, "command-%d", n-1))
	k := w.watched("a", 50*time.Minute)
	w.rescue(k)
	if w.again() != 0 {
		t.Error("one look has read more than it may: the test shows nothing, or bounds have changed")
	}
	w.rescue(k)
	if n := w.again(); n != 1 {
		t.Errorf("%d commands were emitted again, want the lost one", n)
	}
	w.rescue(k)
	w.rescue(k)
	if n := w.number(`SELECT MAX(generation) FROM outbox_events`); n != 1 {
		t.Errorf("emitted again %d times, want once", n)
	}
}

// Nor do many that have changed at the same moment: a page goes on behind the last one's id.
func TestRescueGetsPastWhatWaitsSinceOneMoment(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a"))
	w.openSagas(openPage+50, 2*time.Minute, 0)
	w.exec(`UPDATE saga_instances SET updated_at = NOW(6) - INTERVAL 2 MINUTE`)
	w.exec(`
INSERT INTO outbox_events (message_id, ordering_key, exchange, routing_key, properties, headers, payload)
SELECT command_id, id, 'backstep.commands', 'a', '{}', '{}', payload FROM saga_instances`)
	w.exec(`UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6) - INTERVAL 2 MINUTE WHERE message_id = 'command-99'`) // the last id
	w.rescue(w.watched("a", 50*time.Minute))
	equal(t, "emitted again", w.again(), 1)
}

// Run does it all by itself, and ends.
func TestKeeperRuns(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a"))
	id := w.start("x")
	w.wait(id, time.Minute)
	began := time.Now()
	rung := make(chan uint16, 10)
	k := w.keeper(KeeperConfig{RescueAfter: 500 * time.Millisecond, Committed: func(shards uint16) {
		if shards != 0 {
			rung <- shards
		}
	}, Queues: map[string]func() Standing{"a": func() Standing { return Standing{Subscribed: true, Idle: time.Since(began)} }}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- k.Run(ctx) }()
	select {
	case <-rung:
	case <-time.After(20 * time.Second):
		t.Error("no rescue within 20 s")
	}
	cancel()
	w.must(<-done)
	if d := w.get(id); d.Rescues == 0 {
		t.Errorf("after it has run: %+v", d)
	}
	if w.pulse().beat.IsZero() {
		t.Error("no pulse")
	}
}
