package e2e

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/testenv"
)

// absence is a time in which workers cannot work because of one of their servers.
type absence struct {
	name   string
	begin  func(c *crew)
	during func(c *crew) // what else is to be seen then
	lasts  time.Duration // at least
	end    func(c *crew)
	idle   bool // nobody can do anything meanwhile
}

// P5: the database cannot be used, in all the ways there are, while sagas are under way. Messages
// wait, and that is all.
func TestDatabaseIsAway(t *testing.T) {
	t.Parallel()
	// A message is in hand during one absence, and handed back once at most.
	c := newCrew(t, testenv.Private(t), 2, "BACKSTEP_MAX_HOLD=3s")
	for _, a := range []absence{
		{
			name:   "shut down for longer than deliveries are held",
			begin:  func(c *crew) { c.must(c.servers.StopDatabase(c.t.Context())) },
			during: (*crew).handedBack, idle: true,
			end: func(c *crew) { c.must(c.servers.StartDatabase(c.t.Context())) },
		},
		{
			name:   "killed",
			begin:  func(c *crew) { c.must(c.servers.KillDatabase()) },
			during: (*crew).startedAgainAndAgain, idle: true,
			end: func(c *crew) { c.must(c.servers.StartDatabase(c.t.Context())) },
		},
		{
			name:  "frozen for longer than an answer is waited for",
			begin: func(c *crew) { c.must(syscall.Kill(c.servers.MySQLPID(), syscall.SIGSTOP)) },
			lasts: readTimeout + 2*time.Second, idle: true,
			end: func(c *crew) { c.must(syscall.Kill(c.servers.MySQLPID(), syscall.SIGCONT)) },
		},
		{
			name:  "read-only",
			begin: func(c *crew) { c.exec(`SET GLOBAL ` + c.readOnly() + ` = 1`) },
			idle:  true,
			end:   func(c *crew) { c.exec(`SET GLOBAL read_only = 0`) }, // and with it super_read_only
		},
		{
			name:  "out of connections",
			begin: (*crew).useUpConnections,
			idle:  true,
			end:   func(c *crew) { c.release() },
		},
		{
			name:  "every connection killed, again and again",
			begin: (*crew).killConnections,
		},
	} {
		t.Run(a.name, func(t *testing.T) { c.outage(t, a) })
	}
	c.t = t
	c.over()
	c.nothingSpent()
}

// TestBrokerIsAway is the same for the broker. No ack crosses from one session to another.
func TestBrokerIsAway(t *testing.T) {
	t.Parallel()
	c := newCrew(t, testenv.Private(t), 10)
	for _, a := range []absence{
		{
			name:  "shut down",
			begin: func(c *crew) { c.must(c.servers.StopBroker(c.t.Context())) },
			idle:  true,
			end:   func(c *crew) { c.must(c.servers.StartBroker(c.t.Context())) },
		},
		{
			name:  "killed",
			begin: func(c *crew) { c.must(c.servers.KillBroker()) },
			idle:  true,
			end:   func(c *crew) { c.must(c.servers.StartBroker(c.t.Context())) },
		},
		{ // B40
			name: "connections closed by force, again and again",
			begin: func(c *crew) {
				before := c.brokerLog()
				c.ctl("eval", fmt.Sprintf(closeAgainAndAgain, c.userName(), len(c.procs)+len(c.workers), 6))
				for line := range strings.Lines(strings.TrimPrefix(c.brokerLog(), before)) {
					if strings.Contains(line, "unknown delivery tag") {
						c.t.Errorf("an ack went to the wrong session: the broker says %s", line)
					}
				}
			},
		},
		{
			name:  "the broker closes a channel",
			begin: func(c *crew) { c.wire.ackTwice(1) },
			during: func(c *crew) {
				c.eventually(20*time.Second, "it has met an ack twice", func() error {
					if !c.wire.ackedTwice() {
						return errors.New("not yet")
					}
					return nil
				})
				c.saysWhy("406", "unknown delivery tag")
			},
		},
		{ // B37
			name: "a delivery is not acked in time",
			begin: func(c *crew) {
				c.ackTimeout(1500)
				c.release = c.lockStock()
				c.order(late)
			},
			during: func(c *crew) { c.saysWhy("acknowledgement", "acked in time") },
			end: func(c *crew) {
				c.release()
				c.ackTimeout(1_800_000)
			},
		},
	} {
		t.Run(a.name, func(t *testing.T) { c.outage(t, a) })
	}
	c.t = t
	c.nothingSpent()
	// B39: what is in the queue is lost, and what is sent meanwhile is returned. It is declared
	// again, and an operator brings back what was lost.
	t.Run("a queue is deleted", func(t *testing.T) {
		c.outage(t, absence{
			begin: func(c *crew) { c.broker.DeleteQueue(c.t, handlers.InventoryQueue) },
			during: func(c *crew) {
				c.consumed()
				c.run("outbox", "republish", "--queue", handlers.InventoryQueue, "--since", "1h", "--reason", "deleted")
			},
		})
	})
	c.t = t
	for _, w := range c.workers {
		if used := w.cpu(time.Second); used > 0.25 {
			t.Errorf("a worker that has nothing to do uses %.0f %% of a processor", 100*used)
		}
	}
	c.over()
}

const (
	underWay = 100 // orders that are under way when something happens
	late     = 20  // that come when it is over
	// growth is how much more memory a process may have at the end of an outage, in bytes.
	growth = 16 << 20
)

// outage makes a crew work, go through an absence, and finish the work.
func (c *crew) outage(t *testing.T, a absence) {
	c.t = t
	before := c.ended()
	c.order(underWay)
	c.eventually(60*time.Second, "some sagas have ended", func() error {
		if n := c.ended(); n <= before+underWay/10 {
			return fmt.Errorf("%d have", n-before)
		}
		return nil
	})
	if c.ended() == c.want.total() {
		t.Error("all have ended: the test shows nothing")
	}
	var rss []int
	for _, w := range c.workers {
		rss = append(rss, w.rss())
	}
	began := time.Now()
	a.begin(c)
	if a.idle {
		for _, w := range c.workers {
			if used := w.cpu(time.Second); used > 0.25 {
				t.Errorf("a worker that can do nothing uses %.0f %% of a processor", 100*used)
			}
		}
	}
	if a.during != nil {
		a.during(c)
	}
	time.Sleep(a.lasts - time.Since(began)) // that is how long it lasts: longer than a time-out
	for i, w := range c.workers {
		grown := w.rss() - rss[i]
		t.Logf("a worker has grown by %d KiB", grown>>10)
		if grown > growth {
			t.Errorf("a worker has grown by %d KiB during the outage", grown>>10)
		}
	}
	if a.end != nil {
		a.end(c)
	}
	over := time.Now()
	lasted := over.Sub(began)
	recorded := func() (n int, err error) {
		err = c.db.QueryRowContext(t.Context(), `SELECT COUNT(*) FROM inbox_messages`).Scan(&n)
		return n, err
	}
	done := 0
	c.eventually(recovery, "the database answers", func() (err error) { done, err = recorded(); return err })
	c.order(late)
	c.eventually(time.Until(over.Add(recovery+slack)), "messages are processed again", func() error {
		if n, err := recorded(); err != nil || n == done {
			return cmp.Or(err, errors.New("none"))
		}
		return nil
	})
	t.Logf("it lasted %.1f s; the first commit came %.1f s after it", lasted.Seconds(), time.Since(over).Seconds())
	c.consumed()
	c.allEnded()
}
