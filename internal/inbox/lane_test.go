package inbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

func TestLoneMessageIsNotHeldBack(t *testing.T) {
	t.Parallel()
	db := database(t)
	b := newBroker("q")
	h := &effects{}
	run(t, db, b, Config{Queue: "q", Handler: h})
	for i := range 3 {
		m := msg(message.NewID())
		b.put(m)
		eventually(t, "a lone message is acked", b.settled(i+1))
		if effectsOf(t, db, m.MessageID) != 1 || !recorded(t, db, "q", m.MessageID) {
			t.Errorf("message %d: no effect or no record", i)
		}
	}
	equal(t, "batch sizes", h.sizes(), []int{1, 1, 1})
	equal(t, "faults", b.faults, []string(nil))
}

func TestBatchSize(t *testing.T) {
	t.Parallel()
	db := database(t)
	entered, gate := make(chan struct{}, 100), make(chan struct{})
	h := &effects{BatchFunc: func(context.Context, *sqltx.Tx, []string) { entered <- struct{}{}; <-gate }}
	b := newBroker("q", newMsgs(11)...)
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 4})
	receive(t, "the first batch", entered)
	close(gate)
	eventually(t, "all are acked", b.settled(11))
	sizes := h.sizes()
	if sizes[0] != 1 || slices.Max(sizes) != 4 {
		t.Errorf("batches of %v, want one alone first and then 4 at most", sizes)
	}
	if n := number(t, db, `SELECT COUNT(*) FROM effects`); n != 11 {
		t.Errorf("%d effects, want 11", n)
	}
	if s := l.stats.Snapshot(); s.Done != 11 || int(s.Batches) != len(sizes) {
		t.Errorf("stats %+v, want 11 done in %d batches", s, len(sizes))
	}
	equal(t, "faults", b.faults, []string(nil))
}

func TestDuplicates(t *testing.T) {
	t.Parallel()
	db := database(t)
	before := newMsgs(2)
	b := newBroker("q", before...)
	h := &effects{}
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 32})
	eventually(t, "the first two are acked", b.settled(2))
	// One batch of new ones, repeats of these, and repeats of what is in the table.
	entered, gate := make(chan struct{}, 100), make(chan struct{})
	h.BatchFunc = func(context.Context, *sqltx.Tx, []string) { entered <- struct{}{}; <-gate }
	opener, fresh := msg(message.NewID()), newMsgs(2)
	b.put(opener)
	receive(t, "the opener", entered)
	b.put(fresh[0], before[1], fresh[0], fresh[1], before[0], fresh[1], fresh[0])
	close(gate)
	eventually(t, "all are acked", b.settled(10))
	for _, m := range append(before, fresh...) {
		if n := effectsOf(t, db, m.MessageID); n != 1 {
			t.Errorf("%d effects of %s, want 1", n, m.MessageID)
		}
	}
	equal(t, "ids of the batch", h.calls()[len(h.calls())-1], []string{fresh[0].MessageID, fresh[1].MessageID})
	if s := l.stats.Snapshot(); s.Done != 5 || s.Duplicates != 5 {
		t.Errorf("stats %+v, want 5 done and 5 duplicates", s)
	}
	equal(t, "faults", b.faults, []string(nil))
}

// A batch that is nothing but duplicates never reaches the handler.
func TestOnlyDuplicates(t *testing.T) {
	t.Parallel()
	db := database(t)
	m := msg("any bytes \xff\x00 and a blank ")
	b := newBroker("q", m, m, m)
	h := &effects{}
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 1})
	eventually(t, "all are acked", b.settled(3))
	if len(h.calls()) != 1 || effectsOf(t, db, m.MessageID) != 1 || l.stats.Duplicates.Load() != 2 {
		t.Errorf("handler called %d times, %d duplicates", len(h.calls()), l.stats.Duplicates.Load())
	}
	// Ids are bytes: no collation makes these equal.
	b.put(msg("any bytes \xff\x00 and a blank"), msg("ANY BYTES \xff\x00 and a blank "))
	eventually(t, "the two others are acked", b.settled(5))
	if n := number(t, db, `SELECT COUNT(*) FROM effects`); n != 3 {
		t.Errorf("%d effects, want 3", n)
	}
}

