package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"backstep/internal/handlers"
)

// outage is a time in which nothing can be published, or much of it lost. It says nothing
// about any row.
type outage struct {
	name    string
	before  func(s *stage)
	begin   func(s *stage)
	during  func(s *stage) // what else is to be seen then
	lasts   time.Duration  // at least
	end     func(s *stage)
	after   func(s *stage)
	unready string // what /readyz says meanwhile; "" if it may say anything
	body    int    // bytes of each row
	losing  bool   // what is in the queue is lost, and returned as long as only the queue is gone
}

// queue is one that the relay declares by itself, as often as it is gone. No worker runs here.
const queue = handlers.OrdersQueue

// vhostOutages concern one virtual host.
func vhostOutages() []outage {
	return []outage{
		{ // B05, B30
			name:   "20 connections closed by force",
			before: func(s *stage) { s.other = s.start("relay", "BACKSTEP_AMQP_URL="+s.user) },
			begin: func(s *stage) {
				s.eventually(20*time.Second, "both relays publish", s.other.ready)
				s.ctl("eval", fmt.Sprintf(closeAgainAndAgain, s.userName(), 2, 10))
			},
			end: func(s *stage) { // whatever it is doing
				s.signalled = time.Now()
				s.other.signal(syscall.SIGTERM)
			},
			after: (*stage).otherEnded,
		},
		{ // B29
			name:    "the virtual host is deleted",
			begin:   func(s *stage) { s.broker.Delete(s.t) },
			lasts:   3 * time.Second,
			unready: "vhost", losing: true,
			end: func(s *stage) {
				s.broker.Create(s.t)
				s.broker.Permit(s.t, s.user, ".*", ".*", ".*")
			},
		},
		{
			name: "the user is not let in any more",
			begin: func(s *stage) {
				s.broker.Banish(s.t, s.user)
				s.ctl("close_all_connections", "--vhost", s.broker.Vhost, "so that it counts at once")
			},
			lasts:   3 * time.Second,
			unready: "access to vhost",
			end:     func(s *stage) { s.broker.Permit(s.t, s.user, ".*", ".*", ".*") },
		},
	}
}

// closeAgainAndAgain closes a user's connections as soon as there are so many, some times.
const closeAgainAndAgain = `
Own = fun() -> [P || [{pid, P}, {user, U}] <- rabbit_networking:connection_info_all([pid, user]), U == <<"%s">>] end,
Close = fun Close(0) -> done; Close(N) ->
  timer:sleep(100),
  case Own() of
    Ps when length(Ps) < %d -> Close(N);
    Ps -> rabbit_networking:close_connections(Ps, "because of a test"), Close(N - 1)
  end end,
Close(%d).`

// otherEnded demands that the other relay has stopped, and that this one has lost nothing on
// the way.
func (s *stage) otherEnded() {
	s.other.ended(s.signalled, drain+5*time.Second)
	s.fewChannels()
}

// fewChannels demands that a relay has one connection, with no more channels than those of its
// pool and one for the doorbell.
func (s *stage) fewChannels() {
	s.t.Helper()
	const most = 4 + 1
	own := 0
	for line := range strings.Lines(s.ctl("-q", "list_connections", "user", "channels")) {
		var user string
		var channels int
		if n, _ := fmt.Sscan(line, &user, &channels); n == 2 && user == s.userName() {
			own++
			if channels > most {
				s.t.Errorf("%d channels are open, want %d at most", channels, most)
			}
		}
	}
	if own != 1 {
		s.t.Errorf("%d connections are open, want one", own)
	}
}

// brokerOutages concern all that use the broker.
func brokerOutages() []outage {
	const large = 50_000
	return []outage{
		{ // B10
			name: "memory alarm", body: large,
			begin:   func(s *stage) { s.ctl("set_vm_memory_high_watermark", "0.00001") },
			before:  (*stage).prepareAlarm,
			unready: "blocked by the broker: low on memory",
			during:  (*stage).alarmed,
			end:     func(s *stage) { s.ctl("set_vm_memory_high_watermark", "0.4") },
		},
		{
			name: "disk alarm", body: large,
			begin:   func(s *stage) { s.ctl("set_disk_free_limit", "1000000000000000") },
			lasts:   3 * time.Second,
			unready: "blocked by the broker: low on disk",
			end:     func(s *stage) { s.ctl("set_disk_free_limit", "50000000") },
		},
		{ // B04; confirms and writes are waited for for 30 s, and nothing longer than that
			name: "the broker is stopped for longer than any time-out",
			begin: func(s *stage) {
				if err := s.servers.StopBroker(s.t.Context()); err != nil {
					s.t.Fatal(err)
				}
			},
			lasts:   31 * time.Second,
			unready: "not connected",
			during:  (*stage).restartedAgainAndAgain,
			end: func(s *stage) {
				if err := s.servers.StartBroker(s.t.Context()); err != nil {
					s.t.Fatal(err)
				}
			},
		},
	}
}

