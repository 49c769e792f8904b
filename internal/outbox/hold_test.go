package outbox_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// door answers the publishes to one routing key with a kind that can be changed; all others
// are confirmed.
type door struct {
	fake
	key  string
	kind atomic.Int64
}

func newDoor(key string, kind message.ResultKind) *door {
	d := &door{key: key}
	d.set(kind)
	d.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		if m.RoutingKey != key {
			c.answer(tag, message.Confirmed, "")
			return nil
		}
		kind := message.ResultKind(d.kind.Load())
		c.answer(tag, kind, kind.String()+" by the door")
		return nil
	}
	return d
}

func (d *door) set(kind message.ResultKind) { d.kind.Store(int64(kind)) }

// parkings notes when each message was parked.
type parkings struct{ when chan parking }

type parking struct {
	id, reason string
	at         time.Time
}

func newParkings() *parkings { return &parkings{when: make(chan parking, 10_000)} }

func (p *parkings) parked(_ context.Context, _ *sqltx.Tx, m *message.Message, reason string) error {
	p.when <- parking{m.MessageID, reason, time.Now()}
	return nil
}

func (p *parkings) next(t testing.TB) parking {
	t.Helper()
	select {
	case e := <-p.when:
		return e
	case <-time.After(patience):
		t.Fatal("nothing was parked")
	}
	panic("unreachable")
}

// The row that tries out a destination may be parked for a reason of its own. Another has to
// try then.
func TestProbeThatIsParkedLeavesTheHold(t *testing.T) {
	t.Parallel()
	db, d, parked := database(t), newDoor("q", message.Nacked), newParkings()
	start(t, db, d, outbox.Config{Parked: parked.parked})
	add(t, db, command("q", "good"))
	eventually(t, "the queue is found full", func() bool { return d.times("good") > 0 })
	exec(t, db, insertForeignSQL, "bad", `{}`, `{"a":{"$nope":"1"}}`, "")
	if p := parked.next(t); p.id != "bad" {
		t.Errorf("%s was parked, want bad", p.id)
	}
	d.set(message.Confirmed)
	published(t, db, 1)
}

