package e2e

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"backstep/internal/handlers"
)

// grace is how long a supervisor waits after SIGTERM: what Kubernetes does by default.
const grace = 30 * time.Second

// noOrders lets nobody insert an order until the test calls the function: a handler that is slow.
// Who has waited for five seconds tries again.
func (w *wheel) noOrders() (release func()) {
	w.t.Helper()
	tx, err := w.db.BeginTx(context.WithoutCancel(w.t.Context()), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		w.t.Fatal(err)
	}
	release = sync.OnceFunc(func() { _ = tx.Rollback() }) // the connection's end does the same
	w.t.Cleanup(release)
	if _, err := tx.ExecContext(w.t.Context(), `SELECT id FROM orders FOR UPDATE`); err != nil { // gaps too
		w.t.Fatal(err)
	}
	return release
}

func (w *wheel) ready(queue string) int {
	w.t.Helper()
	n, _ := w.broker.Queue(w.t, queue)
	return n
}

// TestWorkerDrains: B54: at SIGTERM four lanes, each with a transaction in hand and as many
// messages again waiting, hand back at once what they have not started, finish what they have, and
// the worker ends with 0. A second signal ends it at once.
func TestWorkerDrains(t *testing.T) {
	t.Parallel()
	w := newWheel(t)
	w.apply()
	const lanes, batch, first, more = 4, 8, 40, 300
	start := func() *proc {
		return w.start("worker", "BACKSTEP_QUEUES=orders", "BACKSTEP_LOG_LEVEL=debug",
			fmt.Sprintf("BACKSTEP_LANES=%d", lanes), fmt.Sprintf("BACKSTEP_BATCH=%d", batch))
	}
	submit := func(n int) {
		msgs, _ := orders(n)
		w.submit(msgs...)
	}
	// A lane has its full prefetch when it has done one message.
	full := func(p *proc) (release func()) {
		w.eventually(30*time.Second, "the worker works", func() error {
			_, err := p.admin()
			return err
		})
		submit(first)
		w.eventually(30*time.Second, "the first are done", func() error {
			if s := p.stats(); s.Done < first {
				return fmt.Errorf("%d are", s.Done)
			}
			return nil
		})
		release = w.noOrders()
		submit(more)
		w.eventually(30*time.Second, "prefetch is full", func() error {
			if n := w.ready(handlers.OrdersQueue); n != more-lanes*2*batch {
				return fmt.Errorf("%d are left", n)
			}
			return nil
		})
		return release
	}

	p := start()
	release := full(p)
	p.signal(syscall.SIGTERM)
	signalled := time.Now()
	w.eventually(10*time.Second, "what was not started goes back", func() error {
		if n := w.ready(handlers.OrdersQueue); n < more-lanes*batch {
			return fmt.Errorf("%d are there", n)
		}
		return nil
	})
	release()
	p.ended(signalled, grace)
	p.quiet()
	done := w.count(`SELECT COUNT(*) FROM orders`) - first
	w.eventually(10*time.Second, "all others are in the queue", func() error {
		if n := w.ready(handlers.OrdersQueue); n != more-done {
			return fmt.Errorf("%d are there, and %d were done", n, done)
		}
		return nil
	})

	another := start()
	w.eventually(60*time.Second, "another does the rest", func() error {
		if n := w.count(`SELECT COUNT(*) FROM orders`); n != first+more {
			return fmt.Errorf("%d orders", n)
		}
		return nil
	})
	another.stop()
	if n := another.duplicates(); n > 0 {
		t.Errorf("%d messages were processed and not acked", n)
	}

	last := start()
	full(last)
	last.signal(syscall.SIGTERM)
	w.eventually(10*time.Second, "it has seen the signal", func() error {
		if n := w.ready(handlers.OrdersQueue); n < more-lanes*batch {
			return fmt.Errorf("%d are there", n)
		}
		return nil
	})
	last.signal(syscall.SIGTERM)
	select {
	case <-last.done:
	case <-time.After(2 * time.Second):
		t.Error("a second signal does not end it at once")
	}
	if ws, ok := last.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGTERM {
		t.Errorf("it ended with %v, want SIGTERM", last.err)
	}
}

// TestRollingRestart: four workers are restarted one after the other under load. No message is
// processed twice, nobody logs anything to worry about, and every worker ends in time.
func TestRollingRestart(t *testing.T) {
	t.Parallel()
	w := newWheel(t)
	w.apply()
	start := func() *proc { return w.start("worker", "BACKSTEP_LOG_LEVEL=debug", "BACKSTEP_BATCH=8") }
	msgs, want := orders(600)
	w.submit(msgs...)
	relay := w.start("relay")
	var running, all []*proc
	for range 4 {
		running = append(running, start())
	}
	all = append(all, running...)
	for i, old := range running {
		working := func() int { return w.count(`SELECT COUNT(*) FROM inbox_messages`) }
		before := working()
		w.eventually(60*time.Second, "they work", func() error {
			if n := working(); n < before+50 {
				return fmt.Errorf("%d messages were processed, and %d are", before, n)
			}
			return nil
		})
		old.signal(syscall.SIGTERM)
		old.ended(time.Now(), grace)
		running[i] = start()
		all = append(all, running[i])
	}
	if n := w.count(`SELECT COUNT(*) FROM saga_instances WHERE status IN ('RUNNING', 'COMPENSATING')`); n == 0 {
		t.Error("there was no load at the end")
	}
	w.rest(want.total(), 120*time.Second)
	w.verify(want)
	stopAll(running...)
	for _, p := range all {
		p.quiet()
		if n := p.duplicates(); n > 0 {
			t.Errorf("%d messages were processed twice", n)
		}
	}
	relay.stop()
	relay.quiet()
}

// logged returns the lines of the log that match, and those that are none.
func (p *proc) logged(match func(level, msg string) bool) (lines []string) {
	for line := range strings.Lines(p.text()) {
		var entry struct{ Level, Msg string }
		if err := json.Unmarshal([]byte(line), &entry); err != nil || match(entry.Level, entry.Msg) {
			lines = append(lines, line)
		}
	}
	return lines
}

// quiet demands that nothing in the log worries an operator.
func (p *proc) quiet() {
	p.t.Helper()
	for _, line := range p.logged(func(level, _ string) bool { return level != "INFO" && level != "DEBUG" }) {
		p.t.Errorf("%s logged %s", p.role, line)
	}
}

func (p *proc) duplicates() int {
	return len(p.logged(func(_, msg string) bool { return msg == "duplicate" }))
}
