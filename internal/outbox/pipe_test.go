package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
)

func commands(queue string, ids []string) (msgs []message.Message) {
	for _, id := range ids {
		msgs = append(msgs, command(queue, id))
	}
	return msgs
}

// B10: while an alarm blocks the connection nothing is written to it: the write would wait,
// and everything else with it.
func TestNothingIsPublishedWhileBlocked(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	var blocked atomic.Bool
	f.ReadyFunc = func() bool { return !blocked.Load() }
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		if blocked.Load() {
			t.Errorf("%s was published while the connection was blocked", m.MessageID)
		}
		if m.MessageID == "m50" {
			blocked.Store(true)
		}
		c.answer(tag, message.Confirmed, "")
		return nil
	}
	add(t, db, commands("q", names("m", 100))...)
	start(t, db, f, outbox.Config{Window: 10})
	eventually(t, "the alarm", blocked.Load)
	eventually(t, "what was confirmed is marked", func() bool { return having(t, db, "PUBLISHED") == len(f.all()) })
	never(t, "a publish", 300*time.Millisecond, func() bool { return len(f.all()) == 100 })
	blocked.Store(false)
	published(t, db, 100)
}

// A confirm that does not come is no refusal: published again, with the same id, and no
// attempt is spent. And a queue that cannot confirm does not take the window from all others.
func TestConfirmsThatDoNotCome(t *testing.T) {
	t.Parallel()
	const timeout = 300 * time.Millisecond
	db, f := database(t), &fake{}
	var stuck atomic.Bool
	stuck.Store(true)
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		if m.RoutingKey != "stuck" || !stuck.Load() {
			c.answer(tag, message.Confirmed, "")
		}
		return nil
	}
	start(t, db, f, outbox.Config{Window: 5, ConfirmTimeout: timeout})
	add(t, db, commands("stuck", names("s", 20))...)
	eventually(t, "the window is full", func() bool { return len(f.all()) >= 5 })
	eventually(t, "a row is published again", func() bool { return len(f.all()) > 5 })
	add(t, db, commands("q", names("m", 20))...)
	eventually(t, "others are published", func() bool { return having(t, db, "PUBLISHED") == 20 })
	f.look(func() {
		if f.inFlight > 1 {
			t.Errorf("%d rows of a queue that does not confirm are in flight, want one that tries", f.inFlight)
		}
	})
	stuck.Store(false)
	published(t, db, 40)
	if n := number(t, db, `SELECT SUM(attempts) FROM outbox_events`); n != 0 {
		t.Errorf("%d attempts were spent", n)
	}
}

// B26: a relay that waits for a slow broker has no transaction open and no row locked, so neither
// writers nor other relays wait with it.
func TestSlowBrokerHoldsNoLocks(t *testing.T) {
	t.Parallel()
	db, slow := database(t), &fake{PublishFunc: func(*fakeChannel, uint64, *message.Message) error { return nil }}
	one := start(t, db, slow, outbox.Config{DrainTimeout: time.Millisecond})
	eventually(t, "it has all shards", func() bool { return one.Shards() == message.Shards })
	const rows = 3
	add(t, db, commands("q", names("m", rows))...)
	eventually(t, "they are in flight", func() bool { return len(slow.all()) == rows })
	exec(t, db, `SELECT id FROM outbox_events FOR UPDATE NOWAIT`)
	quick := &fake{}
	two := start(t, db, quick, outbox.Config{})
	eventually(t, "another relay gets shards of which nothing is in flight", func() bool { return two.Shards() >= 8-rows })
	add(t, db, commands("q", names("n", 200))...) // of all shards
	eventually(t, "it publishes", func() bool { return len(quick.all()) > 0 })
	if n := having(t, db, "PENDING"); n < rows {
		t.Errorf("%d rows are pending, want those in flight, %d, at least", n, rows)
	}
}

