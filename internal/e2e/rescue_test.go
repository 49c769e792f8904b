package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/testenv"
)

// limit is how long a queue must have been empty, or by how much it must have come past a command,
// for the command to be lost.
const limit = 2 * time.Second

// held is how many orders wait for their stock: more than all workers may have in hand.
const held = 80

// TestRescue has the broker lose the commands of sagas that are under way, in every way there is.
// Nobody does anything about it, and all sagas end: what they await is emitted again, once, and
// nothing else is. The deadlines of others outlast the time without a broker.
func TestRescue(t *testing.T) {
	t.Parallel()
	servers := testenv.Private(t)
	w := wheelOn(t, servers)
	c := &crew{stage: &stage{wheel: w, servers: servers}}
	c.procs = append(w.together("relay", 2), w.start("worker", "BACKSTEP_QUEUES=orders,replies"))
	w.awaitQueues()
	for _, tt := range []struct {
		name string
		lose func(t *testing.T, lost int) (then func())
	}{
		{"every queue is purged", func(t *testing.T, lost int) func() {
			purged := 0
			for _, q := range steps {
				purged += w.broker.Purge(t, q)
			}
			if purged != lost {
				t.Errorf("%d commands were lost, want %d", purged, lost)
			}
			return func() {}
		}},
		{"every queue is deleted", func(t *testing.T, _ int) func() {
			for _, q := range steps {
				w.broker.DeleteQueue(t, q)
			}
			return func() {}
		}},
		{"the broker loses its disk, for longer than deadlines last", func(t *testing.T, _ int) func() {
			h := newHotels(t, servers)
			c.must(servers.KillBroker())
			gone := time.Now()
			c.must(servers.WipeBroker())
			c.must(servers.StartBroker(t.Context()))
			time.Sleep(away - time.Since(gone)) // that is how long it lasts
			lasted := time.Since(gone)
			w.broker.Create(t)
			h.broker.Create(t)
			h.answerOne()
			return func() { h.ended(lasted) }
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c.t = t
			awaited, lost := c.amid()
			before := c.rescues()
			then := tt.lose(t, lost)
			workers := c.stepWorkers()
			c.allEnded()
			then()
			if got := c.column(`SELECT message_id FROM (SELECT * FROM outbox_actions WHERE action = 'rescue' ORDER BY id LIMIT 1000 OFFSET ?) AS later ORDER BY message_id`, before); !slices.Equal(got, awaited) {
				t.Errorf("%d commands were emitted again:\n%s\n%d of those that were lost are awaited:\n%s",
					len(got), strings.Join(got, "\n"), len(awaited), strings.Join(awaited, "\n"))
			}
			stopAll(workers...)
		})
	}
	t.Run("a queue that is never empty is purged", func(t *testing.T) {
		c.t = t
		c.procs = append(c.procs, c.stepWorkers()...)
		before := c.rescues()
		stop := c.keepOrdering()
		defer stop()
		release := c.hold()
		purged := w.broker.Purge(t, handlers.InventoryQueue)
		last := c.count(`SELECT COUNT(*) FROM saga_instances`)
		release()
		began := time.Now()
		c.eventually(60*time.Second, "those that were under way have ended", func() error {
			n := c.count(`SELECT COUNT(*) FROM (SELECT status FROM saga_instances ORDER BY created_at, id LIMIT ?) AS early
                           WHERE status IN ('RUNNING', 'COMPENSATING')`, last)
			if n > 0 {
				return fmt.Errorf("%d of %d have not", n, last)
			}
			return nil
		})
		t.Logf("%d lost commands had been made good after %.1f s", purged, time.Since(began).Seconds())
		stop()
		c.allEnded()
		if n := c.rescues() - before; n != purged || purged == 0 {
			t.Errorf("%d commands were emitted again, %d were lost", n, purged)
		}
		c.over()
	})
}

// steps are the queues of the sagas' commands. What the broker loses of orders, no saga has begun.
var steps = []string{handlers.InventoryQueue, handlers.PaymentQueue, handlers.ShippingQueue}

// stepWorkers starts workers of these queues.
func (c *crew) stepWorkers() []*proc {
	c.t.Helper()
	return c.together("worker", 2, "BACKSTEP_BATCH=8", "BACKSTEP_RESCUE_AFTER="+limit.String(), "BACKSTEP_QUEUES="+strings.Join(steps, ","))
}