// B27: a queue that stays full is tried again with growing waits, however long it takes, and
// nothing is parked.
func TestFullForLongIsNoBusyLoop(t *testing.T) {
	t.Parallel()
	db, d := database(t), newDoor("q", message.Nacked)
	const parkAfter = 200 * time.Millisecond
	start(t, db, d, outbox.Config{ParkAfter: parkAfter})
	add(t, db, command("q", "a"), command("q", "b"), command("q", "c"))
	eventually(t, "the queue is found full", func() bool { return len(d.all()) >= 3 })
	never(t, "a full queue is hammered", 10*parkAfter, func() bool { return len(d.all()) > 30 })
	if n := number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE status = 'PENDING' AND attempts = 0`); n != 3 {
		t.Errorf("%d rows are pending without an attempt, want 3", n)
	}
	d.set(message.Confirmed)
	published(t, db, 3)
}

// B32: how often a row is tried that nobody takes does not depend on how many relays there are. A
// destination is tried by each relay that has rows for it, by one row at a time.
func TestRelaysDoNotMultiplyAttempts(t *testing.T) {
	t.Parallel()
	// The waits are at least 50, 100, 200, 400, 800, 1600 and then 2500 ms.
	const during, attempts = 5 * time.Second, 8
	for _, tt := range []struct{ relays, rows int }{{1, 1}, {4, 1}, {1, 64}, {4, 64}} {
		t.Run(fmt.Sprintf("%d relays %d rows", tt.relays, tt.rows), func(t *testing.T) {
			t.Parallel()
			db, d := database(t), newDoor("q", message.Returned)
			var relays []*relay
			for range tt.relays {
				relays = append(relays, start(t, db, d, outbox.Config{}))
			}
			eventually(t, "they share the shards", func() bool {
				for _, r := range relays {
					if r.Shards() != message.Shards/tt.relays {
						return false
					}
				}
				return true
			})
			var msgs []message.Message
			for _, id := range names("m", tt.rows) {
				msgs = append(msgs, command("q", id))
			}
			add(t, db, msgs...)
			// All may be in flight when the first is returned, and one goes to probe then.
			most := tt.rows + min(tt.relays, tt.rows)*(attempts-1)
			never(t, "it is tried more often", during, func() bool { return len(d.all()) > most })
			n := len(d.all())
			t.Logf("%d attempts in %s, at most %d", n, during, most)
			if n < tt.rows+2 {
				t.Errorf("only %d attempts: the test shows nothing", n)
			}
		})
	}
}

// Rows that are in flight together meet a full queue together: that is one refusal, and the
// queue is tried again soon.
func TestManyNacksAtOnceAreOneRefusal(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	const n = 100
	tags := make(chan uint64, n) // of the first n, nacked together
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		if len(f.all()) > n {
			c.answer(tag, message.Confirmed, "")
			return nil
		}
		tags <- tag
		if len(tags) == n {
			for range n {
				c.answer(<-tags, message.Nacked, "full")
			}
		}
		return nil
	}
	var msgs []message.Message
	for _, id := range names("m", n) {
		msgs = append(msgs, command("q", id))
	}
	add(t, db, msgs...)
	start(t, db, f, outbox.Config{})
	eventually(t, "all have met the full queue", func() bool { return len(f.all()) >= n })
	began := time.Now()
	published(t, db, n)
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("the queue was tried again only after %s", took)
	}
}

// Only time in which the broker says that it has no queue for a row counts towards parking it.
func TestOnlyReturnsCountTowardsParking(t *testing.T) {
	t.Parallel()
	const parkAfter = 600 * time.Millisecond
	run := func(t *testing.T, kind message.ResultKind) (*door, *parkings) {
		db, d, parked := database(t), newDoor("q", kind), newParkings()
		start(t, db, d, outbox.Config{ParkAfter: parkAfter, Parked: parked.parked})
		add(t, db, command("q", "a"))
		eventually(t, "the row was tried", func() bool { return d.times("a") > 1 })
		return d, parked
	}
	t.Run("not an outage", func(t *testing.T) {
		t.Parallel()
		var away atomic.Bool
		db, d, parked := database(t), newDoor("q", message.Returned), newParkings()
		d.ReadyFunc = func() bool { return !away.Load() }
		start(t, db, d, outbox.Config{ParkAfter: parkAfter, Parked: parked.parked})
		add(t, db, command("q", "a"))
		eventually(t, "the row was tried", func() bool { return d.times("a") > 1 })
		away.Store(true)
		never(t, "a row is parked while the broker is away", 2*parkAfter, func() bool { return len(parked.when) > 0 })
		n := d.times("a")
		away.Store(false)
		if p := parked.next(t); d.times("a") < n+2 {
			t.Errorf("parked (%s) at the first return after an outage", p.reason)
		}
	})
	t.Run("not a full queue", func(t *testing.T) {
		t.Parallel()
		d, parked := run(t, message.Nacked)
		never(t, "a row is parked because its queue is full", 2*parkAfter, func() bool { return len(parked.when) > 0 })
		n := d.times("a")
		d.set(message.Returned)
		if p := parked.next(t); d.times("a") < n+2 {
			t.Errorf("parked (%s) at the first return", p.reason)
		}
	})
}

// However long others have been returned: a row is not parked before it has been there for
// ParkAfter itself. It does not matter whether the database's clock has stepped meanwhile, so
// that the row seems to be older, or not to have been created yet.
func TestLateRowsAreTriedForAsLong(t *testing.T) {
	t.Parallel()
	db, d, parked := database(t), newDoor("q", message.Returned), newParkings()
	const parkAfter = 500 * time.Millisecond
	start(t, db, d, outbox.Config{ParkAfter: parkAfter, Parked: parked.parked})
	for i := range 3 {
		id := fmt.Sprintf("m%d", i)
		added := time.Now()
		err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
			if err := outbox.Add(ctx, tx, command("q", id)); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `UPDATE outbox_events SET created_at = created_at + INTERVAL ? HOUR WHERE message_id = ?`, 1-i, []byte(id))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if p := parked.next(t); p.id != id || p.at.Sub(added) < parkAfter {
			t.Errorf("%s was parked after %s, want %s after %s", p.id, p.at.Sub(added), id, parkAfter)
		}
	}
}

// 100,000 rows nobody wants are not tried in turn, 15 minutes each.
func TestManyUnroutableRowsAreParkedTogether(t *testing.T) {
	t.Parallel()
	db, d, parked := database(t), newDoor("q", message.Returned), newParkings()
	const n, parkAfter = 200, time.Second
	var msgs []message.Message
	for _, id := range names("m", n) {
		msgs = append(msgs, command("q", id))
	}
	start(t, db, d, outbox.Config{ParkAfter: parkAfter, Parked: parked.parked, Window: 50, Page: 100})
	add(t, db, msgs...)
	eventually(t, "all rows are parked", func() bool { return having(t, db, "PARKED") == n })
	// In turn, each row would have been returned several times before it was parked.
	if returns := number(t, db, `SELECT SUM(attempts) FROM outbox_events`); returns >= n {
		t.Errorf("%d returns were charged before %d rows were parked: they were tried in turn", returns, n)
	}
}

// The rows behind one that waits for its destination wait with it. They must not fill the
// memory that others need.
func TestKeysBehindAHoldDelayNobody(t *testing.T) {
	t.Parallel()
	db, d := database(t), newDoor("full", message.Nacked)
	start(t, db, d, outbox.Config{Window: 10})
	var msgs []message.Message
	for _, key := range names("k", 50) {
		msgs = append(msgs, keyed(command("full", key+"-head"), key))
		for i := range 5 {
			msgs = append(msgs, keyed(command("q", fmt.Sprintf("%s-%d", key, i)), key))
		}
	}
	add(t, db, msgs...)
	eventually(t, "the queue is found full", func() bool { return len(d.all()) > 0 })
	add(t, db, command("q", "free"))
	eventually(t, "a row of another key is published", func() bool { return d.times("free") > 0 })
	if n := number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE status = 'PUBLISHED' AND message_id <> 'free'`); n != 0 {
		t.Errorf("%d rows overtook the head of their key", n)
	}
	d.set(message.Confirmed)
	published(t, db, len(msgs)+1)
}