// Two lanes get the same messages at the same time; each has its effect once (B73: of two
// queues each has its own).
func TestTwoLanes(t *testing.T) {
	t.Parallel()
	db := database(t)
	msgs := newMsgs(200)
	h := &effects{}
	brokers := []*broker{newBroker("q", msgs...), newBroker("q", msgs...), newBroker("other", msgs...)}
	var duplicates int64
	var lanes []*lane
	for _, b := range brokers {
		lanes = append(lanes, run(t, db, b, Config{Queue: b.queue, Handler: h, Batch: 8}))
	}
	for i, b := range brokers {
		eventually(t, "all are acked", b.settled(len(msgs)))
		duplicates += lanes[i].stats.Duplicates.Load()
		equal(t, "faults", b.faults, []string(nil))
	}
	for _, m := range msgs {
		if n := effectsOf(t, db, m.MessageID); n != 2 {
			t.Fatalf("%d effects of %s, want one for each queue", n, m.MessageID)
		}
	}
	if duplicates != int64(len(msgs)) {
		t.Errorf("%d duplicates, want %d", duplicates, len(msgs))
	}
}

// Nothing is acked before it is committed, and acks are cumulative and in order.
func TestAckAfterCommit(t *testing.T) {
	t.Parallel()
	db := database(t)
	entered, gate := make(chan []string, 100), make(chan struct{})
	h := &effects{OutcomeFunc: func(_ context.Context, _ *sqltx.Tx, m *message.Message) message.Outcome {
		entered <- []string{m.MessageID}
		<-gate
		return message.Outcome{}
	}}
	msgs := newMsgs(9)
	b := newBroker("q", msgs...)
	run(t, db, b, Config{Queue: "q", Handler: h, Batch: 4})
	for _, m := range msgs {
		receive(t, "the handler is called", entered)
		if recorded(t, db, "q", m.MessageID) || slices.Contains(b.ackedIDs(), m.MessageID) {
			t.Fatalf("%s is recorded or acked before its transaction ended", m.MessageID)
		}
		gate <- struct{}{}
		if i := slices.Index(b.ackedIDs(), m.MessageID); i >= 0 && !recorded(t, db, "q", m.MessageID) {
			t.Fatalf("%s is acked and not recorded", m.MessageID)
		}
	}
	eventually(t, "all are acked", b.settled(9))
	var want []string
	for _, m := range msgs {
		want = append(want, m.MessageID)
	}
	equal(t, "acked in order", b.ackedIDs(), want)
	var last int
	for _, line := range b.log {
		var tag int
		if n, _ := fmt.Sscanf(line, "ack %d multiple=true", &tag); n != 1 {
			if strings.Contains(line, "ack") {
				t.Errorf("%q, want cumulative acks alone", line)
			}
			continue
		}
		if tag <= last {
			t.Errorf("ack of %d after %d", tag, last)
		}
		last = tag
	}
}

// A fresh lane has prefetch 1 until a delivery that was not redelivered is done; then it
// opens before it acks, so that nothing is on its way to the consumer it replaces.
func TestFreshLaneOpens(t *testing.T) {
	t.Parallel()
	db := database(t)
	msgs := newMsgs(5)
	b := newBroker("q", msgs...)
	for i := range 3 {
		b.ready[i].Redelivered = true
	}
	run(t, db, b, Config{Queue: "q", Handler: &effects{}, Batch: 8, Prefetch: 12})
	eventually(t, "all are acked", b.settled(5))
	b.look(func() {
		equal(t, "prefetch", b.prefetch, []int{1, 12})
		equal(t, "what the lane said", b.log[:5], []string{
			"ack 1 multiple=true", "ack 2 multiple=true", "ack 3 multiple=true", "reopen 12", "ack 4 multiple=true",
		})
	})
}

