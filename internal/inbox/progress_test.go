package inbox

import (
	"context"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// made is a message that was added to the outbox so many seconds after midnight.
func made(second int) message.Message {
	m := msg(message.NewID())
	m.Timestamp = midnight.Add(time.Duration(second) * time.Second)
	return m
}

var midnight = time.Now().UTC().Truncate(24 * time.Hour)

func delivery(tag uint64, second int) message.Delivery {
	return message.Delivery{Message: made(second), Tag: tag}
}

// latest returns how many seconds after midnight what is latest was published; -1: not known.
func latest(p *Progress) int {
	if s := p.Standing(); !s.Latest.IsZero() {
		return int(s.Latest.Sub(midnight).Seconds())
	}
	return -1
}

func TestProgress(t *testing.T) {
	t.Parallel()
	inside := func(*message.Delivery) bool { return false }
	again := delivery(4, 1)
	again.Redelivered = true
	mute := message.Delivery{Message: message.Message{Properties: message.Properties{MessageID: "mute"}}, Tag: 5}
	var p Progress
	a, b := p.lane(), p.lane()
	expect := func(what string, want int, idle bool) {
		t.Helper()
		s := p.Standing()
		if got := latest(&p); got != want || (s.Idle > 0) != idle || !s.Subscribed {
			t.Errorf("%s: latest %d, %+v; want %d, idle %t", what, got, s, want, idle)
		}
	}
	if s := p.Standing(); s != (Standing{}) {
		t.Errorf("before there is a session: %+v", s)
	}
	a.begin()
	expect("nothing came yet", -1, true)
	first := []message.Delivery{delivery(1, 10), delivery(2, 20), delivery(3, 30)}
	a.took(first)
	expect("nothing is settled", -1, false)
	a.settled(first[2:], inside)
	expect("the last one first", 10, false)
	a.settled(first[:2], inside)
	expect("all", 20, true) // the last that was settled counts
	a.took([]message.Delivery{again})
	expect("one from before comes again", 1, false)
	a.settled([]message.Delivery{again}, inside)
	expect("it is settled, and says nothing", 20, true)
	a.took([]message.Delivery{mute})
	expect("one that does not say when", 20, false)
	a.settled([]message.Delivery{mute}, inside)

	b.begin()
	expect("a lane that has nothing holds nothing back", 20, true)
	other := []message.Delivery{delivery(1, 40)}
	b.took(other)
	expect("a lane that knows nothing yet has one", -1, false)
	b.settled(other, inside)
	expect("the lanes are idle", 40, true)
	a.took([]message.Delivery{delivery(6, 50)})
	expect("one works, one is idle", 20, false)
	b.took([]message.Delivery{delivery(2, 60)})
	expect("both work", 20, false)
	b.settled([]message.Delivery{delivery(2, 60), delivery(3, 70)}, func(d *message.Delivery) bool { return d.Tag == 2 })
	expect("one that is outside for a call is in hand", 20, false)
	a.end()
	expect("one is cut off: what it had goes to others", 60, false)
	b.end()
	if s := p.Standing(); s.Subscribed {
		t.Errorf("no lane is subscribed: %+v", s)
	}
	b.begin()
	expect("a new session", -1, true)
}

// What a lane says about itself is so at each moment of its life.
func TestLaneTellsItsProgress(t *testing.T) {
	t.Parallel()
	db := database(t)
	entered, gate := make(chan struct{}), make(chan struct{})
	h := &effects{BatchFunc: func(context.Context, *sqltx.Tx, []string) { entered <- struct{}{}; <-gate }}
	b := newBroker("q")
	var p Progress
	run(t, db, b, Config{Queue: "q", Handler: h, Progress: &p})
	eventually(t, "it is subscribed and idle", func() bool { s := p.Standing(); return s.Subscribed && s.Idle > 0 })

	b.put(made(1))
	receive(t, "the first batch", entered)
	if s := p.Standing(); s.Idle > 0 || !s.Latest.IsZero() {
		t.Errorf("while it works on its first message: %+v", s)
	}
	b.put(made(2), made(3))
	gate <- struct{}{}
	receive(t, "the second batch", entered)
	if s := p.Standing(); s.Idle > 0 || latest(&p) != 1 {
		t.Errorf("while it works on the second batch: latest %d, %+v; want 1", latest(&p), s)
	}
	b.drop() // neither can be acked
	gate <- struct{}{}
	eventually(t, "both come again, as duplicates", b.settled(3))
	eventually(t, "it is idle in a new session", func() bool { return p.Standing().Idle > 0 })
	if s := p.Standing(); !s.Latest.IsZero() {
		t.Errorf("what was delivered again says something: %+v", s)
	}
	b.put(made(4))
	receive(t, "the next batch", entered)
	gate <- struct{}{}
	eventually(t, "it knows again", func() bool { return latest(&p) == 4 })
	since := p.Standing().Idle
	eventually(t, "it is idle for longer", func() bool { return p.Standing().Idle > since })
}