// Rows come all the time, before, during and after the outage. It costs them time and nothing
// else.
func testOutage(t *testing.T, s *stage, o outage, prefix string) {
	s.t = t
	if o.before != nil {
		o.before(s)
	}
	stop := s.load(prefix, o.body)
	defer stop()
	s.eventually(20*time.Second, "rows are published", func() error {
		if st := s.of(prefix); st.published < 10 {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	since := s.lastRow()
	began := time.Now()
	o.begin(s)
	if o.losing {
		since = s.lastRow()
	}
	if o.unready != "" {
		s.eventually(10*time.Second, "the relay is not ready", func() error { return s.relay.says(o.unready) })
	}
	if o.during != nil {
		o.during(s)
	}
	time.Sleep(o.lasts - time.Since(began)) // that is how long it lasts: longer than a time-out
	if st := s.of(prefix); o.unready != "" && st.pending == 0 {
		t.Errorf("%+v: nothing had to wait", st)
	}
	o.end(s)
	over := time.Now()
	rows := stop()
	s.published(time.Until(over.Add(recovery+slack)), prefix, rows)
	t.Logf("%d rows; all flowed %.1f s after the outage", rows, time.Since(over).Seconds())
	if n := s.count(`
SELECT COUNT(*) FROM outbox_events WHERE id > ? AND (attempts > 0 OR last_error IS NOT NULL) OR status = 'PARKED'`, since); n > 0 {
		t.Errorf("%d rows were charged for an outage", n)
	}
	s.arrivedSince(since, prefix)
	if o.after != nil {
		o.after(s)
	}
	s.lives()
}

// load plants rows all the time, until stop, which returns how many they were, is called.
func (s *stage) load(prefix string, body int) (stop func() int) {
	ctx, cancel := context.WithCancel(s.t.Context())
	var done sync.WaitGroup
	n := 0
	done.Go(func() {
		for ctx.Err() == nil {
			some := commands(fmt.Sprintf("%s-%d", prefix, n), 5, queue)
			for i := range some {
				some[i].body = bytes.Repeat([]byte("x"), body)
			}
			s.plant(some...)
			n += len(some)
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	return func() int {
		cancel()
		done.Wait()
		return n
	}
}

func (s *stage) lastRow() int {
	s.t.Helper()
	return s.count(`SELECT COALESCE(MAX(id), 0) FROM outbox_events`)
}

// arrivedSince demands that what was added after a row is in the queue.
func (s *stage) arrivedSince(row int, prefix string) {
	s.t.Helper()
	rs, err := s.db.QueryContext(s.t.Context(), `
SELECT message_id FROM outbox_events WHERE id > ? AND message_id LIKE CONCAT(?, '-%')`, row, []byte(prefix))
	if err != nil {
		s.t.Fatal(err)
	}
	defer rs.Close()
	seen, all, missing := s.get(queue), 0, 0
	for rs.Next() {
		var id string
		if err := rs.Scan(&id); err != nil {
			s.t.Fatal(err)
		}
		all++
		if !seen[id] {
			missing++
		}
	}
	if err := rs.Err(); err != nil {
		s.t.Fatal(err)
	}
	if missing > 0 || all == 0 {
		s.t.Errorf("%d of %d rows did not arrive", missing, all)
	}
}

// prepareAlarm starts another relay, and hands a worker's queue, elsewhere on the same broker,
// orders that it has not seen.
func (s *stage) prepareAlarm() {
	s.other = s.start("relay", "BACKSTEP_AMQP_URL="+s.user)
	s.elsewhere = wheelOn(s.t, s.servers)
	w := s.elsewhere.start("worker")
	s.elsewhere.awaitQueues()
	w.stop()
	msgs, _ := orders(alarmOrders)
	s.elsewhere.submit(msgs...)
}

const alarmOrders = 20

// alarmed demands what goes on during an alarm: a relay that is to stop does, with rows in
// flight that nobody will confirm, and workers consume and ack.
func (s *stage) alarmed() {
	s.eventually(10*time.Second, "the other relay is not ready either", func() error { return s.other.says("blocked") })
	s.signalled = time.Now()
	s.other.signal(syscall.SIGTERM)
	worker := s.elsewhere.start("worker")
	s.eventually(20*time.Second, "a worker consumes", func() error {
		if n := s.elsewhere.count(`SELECT COUNT(*) FROM orders`); n != alarmOrders {
			return fmt.Errorf("%d orders", n)
		}
		return nil
	})
	worker.stop() // which requeues what was not acked
	if ready, _ := s.elsewhere.broker.Queue(s.t, queue); ready > 0 {
		s.t.Errorf("%d orders were not acked", ready)
	}
	s.other.ended(s.signalled, drain+5*time.Second)
	if err := s.relay.ready(); err == nil {
		s.t.Error("the alarm is over: the test shows nothing")
	}
}

// drain is how long a relay waits for confirms when it is to stop. Some seconds more go into
// what comes behind: leases, the farewell to the broker, a busy machine.
const drain = 10 * time.Second

// ended demands an orderly end within some time of a signal.
func (p *proc) ended(signalled time.Time, within time.Duration) {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(time.Until(signalled.Add(within))):
		p.t.Fatalf("%s did not stop within %s of SIGTERM", p.role, within)
	}
	p.t.Logf("%s stopped %.1f s after SIGTERM", p.role, time.Since(signalled).Seconds())
	if p.err != nil {
		p.t.Errorf("%s ended with %v", p.role, p.err)
	}
}

// restartedAgainAndAgain starts and ends other relays, which have nobody to publish to.
func (s *stage) restartedAgainAndAgain() {
	for i := range 6 {
		p := s.start("relay", "BACKSTEP_AMQP_URL="+s.user)
		s.eventually(10*time.Second, "another relay runs", func() error {
			if !strings.Contains(p.text(), `"msg":"relay started"`) {
				return errors.New(p.text())
			}
			return nil
		})
		if i%2 == 1 {
			p.stop()
			continue
		}
		p.signal(syscall.SIGKILL)
		<-p.done
	}
}