// A message that kills its process again and again costs its neighbours one delivery, the
// one that was open when it first came; after that it alone is delivered.
func TestCrashLoopHurtsOneDelivery(t *testing.T) {
	t.Parallel()
	db := database(t)
	msgs := newMsgs(40)
	poison := msgs[10].MessageID
	b := newBroker("q", msgs...)
	for range 12 {
		// The process dies in the handler: its session ends, and its transaction with it.
		ctx, die := context.WithCancel(t.Context())
		h := &effects{BatchFunc: func(_ context.Context, tx *sqltx.Tx, ids []string) {
			if slices.Contains(ids, poison) {
				b.drop()
				tx.Fail(errors.New("killed"))
				die()
			}
		}}
		if err := newLane(t, db, b, Config{Queue: "q", Handler: h, Batch: 8}).Run(ctx); err != nil {
			t.Fatalf("Run = %v, want nil", err)
		}
		die()
	}
	b.look(func() {
		for _, m := range msgs {
			n := b.delivered[m.MessageID]
			switch {
			case m.MessageID == poison && n < 12:
				t.Errorf("the poison was delivered %d times", n)
			case m.MessageID != poison && n > 2:
				t.Errorf("a neighbour was delivered %d times, want 2 at most", n)
			}
		}
	})
}

// A lane subscribes again until it can.
func TestSubscribeAgain(t *testing.T) {
	t.Parallel()
	db := database(t)
	b := newBroker("q")
	b.refuse = 2
	l := run(t, db, b, Config{Queue: "q", Handler: &effects{}})
	for i := range 3 {
		b.put(msg(message.NewID()))
		eventually(t, "it is acked", b.settled(i+1))
		b.drop()
	}
	eventually(t, "it says so", func() bool { return l.logged("consumer ended; subscribing again") >= 5 })
}

func TestStale(t *testing.T) {
	t.Parallel()
	db := database(t)
	b := newBroker("q", msg("m"), msg("m"))
	h := &effects{OutcomeFunc: func(context.Context, *sqltx.Tx, *message.Message) message.Outcome {
		return message.Outcome{Kind: message.Stale, Reason: "past it"}
	}}
	l := run(t, db, b, Config{Queue: "q", Handler: h})
	eventually(t, "both are acked", b.settled(2))
	if s := l.stats.Snapshot(); s.Stale != 1 || s.Duplicates != 1 || !recorded(t, db, "q", "m") {
		t.Errorf("stats %+v, recorded %t", s, recorded(t, db, "q", "m"))
	}
}

func TestSessionGone(t *testing.T) {
	t.Parallel()
	db := database(t)
	entered, gate := make(chan struct{}, 1), make(chan struct{})
	h := &effects{BatchFunc: func(_ context.Context, _ *sqltx.Tx, ids []string) { entered <- struct{}{}; <-gate }}
	m := msg(message.NewID())
	b := newBroker("q", m)
	l := run(t, db, b, Config{Queue: "q", Handler: h})
	receive(t, "the message is in hand", entered)
	b.drop()
	close(gate)
	eventually(t, "the copy is acked", b.settled(1))
	b.look(func() {
		equal(t, "acked", b.acked, []string{m.MessageID})
		equal(t, "deliveries", b.delivered[m.MessageID], 2)
		equal(t, "log", b.log, []string{"closed", "ack 1 multiple=true", "ack 1 multiple=true"}) // the first told nobody
	})
	if effectsOf(t, db, m.MessageID) != 1 || len(h.calls()) != 1 || l.stats.Duplicates.Load() != 1 {
		t.Errorf("%d effects, %d calls, %d duplicates", effectsOf(t, db, m.MessageID), len(h.calls()), l.stats.Duplicates.Load())
	}
}

// B37: a message waits for a lock for so long that the broker ends the session. The lane does not
// go on waiting with a delivery that it cannot ack.
func TestSessionGoneDuringAConflict(t *testing.T) {
	t.Parallel()
	db := database(t)
	_, release := hold(t, db, addSQL, "a")
	m := msg(message.NewID())
	h := &effects{BatchFunc: func(ctx context.Context, tx *sqltx.Tx, _ []string) { _, _ = tx.Exec(ctx, addSQL, "a") }}
	b := newBroker("q", m)
	l := run(t, db, b, Config{Queue: "q", Handler: h})
	eventually(t, "it has waited for the lock", func() bool { return l.stats.Conflicts.Load() > 0 })
	b.drop()
	eventually(t, "it subscribes again", func() (ok bool) {
		b.look(func() { ok = len(b.prefetch) == 2 })
		return ok
	})
	release()
	eventually(t, "the copy is acked", b.settled(1))
	equal(t, "a", number(t, db, `SELECT n FROM counters WHERE id = 'a'`), 1)
	equal(t, "effects", effectsOf(t, db, m.MessageID), 1)
	if s := l.stats.Snapshot(); s.Done != 1 || s.Retried+s.Parked != 0 {
		t.Errorf("stats %+v", s)
	}
}