// amid brings orders as far as each step and cancels some, so that each of these queues holds
// commands, those of inventory and payment also commands to undo. None has a worker then. It returns
// the ids of those that are awaited, sorted, and how many there are with those that are not, since
// their sagas have been cancelled.
func (c *crew) amid() (awaited []string, all int) {
	c.t.Helper()
	const each, cancelled = 9, 3 // per step
	inventory := c.start("worker", "BACKSTEP_QUEUES=inventory")
	payment := c.start("worker", "BACKSTEP_QUEUES=payment")
	for _, wave := range []struct {
		step int // that the orders come to
		then func()
	}{{2, payment.stop}, {1, inventory.stop}, {0, func() {}}} {
		var msgs []amqp091.Publishing
		for range each {
			msgs = append(msgs, request(c.t, nil))
		}
		c.submit(msgs...)
		c.eventually(60*time.Second, "orders have come to a step", func() error {
			if n := c.count(`SELECT COUNT(*) FROM saga_instances WHERE status = 'RUNNING' AND current_step = ?`, wave.step); n != each {
				return fmt.Errorf("%d have come to step %d", n, wave.step)
			}
			return nil
		})
		wave.then()
	}
	for step := 1; step <= 2; step++ {
		const some = ` FROM saga_instances WHERE status = 'RUNNING' AND current_step = ? ORDER BY id LIMIT ?`
		for _, command := range c.column(`SELECT command_id`+some, step, cancelled) {
			c.moot[command] = true
		}
		for _, id := range c.column(`SELECT id`+some, step, cancelled) {
			c.broker.Publish(c.t, message.CommandsExchange, handlers.OrdersQueue, cancelling(id))
		}
	}
	c.want = c.want.plus(expectation{confirmed: 3*each - 2*cancelled, cancelled: 2 * cancelled})
	want := []int{each + cancelled, each + cancelled, each} // commands, by queue
	c.eventually(30*time.Second, "the queues hold all commands", func() error {
		for i, q := range steps {
			if ready, _ := c.broker.Queue(c.t, q); ready != want[i] {
				return fmt.Errorf("%s holds %d, want %d", q, ready, want[i])
			}
		}
		return nil
	})
	return c.column(`SELECT command_id FROM saga_instances WHERE status IN ('RUNNING', 'COMPENSATING') ORDER BY command_id`), 3*each + 2*cancelled
}

// rescues is how often a command was emitted again.
func (w *wheel) rescues() int {
	w.t.Helper()
	return w.count(`SELECT COUNT(*) FROM outbox_actions WHERE action = 'rescue'`)
}

// column returns the rows of a query, each of one string.
func (w *wheel) column(query string, args ...any) (all []string) {
	w.t.Helper()
	rows, err := w.db.QueryContext(w.t.Context(), query, args...)
	if err != nil {
		w.t.Fatalf("%s: %v", query, err)
	}
	defer rows.Close()
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			w.t.Fatal(err)
		}
		all = append(all, s)
	}
	if err := rows.Err(); err != nil {
		w.t.Fatal(err)
	}
	return all
}

// hold makes orders and waits until they all wait for their stock, most of them in the queue. They
// go on when the function it returns is called.
func (c *crew) hold() (release func()) {
	c.t.Helper()
	unlock := c.lockStock()
	c.order(held)
	c.eventually(60*time.Second, "all commands are in the queue or in hand", func() error {
		waiting := c.count(`SELECT COUNT(*) FROM saga_instances WHERE status = 'RUNNING' AND current_step = 0`)
		pending := c.count(`SELECT COUNT(*) FROM outbox_events WHERE status = 'PENDING'`)
		if waiting < held || pending > 0 {
			return fmt.Errorf("%d wait, %d are pending", waiting, pending)
		}
		return nil
	})
	return unlock
}

// keepOrdering makes orders all the time, until the function it returns is called.
func (c *crew) keepOrdering() (stop func()) {
	ctx, cancel := context.WithCancel(c.t.Context())
	var done sync.WaitGroup
	var more expectation
	done.Go(func() {
		for ctx.Err() == nil {
			msgs, want := orders(5)
			c.submit(msgs...)
			more = more.plus(want)
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond): // the pace of the load
			}
		}
	})
	return sync.OnceFunc(func() {
		cancel()
		done.Wait()
		c.want = c.want.plus(more)
	})
}

// B95: sagas that waited while nobody was there go on at once when a worker of their queue is, and
// nobody has to order anything. One of another queue takes nothing away.
func TestSagasGoOnByThemselves(t *testing.T) {
	t.Parallel()
	w := newWheel(t)
	procs := []*proc{w.start("relay"), w.start("worker", "BACKSTEP_QUEUES=orders")}
	w.awaitQueues()
	msgs, want := orders(50)
	w.submit(msgs...)
	w.eventually(60*time.Second, "all commands are in the queue", func() error {
		if ready, _ := w.broker.Queue(t, handlers.InventoryQueue); ready < len(msgs) {
			return fmt.Errorf("%d are", ready)
		}
		return nil
	})
	for _, p := range procs {
		p.signal(syscall.SIGKILL)
		<-p.done
	}
	w.start("relay")
	other := w.start("worker", "BACKSTEP_QUEUES=shipping")
	w.eventually(30*time.Second, "the other worker works", other.ready)
	w.eventually(30*time.Second, "it has written down that it has nothing to do", func() error {
		if w.count(`SELECT COUNT(*) FROM saga_consumers WHERE queue = 'shipping' AND idle_since IS NOT NULL`) == 0 {
			return errors.New("it has not")
		}
		return nil
	})
	if ready, _ := w.broker.Queue(t, handlers.InventoryQueue); ready != len(msgs) {
		t.Errorf("%d commands wait, want all %d", ready, len(msgs))
	}
	worker := w.start("worker")
	w.eventually(30*time.Second, "a worker works", worker.ready)
	began := time.Now()
	// That takes no poll. Whatever looks for work from time to time, for what was lost, does so later.
	w.eventually(10*time.Second, "all have gone on", func() error {
		if n := w.count(`SELECT COUNT(*) FROM saga_instances WHERE status = 'RUNNING' AND current_step = 0`); n > 0 {
			return fmt.Errorf("%d have not", n)
		}
		return nil
	})
	t.Logf("all had gone on %.1f s after a worker was ready", time.Since(began).Seconds())
	w.rest(want.total(), 60*time.Second)
	w.verify(want)
	w.nothingSpent()
	if n := w.count(`SELECT COUNT(*) FROM outbox_actions`); n > 0 {
		t.Errorf("%d commands were emitted again", n)
	}
}
