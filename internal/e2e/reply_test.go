package e2e

import (
	"strings"
	"sync"
	"testing"
	"time"
)

// B77: the connection is lost during the COMMIT of a worker, or during the relay's mark, before
// the server got it or before the client got the answer. Whatever happened, each effect happens
// once, and none of it counts as an attempt.
func TestReplyLost(t *testing.T) {
	for _, tt := range []struct {
		name, role string
		statement  string // how it begins
		fate       fate
	}{
		{"worker's COMMIT did not arrive", "worker", "COMMIT", lostOnTheWay},
		{"worker's COMMIT was not answered", "worker", "COMMIT", doneButNotAnswered},
		{"relay's mark did not arrive", "relay", "UPDATE outbox_events", lostOnTheWay},
		{"relay's mark was not answered", "relay", "UPDATE outbox_events", doneButNotAnswered},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWheel(t)
			const every, most = 5, 12
			var mu sync.Mutex // guards the two below
			seen, cut := 0, 0
			dsn := w.proxied(func(statement string) fate {
				if !strings.HasPrefix(strings.TrimSpace(statement), tt.statement) {
					return answered
				}
				mu.Lock()
				defer mu.Unlock()
				if seen++; seen%every != 0 || cut == most {
					return answered
				}
				cut++
				return tt.fate
			})
			for _, role := range []string{"relay", "worker"} {
				env := []string{"BACKSTEP_BATCH=8"}
				if role == tt.role {
					env = append(env, "BACKSTEP_MYSQL_DSN="+dsn)
				}
				w.start(role, env...)
			}
			w.awaitQueues()
			msgs, want := orders(200)
			w.submit(msgs...)
			w.rest(want.total(), 120*time.Second)
			w.verify(want)
			w.nothingSpent()
			mu.Lock()
			defer mu.Unlock()
			if cut == 0 {
				t.Errorf("none of %d was cut: the test shows nothing", seen)
			}
		})
	}
}

// nothingSpent demands that no row and no step has used an attempt, and nothing was parked.
func (w *wheel) nothingSpent() {
	w.t.Helper()
	for what, query := range map[string]string{
		"outbox rows were charged an attempt":  `SELECT COUNT(*) FROM outbox_events WHERE attempts > 0`,
		"messages were parked":                 `SELECT COUNT(*) FROM outbox_events WHERE status = 'PARKED' OR exchange = 'backstep.parked'`,
		"steps were tried again":               `SELECT COUNT(*) FROM saga_steps WHERE attempts > 1`,
		"sagas were stopped for manual action": `SELECT COUNT(*) FROM saga_instances WHERE status = 'MANUAL_ACTION'`,
	} {
		if n := w.count(query); n > 0 {
			w.t.Errorf("%d %s", n, what)
		}
	}
}