// B54: at the end of the context what was not started goes back at once, the transaction in
// hand is finished and acked, and nothing new is begun.
func TestDrain(t *testing.T) {
	t.Parallel()
	db := database(t)
	entered, gate := make(chan struct{}, 100), make(chan struct{})
	h := &effects{BatchFunc: func(_ context.Context, _ *sqltx.Tx, ids []string) { entered <- struct{}{}; <-gate }}
	opener, msgs := msg(message.NewID()), newMsgs(20)
	b := newBroker("q", opener)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- newLane(t, db, b, Config{Queue: "q", Handler: h, Batch: 4}).Run(ctx) }()
	receive(t, "the opener", entered)
	b.put(msgs...)
	gate <- struct{}{}
	receive(t, "a batch", entered) // 4 in hand, 4 or more waiting
	cancel()
	eventually(t, "what was not started goes back", func() (ok bool) {
		b.look(func() { ok = b.sub != nil && b.sub.cancelled && len(b.requeued) == 4 && len(b.sub.unacked) == 4 })
		return ok
	})
	close(gate)
	if err := receive(t, "Run returns", done); err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	b.look(func() {
		equal(t, "acked", len(b.acked), 5)
		equal(t, "left for others", len(b.ready), 16)
		equal(t, "faults", b.faults, []string(nil))
		equal(t, "subscription", b.sub, (*subscription)(nil))
	})
	if n := number(t, db, `SELECT COUNT(*) FROM effects`); n != 5 || len(h.calls()) != 2 {
		t.Errorf("%d effects in %d batches, want 5 in 2", n, len(h.calls()))
	}
}

// A batch that was split is not worked off to its end when the lane is to stop. What was not begun goes
// back when the lane is given no more, so not to the lane itself: each delivery of a message is one of 20.
func TestDrainInTheMiddleOfASplitBatch(t *testing.T) {
	t.Parallel()
	db := database(t)
	msgs := newMsgs(9)
	b := newBroker("q", msgs...)
	b.slow = 200 * time.Millisecond // so that it would be given it again
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	h := &effects{BatchFunc: func(_ context.Context, _ *sqltx.Tx, ids []string) {
		switch {
		case len(ids) > 1:
			panic("split them")
		case ids[0] == msgs[3].MessageID:
			cancel()
		}
	}}
	if err := newLane(t, db, b, Config{Queue: "q", Handler: h, Batch: 8}).Run(ctx); err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	b.look(func() {
		equal(t, "acked", b.acked, []string{msgs[0].MessageID, msgs[1].MessageID, msgs[2].MessageID, msgs[3].MessageID})
		equal(t, "left for others", len(b.ready), 5)
		equal(t, "faults", b.faults, []string(nil))
		for _, m := range msgs {
			if n := b.delivered[m.MessageID]; n > 1 {
				t.Errorf("a message was delivered %d times", n)
			}
		}
	})
}

// B67: many lanes record new ids at once; no deadlock reaches a retry counter.
func TestManyLanesDoNotDeadlock(t *testing.T) {
	t.Parallel()
	db := database(t)
	h := &effects{}
	const lanes, each = 12, 100
	var all []*lane
	var brokers []*broker
	for i := range lanes {
		msgs := make([]message.Message, each)
		for k := range msgs {
			id := message.NewID()
			if i%2 == 1 {
				id = fmt.Sprintf("%x", time.Now().UnixNano()*2654435761) // ids that do not sort by time
			}
			msgs[k] = msg(id)
		}
		brokers = append(brokers, newBroker("q", msgs...))
	}
	for _, b := range brokers {
		all = append(all, run(t, db, b, Config{Queue: "q", Handler: h, Batch: 16}))
	}
	for i, b := range brokers {
		eventually(t, "all are acked", b.settled(each))
		if n := all[i].stats.Conflicts.Load(); n > 0 {
			t.Errorf("lane %d had %d conflicts", i, n)
		}
	}
}
