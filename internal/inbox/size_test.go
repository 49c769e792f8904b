package inbox

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

func TestSize(t *testing.T) {
	t.Parallel()
	s := size{limit: 32, most: 32}
	s.done(32, time.Second)
	equal(t, "limit that is the most there is", s.limit, 32)
	s.shrink(32)
	equal(t, "limit after a conflict", s.limit, 16)
	s.shrink(4)
	equal(t, "limit after a conflict of a smaller batch", s.limit, 2)
	s.shrink(1)
	equal(t, "limit after a conflict of a single message", s.limit, 1)
	s.done(1, 2*longBatch)
	equal(t, "limit after a slow message: fewer than one there are not", s.limit, 2)
	s.done(1, time.Millisecond)
	equal(t, "limit after a batch that was not full", s.limit, 2)
	for range 25 {
		s.done(s.limit, time.Millisecond)
	}
	equal(t, "limit after full batches", s.limit, 32)
	s.done(32, 2*longBatch)
	equal(t, "limit after a slow batch", s.limit, 16)
}

func TestLinger(t *testing.T) {
	t.Parallel()
	s := size{limit: 32, most: 32}
	s.done(busyBatch, time.Millisecond)
	equal(t, "linger after a batch of many", s.linger, time.Millisecond)
	s.done(busyBatch, time.Minute)
	equal(t, "linger after a slow batch of many", s.linger, maxLinger)
	s.done(busyBatch-1, time.Minute)
	equal(t, "linger after a batch of few", s.linger, time.Duration(0))
}

// Under load several messages wait for more; a lone one never does, whatever came before it.
func TestOnlySeveralLinger(t *testing.T) {
	t.Parallel()
	l := NewLane(nil, nil, Config{Batch: 4}, nil)
	delivery := func(id string) message.Delivery { return message.Delivery{Message: msg(id)} }
	collect := func(more <-chan message.Delivery) []message.Delivery {
		return l.collect(newSession(nil, nil), []message.Delivery{delivery("a")}, more)
	}
	l.size.linger = time.Hour
	more := make(chan message.Delivery, 4)
	equal(t, "a lone message", len(collect(more)), 1)

	more <- delivery("b")
	full := make(chan []message.Delivery, 1)
	go func() { full <- collect(more) }()
	more <- delivery("c")
	more <- delivery("d")
	equal(t, "several that are joined by as many as a batch may have", len(receive(t, "a full batch", full)), 4)

	more <- delivery("b")
	go func() { full <- collect(more) }()
	eventually(t, "the second is taken", func() bool { return len(more) == 0 })
	close(more) // the subscription ends
	equal(t, "what there was when the subscription ended", len(receive(t, "the rest", full)), 2)

	l.size.linger = time.Millisecond
	more = make(chan message.Delivery, 4)
	more <- delivery("b")
	equal(t, "several when their time is over", len(collect(more)), 2)
}

// Batches that get into each other's way again and again become smaller, and when they do not
// any more, they grow back.
func TestConflictsShrinkTheLane(t *testing.T) {
	t.Parallel()
	db := database(t)
	const fits = 3
	var healed atomic.Bool
	entered, gate := make(chan struct{}, 1000), make(chan struct{})
	h := &effects{BatchFunc: func(ctx context.Context, tx *sqltx.Tx, ids []string) {
		if ids[0] == "opener" {
			entered <- struct{}{}
			<-gate
		}
		if len(ids) > fits && !healed.Load() {
			_, _ = tx.Exec(ctx, `SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'Deadlock found'`)
		}
	}}
	b := newBroker("q", msg("opener"))
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 16})
	receive(t, "the opener", entered)
	b.put(newMsgs(80)...)
	close(gate)
	eventually(t, "all are acked", b.settled(81))
	sizes := h.sizes()[1:]
	equal(t, "the first batch is run again as it is before it is split", sizes[:3], []int{16, 16, 8})
	tooLarge := 0
	for _, n := range sizes {
		if n > fits {
			tooLarge++
		}
	}
	// At full size each of the five batches of 16 would be tried twice at 16, at 8 and at 4.
	if tooLarge > 40 {
		t.Errorf("%d batches of more than %d: the lane goes on with large ones: %v", tooLarge, fits, sizes)
	}
	healed.Store(true)
	before := len(h.sizes())
	b.put(newMsgs(400)...)
	eventually(t, "all are acked", b.settled(481))
	if sizes := h.sizes()[before:]; slices.Max(sizes) != 16 {
		t.Errorf("batches of %v, want 16 again", sizes)
	}
	equal(t, "effects", number(t, db, `SELECT COUNT(*) FROM effects`), 481)
	if s := l.stats.Snapshot(); s.Done != 481 || s.Retried+s.Parked+s.Duplicates != 0 {
		t.Errorf("stats %+v", s)
	}
	equal(t, "faults", b.faults, []string(nil))
}

// Large bodies end a batch before it has its number of messages.
func TestBatchesAreBoundedInBytes(t *testing.T) {
	t.Parallel()
	db := database(t)
	entered, gate := make(chan struct{}, 100), make(chan struct{})
	h := &effects{BatchFunc: func(_ context.Context, _ *sqltx.Tx, ids []string) {
		if ids[0] == "opener" {
			entered <- struct{}{}
			<-gate
		}
	}}
	b := newBroker("q", msg("opener"))
	run(t, db, b, Config{Queue: "q", Handler: h, Batch: 16, MaxBody: maxBatchBytes})
	receive(t, "the opener", entered)
	msgs := newMsgs(12)
	for i := range msgs {
		msgs[i].Body = make([]byte, maxBatchBytes/4)
	}
	b.put(append([]message.Message{msg("small")}, msgs...)...)
	close(gate)
	eventually(t, "all are acked", b.settled(14))
	equal(t, "batch sizes", h.sizes(), []int{1, 5, 4, 4})
}
