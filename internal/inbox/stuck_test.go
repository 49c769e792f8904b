package inbox

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"backstep/internal/attempt"
	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// B45: whatever ends a handler's call ends neither the lane nor a neighbour: the transaction is
// rolled back, the attempt counted, and at the limit the message is parked.
func TestHandlerThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	var missing map[string]int
	var none any
	for name, tt := range map[string]struct {
		do     func()
		reason string
	}{
		"a string":      {func() { panic("boom") }, "panic in handler: boom"},
		"an error":      {func() { panic(errors.New("boom")) }, "panic in handler: boom"},
		"a nil map":     {func() { missing["a"] = 1 }, "panic in handler: assignment to entry in nil map"},
		"nil":           {func() { panic(none) }, "panic in handler: panic called with nil argument"},
		"Goexit":        {runtime.Goexit, "panic in handler: runtime.Goexit"},
		"text of bytes": {func() { panic("\xff") }, "panic in handler: \uFFFD"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := database(t)
			msgs := newMsgs(20)
			culprit := msgs[11].MessageID
			b := newBroker("q", msgs...)
			h := &effects{OutcomeFunc: func(_ context.Context, _ *sqltx.Tx, m *message.Message) message.Outcome {
				if m.RequestID() == culprit {
					tt.do()
				}
				return message.Outcome{}
			}}
			l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 8, MaxAttempts: 2, RetryBase: time.Hour, RetryMax: time.Hour})
			eventually(t, "all are acked", b.settled(20))
			next := one(t, "scheduled rows", scheduledRows(t, db))
			equal(t, "why it is tried again", next.reason, tt.reason)
			b.put(next.Message)
			eventually(t, "all are acked", b.settled(21))
			parked := one(t, "outbox rows", outboxRows(t, db, "TRUE"))
			equal(t, "why it is parked", parked.Headers.String(message.HeaderParkedReason), "failed 2 times: "+tt.reason)
			equal(t, "effects", number(t, db, `SELECT COUNT(DISTINCT message_id) FROM effects`), 19)
			equal(t, "effects", number(t, db, `SELECT COUNT(*) FROM effects`), 19)
			if s := l.stats.Snapshot(); s.Done != 19 || s.Retried != 1 || s.Parked != 1 {
				t.Errorf("stats %+v, want 19 done, one retried and parked", s)
			}
			equal(t, "faults", b.faults, []string(nil))
		})
	}
}

// The log says where it happened, and with which message.
func TestGoexitIsLoggedWithItsStack(t *testing.T) {
	t.Parallel()
	db := database(t)
	h := &effects{BatchFunc: func(context.Context, *sqltx.Tx, []string) { leave() }}
	b := newBroker("q", msg("m"))
	l := newLane(t, db, b, Config{Queue: "q", Handler: h})
	g := &group{ds: []message.Delivery{{Message: msg("m"), Queue: "q"}}}
	err := l.transact(t.Context(), g)
	p, ok := errors.AsType[*attempt.Panic](err)
	if !ok || !strings.Contains(string(p.Stack), "inbox.leave") {
		t.Errorf("error %v, want one with the stack of leave", err)
	}
}

func leave() { runtime.Goexit() }

