package e2e

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
)

// TestRelaysComeAndGo adds, kills, pauses and stops relays under load. Nothing is lost, no key's
// order of first delivery breaks, and a shard stalls for the lease's TTL and a second at most, if
// its relay could not hand it over; else for far less.
func TestRelaysComeAndGo(t *testing.T) {
	t.Parallel()
	const (
		ttl      = 3 * time.Second
		takeOver = ttl + time.Second
		handOver = ttl / 2
	)
	w := newWheel(t)
	start := func() *proc { return w.start("relay", "BACKSTEP_RELAY_LEASE_TTL="+ttl.String()) }
	a := start()
	w.awaitQueues()
	w.share(a)
	f := newFlow(w, ttl)
	f.during("one relay", handOver, func() { <-time.After(time.Second) })

	var b, c, d *proc
	f.during("two relays join", handOver, func() {
		b, c = start(), start()
		w.share(a, b, c)
	})
	if n := f.copied(); n > 0 {
		t.Errorf("%d copies although every shard was handed over", n)
	}
	atLeast := func(stall time.Duration) {
		if stall < ttl/2 {
			t.Errorf("no shard stalled for more than %s: the relay owned nothing", stall)
		}
	}
	atLeast(f.during("one is killed and another joins", takeOver, func() {
		a.signal(syscall.SIGKILL)
		d = start()
		w.share(b, c, d)
	}))
	atLeast(f.during("one is paused", takeOver, func() {
		b.signal(syscall.SIGSTOP)
		resume := time.After(ttl + time.Second)
		w.share(c, d)
		<-resume
	}))
	f.during("it wakes up", handOver, func() {
		b.signal(syscall.SIGCONT)
		w.share(b, c, d)
	})
	copies := f.copied()
	f.during("one is stopped", handOver, func() {
		c.stop()
		w.share(b, d)
	})
	if n := f.copied() - copies; n > 0 {
		t.Errorf("%d copies although every shard was handed over", n)
	}
	f.verify()
	stopAll(b, d)
	if n := w.count(`SELECT COUNT(*) FROM outbox_shards WHERE owner IS NOT NULL`) + w.count(`SELECT COUNT(*) FROM relay_members`); n > 0 {
		t.Errorf("%d traces are left of relays that were stopped", n)
	}
}

// share waits until these relays, and no other, have all shards among them, each its fair share.
func (w *wheel) share(procs ...*proc) {
	w.t.Helper()
	w.eventually(30*time.Second, fmt.Sprintf("%d relays share the shards", len(procs)), func() error {
		relays, free, err := outbox.Relays(w.t.Context(), w.db)
		if err != nil {
			return err
		}
		owns := map[int]int{}
		for _, r := range relays {
			owns[r.PID] = len(r.Shards)
		}
		fair, sum := message.Shards/len(procs), 0
		for _, p := range procs {
			n := owns[p.cmd.Process.Pid]
			if n < fair || n > fair+1 {
				return fmt.Errorf("shards by process are %v", owns)
			}
			sum += n
		}
		if sum != message.Shards {
			return fmt.Errorf("shards by process are %v, and %d are free", owns, len(free))
		}
		return nil
	})
}