// What was in flight when a channel is lost is published again, with the same id.
func TestChannelLost(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		switch n := len(f.all()); {
		case n == 30: // an error of Publish itself: no result follows for this one
			defer c.end(message.Lost, "connection lost")
			return errors.New("broken pipe")
		case n == 60, n == 90:
			c.end(message.Lost, "connection lost")
		case n > 90 || n%10 == 0:
			c.f.mu.Lock()
			tags := slices.Collect(maps.Keys(c.flights))
			c.f.mu.Unlock()
			for _, tag := range tags {
				c.answer(tag, message.Confirmed, "")
			}
		}
		return nil
	}
	add(t, db, commands("q", names("m", 200))...)
	r := start(t, db, f, outbox.Config{Window: 20})
	published(t, db, 200)
	if n := len(f.all()); n <= 200 {
		t.Errorf("%d publishes of 200 rows: nothing was lost", n)
	}
	if n := number(t, db, `SELECT SUM(attempts) FROM outbox_events`); n != 0 {
		t.Errorf("%d attempts were spent", n)
	}
	r.stop()
	f.back(t)
}

// An error code for the whole connection: everything in flight is under suspicion, and is
// published one by one until the guilty row is found. It is parked, the others go on.
func TestAborted(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	guilty := map[string]bool{"m17": true, "m18": true, "m150": true}
	var alone atomic.Int64
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		if guilty[m.MessageID] {
			c.f.look(func() {
				if c.f.inFlight == 1 {
					alone.Add(1)
				}
			})
			c.end(message.Aborted, "closed by the broker: 501 FRAME_ERROR")
			return nil
		}
		go c.answer(tag, message.Confirmed, "")
		return nil
	}
	parked := newParkings()
	add(t, db, commands("q", names("m", 200))...)
	r := start(t, db, f, outbox.Config{Window: 50, Parked: parked.parked})
	for range guilty {
		if p := parked.next(t); !guilty[p.id] {
			t.Errorf("%s was parked: %s", p.id, p.reason)
		} else {
			contains(t, "the reason", p.reason, "501 FRAME_ERROR")
		}
	}
	published(t, db, 197)
	for id := range guilty {
		if n := f.times(id); n != 2 {
			t.Errorf("%s was published %d times, want twice", id, n)
		}
	}
	if n := alone.Load(); n < 3 {
		t.Errorf("a guilty row was alone in flight %d times, want once each", n)
	}
	// Window 1 does not last.
	f.look(func() { f.most = 0 })
	add(t, db, commands("q", names("n", 200))...)
	published(t, db, 397)
	f.look(func() {
		if f.most <= 1 {
			t.Error("the window is still 1")
		}
	})
	r.stop()
	f.back(t)
}

// gated is a fake whose channels may have to be waited for.
type gated struct {
	*fake
	gate atomic.Pointer[chan struct{}]
}