// A handler that computes for ever cannot be ended. It is left behind: it keeps no lock, nothing
// it does later has an effect, its message is parked at once, and its neighbours go on.
func TestHandlerThatDoesNotHeedItsContext(t *testing.T) {
	t.Parallel()
	db := database(t)
	db.SetMaxOpenConns(2) // as many as are left behind: none of them may keep one
	msgs := newMsgs(6)
	culprit := msgs[2].MessageID
	var over atomic.Bool
	late := make(chan error, 10)
	h := &effects{OutcomeFunc: func(_ context.Context, tx *sqltx.Tx, m *message.Message) message.Outcome {
		if m.MessageID == culprit {
			for !over.Load() {
			}
			_, err := tx.Exec(t.Context(), `INSERT INTO effects (message_id) VALUES ('late')`)
			late <- err
		}
		return message.Outcome{}
	}}
	b := newBroker("q", msgs...)
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 4, Timeout: 500 * time.Millisecond, Grace: 200 * time.Millisecond,
		Parked: func(ctx context.Context, tx *sqltx.Tx, m *message.Message, _ string) error {
			_, err := tx.Exec(ctx, `INSERT INTO effects (message_id) VALUES (?)`, "told of "+m.MessageID)
			return err
		}})
	eventually(t, "all are acked", b.settled(6))
	r := one(t, "outbox rows", outboxRows(t, db, "TRUE"))
	want := "handler does not heed its context: it has not returned 200ms after the end of its time (500ms), and may run on until the worker is restarted"
	if got := r.Headers.String(message.HeaderParkedReason); r.MessageID != culprit || got != want {
		t.Errorf("parked %s because %q, want %q", r.MessageID, got, want)
	}
	if l.logged("message failed") != 1 {
		t.Error("the log does not say it")
	}
	b.put(msg("another"))
	eventually(t, "the lane goes on", b.settled(7))
	l.stop()
	equal(t, "told", number(t, db, `SELECT COUNT(*) FROM effects WHERE message_id LIKE 'told of %'`), 1)
	equal(t, "told of the culprit", number(t, db, `SELECT COUNT(*) FROM effects WHERE message_id = '`+"told of "+culprit+`'`), 1)
	left := len(h.callsWith(culprit))
	if left == 0 || left > 2 {
		t.Errorf("%d handlers are left behind, want one or two", left)
	}
	over.Store(true)
	for range left {
		if err := receive(t, "a handler that was left behind ends", late); err == nil {
			t.Error("what a handler does that was left behind has an effect")
		}
	}
	equal(t, "effects", number(t, db, `SELECT COUNT(*) FROM effects WHERE message_id NOT LIKE 'told of %'`), 6)
	equal(t, "records", number(t, db, `SELECT COUNT(*) FROM inbox_messages`), 6)
	equal(t, "faults", b.faults, []string(nil))
}

// callsWith returns the batches that had this message.
func (h *effects) callsWith(id string) (batches [][]string) {
	for _, ids := range h.calls() {
		for _, other := range ids {
			if other == id {
				batches = append(batches, ids)
			}
		}
	}
	return batches
}

// B54: a transaction that takes too long is not waited for when the lane is to stop: it is rolled
// back, and its messages go back to the queue, unspent. That holds for a handler that cannot be
// ended, too.
func TestDrainGivesUp(t *testing.T) {
	t.Parallel()
	for name, heeds := range map[string]bool{"heeds its context": true, "does not": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := database(t)
			entered, gate := make(chan struct{}, 1), make(chan struct{})
			h := &effects{OutcomeFunc: func(ctx context.Context, _ *sqltx.Tx, _ *message.Message) message.Outcome {
				entered <- struct{}{}
				if heeds {
					<-ctx.Done()
				} else {
					<-gate
				}
				return message.Outcome{}
			}}
			b := newBroker("q", newMsgs(3)...)
			l := run(t, db, b, Config{Queue: "q", Handler: h, Drain: 100 * time.Millisecond, Grace: 100 * time.Millisecond})
			receive(t, "a message is in hand", entered)
			l.stop()
			close(gate)
			b.look(func() {
				equal(t, "left for others", len(b.ready), 3)
				equal(t, "faults", b.faults, []string(nil))
			})
			equal(t, "effects", number(t, db, `SELECT COUNT(*) FROM effects`), 0)
			for _, what := range []string{"message failed", "batch failed", "database away; holding deliveries"} {
				if l.logged(what) > 0 {
					t.Errorf("the log says %q", what)
				}
			}
			if s := l.stats.Snapshot(); s != (Snapshot{}) {
				t.Errorf("stats %+v, want none", s)
			}
		})
	}
}
