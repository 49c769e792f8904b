package e2e

import (
	"context"
	"fmt"
	"maps"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

// TestDatabaseClockSteps has the database's clock step by minutes and by an hour, either way,
// under load and with two relays, whose own clock then is as much behind or ahead (B13). No lease
// changes hands, nothing is lost or out of order, nothing stalls. What is scheduled goes by the
// database's clock: it is due when that says so, once.
func TestDatabaseClockSteps(t *testing.T) {
	t.Parallel()
	const ttl = 3 * time.Second
	servers := testenv.ClockedDatabase(t)
	w := wheelOn(t, servers)
	relays := w.together("relay", 2, "BACKSTEP_RELAY_LEASE_TTL="+ttl.String())
	w.awaitQueues()
	w.share(relays...)
	f := newFlow(w, ttl)
	epochs := w.epochs()
	clock := time.Duration(0)
	step := func(to time.Duration, do func()) {
		t.Helper()
		f.during(fmt.Sprintf("the clock steps from %s to %s", clock, to), ttl+time.Second, func() {
			if err := servers.ShiftDatabaseClock(to); err != nil {
				t.Fatal(err)
			}
			clock = to
			do()
		})
		if now := w.epochs(); !maps.Equal(now, epochs) {
			t.Errorf("shards changed hands: their epochs were %v and are %v", epochs, now)
		}
	}
	// A lease that the clock could end, or keep, has ended by then.
	rest := func() { <-time.After(ttl + ttl/4) }

	w.schedule("in half an hour", 30*time.Minute)
	step(5*time.Minute, func() { w.punctual("5 minutes ahead", time.Second) })
	if w.scheduled() != 1 {
		t.Error("what is due in half an hour is not scheduled any more after 5 minutes")
	}
	step(-5*time.Minute, func() { w.punctual("5 minutes behind", time.Second) })
	step(time.Hour, func() {
		rest()
		w.due("what was due in half an hour", "in half an hour")
		w.punctual("an hour ahead", time.Second)
		w.schedule("in a second", time.Second)
	})
	// Due in a second, or in an hour and a second: as the clock has it.
	step(0, func() {})
	step(-time.Hour, func() {
		rest()
		w.punctual("an hour behind", time.Second)
	})
	step(0, func() {})
	step(time.Hour, func() { w.due("what was due in a second", "in a second") })
	f.verify()
	if n := f.copied(); n > 0 {
		t.Errorf("%d copies although nobody died", n)
	}
	for _, p := range relays {
		select {
		case <-p.done:
			t.Errorf("a relay ended: %v", p.err)
		default:
		}
	}
	stopAll(relays...)
}

// epochs returns how often each shard has changed hands.
func (w *wheel) epochs() map[int]uint64 {
	w.t.Helper()
	relays, free, err := outbox.Relays(w.t.Context(), w.db)
	if err != nil {
		w.t.Fatal(err)
	}
	epochs := map[int]uint64{}
	for _, r := range append(relays, outbox.RelayState{Shards: free}) {
		for _, s := range r.Shards {
			epochs[s.Shard] = s.Epoch
		}
	}
	return epochs
}

// schedule adds an event to be published later.
func (w *wheel) schedule(id string, after time.Duration) {
	w.t.Helper()
	err := sqltx.WithTx(w.t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		return outbox.Schedule(ctx, tx, outbox.Delayed{After: after, Message: message.Message{
			Properties: message.Properties{MessageID: id, Type: "test"}, Exchange: message.EventsExchange, RoutingKey: "later",
		}})
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *wheel) scheduled() int {
	w.t.Helper()
	return w.count(`SELECT COUNT(*) FROM scheduled_messages`)
}

// due waits until a scheduled message is published, and demands that it is once.
func (w *wheel) due(what, id string) {
	w.t.Helper()
	w.eventually(20*time.Second, what+" is published", func() error {
		switch rows := w.count(`SELECT COUNT(*) FROM outbox_events WHERE message_id = ? AND status = 'PUBLISHED'`, []byte(id)); rows {
		case 1:
			return nil
		default:
			return fmt.Errorf("%d such rows are, %d messages are scheduled", rows, w.scheduled())
		}
	})
}

// punctual schedules a message and demands that it is not early.
func (w *wheel) punctual(id string, after time.Duration) {
	w.t.Helper()
	began := time.Now()
	w.schedule(id, after)
	w.due("what is due in "+after.String(), id)
	if took := time.Since(began); took < after || took > after+2*time.Second {
		w.t.Errorf("%s: a message due in %s was published after %s", id, after, took)
	}
}