func (g *gated) Acquire(ctx context.Context) (outbox.Channel, error) {
	if gate := g.gate.Load(); gate != nil {
		select {
		case <-*gate:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return g.fake.Acquire(ctx)
}

// The connection goes over a row, and with it the channel by which held destinations are tried.
// A row that is sent on that before it is known to be gone is alone in flight, but not to blame.
func TestAbortedTogether(t *testing.T) {
	t.Parallel()
	db, f := database(t), &gated{fake: &fake{}}
	const why = "closed by the broker: 501 FRAME_ERROR"
	const held = "held"
	var probed atomic.Pointer[fakeChannel]
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		gate := f.gate.Load()
		switch {
		case m.MessageID == "guilty" && gate == nil:
			g := make(chan struct{})
			f.gate.Store(&g)
			c.end(message.Aborted, why)
		case m.MessageID == "guilty":
			c.end(message.Aborted, why)
		case gate == nil: // no queue is bound
			if f.times(held) == 2 {
				probed.Store(c)
			}
			c.answer(tag, message.Returned, "NO_ROUTE")
		case probed.Load() == c: // it went with the other
			close(*gate)
			c.end(message.Aborted, why)
		default:
			c.answer(tag, message.Confirmed, "")
		}
		return nil
	}
	parked := newParkings()
	add(t, db, command("gone", held))
	start(t, db, f, outbox.Config{Parked: parked.parked})
	eventually(t, "the destination is tried again", func() bool { return probed.Load() != nil })
	add(t, db, command("q", "guilty"))
	if p := parked.next(t); p.id != "guilty" {
		t.Errorf("%s was parked: %s", p.id, p.reason)
	}
	published(t, db, 1)
	if f.gate.Load() == nil || f.times(held) < 4 {
		t.Errorf("published: %v: the test shows nothing", f.all())
	}
}

// Large rows are in memory and in flight by bytes, not by number.
func TestLargeRows(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	var flying, most atomic.Int64
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		n := flying.Add(int64(len(m.Body)))
		most.Store(max(most.Load(), n))
		go func() {
			flying.Add(-int64(len(m.Body)))
			c.answer(tag, message.Confirmed, "")
		}()
		return nil
	}
	const size = 700 << 10
	for i := range 8 {
		var msgs []message.Message
		for _, id := range names(fmt.Sprintf("m%d-", i), 5) {
			m := command("q", id)
			m.Body = make([]byte, size)
			msgs = append(msgs, m)
		}
		add(t, db, msgs...)
	}
	start(t, db, f, outbox.Config{})
	published(t, db, 40)
	if n := most.Load(); n > 2*size {
		t.Errorf("%d bytes were in flight", n)
	}
}

// Of large rows a read takes in no more than there is room for, whatever the server has sent.
func TestLargeRowsAreNotSentAgainAndAgain(t *testing.T) {
	t.Parallel()
	db, direct, link := proxied(t)
	const size, n = 2 << 20, 32
	for _, id := range names("m", n) {
		m := command("q", id)
		m.Body = make([]byte, size)
		add(t, direct, m)
	}
	start(t, db, &fake{}, outbox.Config{})
	published(t, direct, n)
	// What is in the sockets' buffers when a read ends is sent for nothing.
	if sent := link.received.Load(); sent > 2*n*size {
		t.Errorf("the server sent %d MiB for rows of %d", sent>>20, n*size>>20)
	} else {
		t.Logf("%d MiB for rows of %d", sent>>20, n*size>>20)
	}
}

// stopped runs a relay until ctx ends and returns how long it took to stop.
func stopped(t *testing.T, r *relay, within time.Duration) {
	t.Helper()
	began := time.Now()
	r.stop()
	if took := time.Since(began); took > within {
		t.Errorf("stopping took %s, more than %s", took, within)
	}
}

// Stopping waits for what is in flight, and not for ever, and not in a busy loop.
func TestStopWithRowsInFlight(t *testing.T) {
	t.Parallel()
	const drain = 700 * time.Millisecond
	tests := []struct {
		name   string
		answer bool
	}{{"confirms come", true}, {"confirms do not come", false}}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			db, f := database(t), &fake{}
			var asked atomic.Int64
			f.ReadyFunc = func() bool { asked.Add(1); return true }
			answers := make(chan func(), 100)
			f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
				answers <- func() { c.answer(tag, message.Confirmed, "") }
				return nil
			}
			r := start(t, db, f, outbox.Config{DrainTimeout: drain})
			add(t, db, commands("q", names("m", 20))...)
			eventually(t, "all are in flight", func() bool { return len(answers) == 20 })
			if tt.answer {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				time.AfterFunc(drain/4, func() {
					for ctx.Err() == nil && len(answers) > 0 {
						(<-answers)()
					}
				})
			}
			before := asked.Load()
			stopped(t, r, 9*time.Second) // the default time-out is 10 s
			if n := asked.Load() - before; n > 150 {
				t.Errorf("the loop went round %d times", n)
			}
			f.back(t)
			want := 0
			if tt.answer {
				want = 20
			}
			if n := having(t, db, "PUBLISHED"); n != want {
				t.Errorf("%d rows are marked, want %d", n, want)
			}
		})
	}
}
