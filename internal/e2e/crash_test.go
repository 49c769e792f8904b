package e2e

import (
	"fmt"
	"testing"
	"time"
)

// TestCrash kills a process at a named point with 200 orders in flight, starts another, and
// demands every invariant. (B01: a message goes out twice because the relay died after the
// confirm and before the mark. B52: a worker dies before, during or after COMMIT, before its ack.)
func TestCrash(t *testing.T) {
	tests := []struct {
		role, point string
		nth         int
	}{
		{"relay", "relay.read", 5},
		{"relay", "relay.published", 120},
		{"relay", "relay.confirmed", 120},
		{"relay", "relay.marked", 120},
		{"worker", "worker.begun", 40},
		{"worker", "worker.recorded", 40},
		{"worker", "worker.before-commit", 40},
		{"worker", "worker.committed", 40},
		{"worker", "worker.acked", 40},
		{"worker", "saga.failed", 15},       // a step has failed, nobody knows it yet
		{"worker", "saga.compensating", 15}, // the failure is committed, nothing is undone yet
	}
	for _, tt := range tests {
		t.Run(tt.point, func(t *testing.T) {
			t.Parallel()
			w := newWheel(t)
			victim := w.start(tt.role, fmt.Sprintf("CRASH_AT=%s:%d", tt.point, tt.nth), "BACKSTEP_BATCH=4")
			other := map[string]string{"relay": "worker", "worker": "relay"}[tt.role]
			w.start(other, "BACKSTEP_BATCH=4")
			w.awaitQueues()
			msgs, want := orders(200)
			w.submit(msgs...)
			victim.killed(60 * time.Second)
			w.start(tt.role)
			w.rest(want.total(), 90*time.Second)
			w.verify(want)
		})
	}
}

// TestEveryMessageTwice delivers each order twice and runs two relays that were made to
// publish each row twice, by a crash after each mark was lost. (B75: what follows from a message
// is not sent again because of a duplicate.)
func TestEveryMessageTwice(t *testing.T) {
	w := newWheel(t)
	w.start("relay")
	w.start("worker")
	w.awaitQueues()
	msgs, want := orders(100)
	w.submit(msgs...)
	w.submit(msgs...)
	w.rest(want.total(), 60*time.Second)
	w.verify(want)

	// Every row once more, as after a relay that died before any mark: same ids, same bytes.
	if _, err := w.db.ExecContext(t.Context(), `
UPDATE outbox_events SET status = 'PENDING', generation = generation + 1 WHERE exchange = 'backstep.commands'`); err != nil {
		t.Fatal(err)
	}
	before := w.count(`SELECT COUNT(*) FROM inbox_messages`)
	w.submit(msgs...)
	w.rest(want.total(), 60*time.Second)
	w.verify(want)
	if after := w.count(`SELECT COUNT(*) FROM inbox_messages`); after != before {
		t.Errorf("%d inbox rows after every message came again, %d before", after, before)
	}
}
