package e2e

import (
	"strings"
	"testing"
	"time"

	"backstep/internal/handlers"
)

// TestCrashLoop: B45: a message whose handler kills the process, however often it is started
// again, is dead-lettered when the broker has delivered it once more than the limit says, and
// every neighbour is processed, once.
func TestCrashLoop(t *testing.T) {
	t.Parallel()
	const limit = 5 // the policy's 20 takes as much longer
	for how, says := range map[string]string{
		"goroutine": "panic: crash test",
		"overflow":  "goroutine stack exceeds",
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			w := newWheel(t)
			w.apply()
			w.limit(limit)
			w.start("relay")
			msgs, want := orders(40)
			poison := request(t, nil)
			w.submit(msgs[:20]...)
			w.submit(poison)
			w.submit(msgs[20:]...)
			env := []string{"CRASH_ON=" + how + ":" + poison.MessageId, "BACKSTEP_BATCH=8"}
			crashes := 0
			var p *proc
			for p = w.start("worker", env...); !w.survives(p, len(msgs)); p = w.start("worker", env...) {
				if crashes++; crashes > limit+1 {
					t.Fatalf("%d crashes", crashes)
				}
				if code := p.cmd.ProcessState.ExitCode(); code != 2 || !strings.Contains(p.text(), says) {
					t.Fatalf("it ended with code %d, want 2 and %q:\n%s", code, says, p.text())
				}
			}
			if crashes != limit+1 {
				t.Errorf("%d crashes, want %d", crashes, limit+1)
			}
			w.rest(want.total(), 60*time.Second)
			w.verify(want)
			p.stop()
			d, _ := w.broker.Get(t, "orders.parked")
			deaths, _ := d.Headers["x-death"].([]any)
			if d.MessageId != poison.MessageId || string(d.Body) != string(poison.Body) || d.Type != poison.Type || len(deaths) != 1 {
				t.Errorf("dead-lettered: %q, headers %v", d.MessageId, d.Headers)
			}
			if d.Headers["x-first-death-reason"] != "delivery_limit" || d.Headers["x-first-death-queue"] != handlers.OrdersQueue {
				t.Errorf("dead-lettered because %v", d.Headers)
			}
			if d, ok := w.broker.Get(t, "orders.parked"); ok {
				t.Errorf("a neighbour was dead-lettered: %q", d.MessageId)
			}
		})
	}
}

// survives waits until the worker has died, or a message has been dead-lettered and so many
// orders exist.
func (w *wheel) survives(p *proc, orders int) bool {
	w.t.Helper()
	for limit := time.Now().Add(60 * time.Second); ; {
		select {
		case <-p.done:
			return false
		case <-time.After(50 * time.Millisecond):
		}
		ready, _ := w.broker.Queue(w.t, "orders.parked")
		n := w.count(`SELECT COUNT(*) FROM orders`)
		if ready > 0 && n == orders {
			return true
		}
		if time.Now().After(limit) {
			w.t.Fatalf("the worker does not crash, %d messages are dead-lettered, %d orders exist", ready, n)
		}
	}
}
