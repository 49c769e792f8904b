package e2e

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"backstep/internal/handlers"
)

// atMost is how long a worker that is lost may keep others from the rows it has locked.
const atMost = time.Minute

// lostWorker is a worker that is lost at a statement.
type lostWorker struct {
	*proc
	lose func(p *proc) fate

	mu    sync.Mutex // guards below
	armed bool
	at    time.Time // when it was lost
	found bool      // again
}

// loseAt starts a worker that is lost when one of its statements has this text, once armed.
func (w *wheel) loseAt(statement string, lose func(p *proc) fate) *lostWorker {
	w.t.Helper()
	l := &lostWorker{lose: lose}
	dsn := w.proxied(func(s string) fate {
		l.mu.Lock()
		defer l.mu.Unlock()
		switch {
		case !l.armed, l.found:
			return answered
		case l.at.IsZero() && !strings.Contains(s, statement):
			return answered
		case l.at.IsZero():
			l.at = time.Now()
		}
		return l.lose(l.proc)
	})
	l.proc = w.start("worker", "BACKSTEP_MYSQL_DSN="+dsn+"&readTimeout="+readTimeout.String(), "BACKSTEP_BATCH=8")
	return l
}

// await arms the worker and waits until it is lost.
func (l *lostWorker) await(w *wheel) (at time.Time) {
	w.t.Helper()
	l.mu.Lock()
	l.armed = true
	l.mu.Unlock()
	w.eventually(60*time.Second, "a worker is lost", func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if at = l.at; at.IsZero() {
			return errors.New("it works")
		}
		return nil
	})
	return at
}

// find ends what has befallen the worker.
func (l *lostWorker) find() {
	l.mu.Lock()
	l.found = true
	l.mu.Unlock()
	l.signal(syscall.SIGCONT)
}

// Workers that are lost, without anybody being told, let go of their locks within a minute, others
// do their work, and nothing is lost or doubled when they are found again.
func TestLostWorkersLetGo(t *testing.T) {
	t.Parallel()
	frozen := func(p *proc) fate {
		p.signal(syscall.SIGSTOP)
		return answered
	}
	for _, tt := range []struct {
		name       string
		statements []string // at which they are lost; it has locks on stock at the last
		lose       func(p *proc) fate
		holds      bool // what it has in hand: the broker still hears of it
	}{
		{"cut off in a transaction", []string{moveStock}, func(*proc) fate { return swallowed }, true},
		// B63
		{"frozen before, after and in a transaction", []string{"START TRANSACTION", "COMMIT", moveStock}, frozen, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWheel(t)
			w.start("relay")
			var lost []*lostWorker
			for _, statement := range tt.statements {
				lost = append(lost, w.loseAt(statement, tt.lose))
			}
			w.awaitQueues()
			msgs, want := orders(200)
			w.submit(msgs...)
			var at time.Time
			for _, l := range lost {
				at = l.await(w)
			}
			if n := w.lockable(); n == skus {
				t.Error("no row is locked: the test shows nothing")
			}
			w.start("worker", "BACKSTEP_BATCH=8")
			w.eventually(time.Until(at.Add(atMost)), "others get the locked rows", func() error {
				if n := w.lockable(); n < skus {
					return fmt.Errorf("%d of %d can be locked", n, skus)
				}
				return nil
			})
			t.Logf("the rows were free %.1f s after the worker was lost", time.Since(at).Seconds())
			if !tt.holds {
				w.eventually(120*time.Second, "others do all the work", func() error {
					if n := w.count(`SELECT COUNT(*) FROM orders WHERE status <> 'PENDING'`); n < want.total() {
						return fmt.Errorf("%d of %d orders have ended", n, want.total())
					}
					return nil
				})
			}
			for _, l := range lost {
				l.find()
			}
			w.eventually(60*time.Second, "they work again", func() error {
				var errs []error
				for _, l := range lost {
					errs = append(errs, l.ready())
				}
				return errors.Join(errs...)
			})
			more, wanted := orders(40)
			w.submit(more...)
			want = want.plus(wanted)
			w.rest(want.total(), 120*time.Second)
			w.verify(want)
			w.nothingSpent()
			w.nothingParked()
			for _, l := range lost {
				l.stop()
			}
		})
	}
}

// moveStock is in the statement that changes what a transaction has locked of the stock, and in
// no other: the engine changes its instances by one of the same form.
const moveStock = "STRAIGHT_JOIN inventory"

// lockable returns how many rows of the stock nobody has locked.
func (w *wheel) lockable() (n int) {
	w.t.Helper()
	rows, err := w.db.QueryContext(w.t.Context(), `SELECT sku FROM inventory FOR UPDATE SKIP LOCKED`)
	if err != nil {
		w.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		n++
	}
	if err := rows.Err(); err != nil {
		w.t.Fatal(err)
	}
	return n
}

// nothingParked demands that the queues for parked messages are empty.
func (w *wheel) nothingParked() {
	w.t.Helper()
	for _, q := range handlers.Queues {
		if ready, _ := w.broker.Queue(w.t, q+".parked"); ready > 0 {
			w.t.Errorf("%d messages of %s are parked", ready, q)
		}
	}
}
