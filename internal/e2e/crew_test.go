package e2e

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/testenv"
)

// crew is workers and relays that go through one absence after the other and are never restarted.
type crew struct {
	*stage
	wire    *wire // of the first worker to the broker
	workers []*proc
	procs   []*proc // and the relays
	want    expectation
	release func() // of a lock
}

// newCrew starts a crew whose database account has no rights beyond its database.
func newCrew(t *testing.T, servers *testenv.Servers, maxDeliveries int, env ...string) *crew {
	t.Helper()
	w := wheelOn(t, servers)
	w.dsn = w.account("crew") + "&readTimeout=" + readTimeout.String()
	c := &crew{stage: &stage{wheel: w, servers: servers, user: w.broker.User(t, ".*", ".*", ".*")}}
	// One delivery more, and the broker itself moves the message to the parked ones.
	c.ctl("set_policy", "-p", w.broker.Vhost, "deliveries", ".*", fmt.Sprintf(`{"delivery-limit":%d}`, maxDeliveries), "--apply-to", "queues")
	c.wire = wired(t, servers.AMQPURL(""))
	by, err := url.Parse(c.user)
	if err != nil {
		t.Fatal(err)
	}
	by.Host = c.wire.address
	for _, u := range []string{by.String(), c.user} {
		c.workers = append(c.workers, w.start("worker", append(env, "BACKSTEP_AMQP_URL="+u, "BACKSTEP_BATCH=8")...))
	}
	c.procs = append(w.together("relay", 2, "BACKSTEP_AMQP_URL="+c.user), c.workers...)
	w.awaitQueues()
	c.order(underWay) // they have the memory that they need for this
	c.allEnded()
	return c
}

// readTimeout is the shortest that a DSN may have.
const readTimeout = 10 * time.Second

// account makes an account with no rights beyond the wheel's database, and returns its DSN.
func (w *wheel) account(name string) (dsn string) {
	w.t.Helper()
	cfg, err := mysql.ParseDSN(w.dsn)
	if err != nil {
		w.t.Fatal(err)
	}
	w.exec(`CREATE USER '` + name + `'@'%' IDENTIFIED BY 'secret'`)
	w.exec(`GRANT ALL ON ` + cfg.DBName + `.* TO '` + name + `'@'%'`)
	cfg.User, cfg.Passwd = name, "secret"
	return cfg.FormatDSN()
}

func (w *wheel) exec(query string) {
	w.t.Helper()
	if _, err := w.db.ExecContext(w.t.Context(), query); err != nil {
		w.t.Fatalf("%s: %v", query, err)
	}
}

// must ends the test over a fault that could not be brought about.
func (c *crew) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// saysWhy waits until a worker says why it subscribes again, in one of these ways.
func (c *crew) saysWhy(reasons ...string) {
	c.t.Helper()
	c.eventually(30*time.Second, "a worker says why it subscribes again", func() error {
		for _, w := range c.workers {
			for line := range strings.Lines(w.text()) {
				if strings.Contains(line, "subscribing again") && slices.ContainsFunc(reasons, func(r string) bool { return strings.Contains(line, r) }) {
					return nil
				}
			}
		}
		return errors.New("none does")
	})
}

// ackTimeout sets how long the broker waits for an ack, in milliseconds, for all consumers from
// now on. It closes the connections of those there are.
func (c *crew) ackTimeout(ms int) {
	c.t.Helper()
	c.ctl("eval", fmt.Sprintf(`application:set_env(rabbit, consumer_timeout, %d), application:set_env(rabbit, channel_tick_interval, 500).`, ms))
	c.ctl("close_all_connections", "--vhost", c.broker.Vhost, "so that it counts at once")
	c.consumed()
}

// lockStock locks all stock until the function it returns is called.
func (c *crew) lockStock() (release func()) {
	c.t.Helper()
	tx, err := c.db.BeginTx(c.t.Context(), nil)
	c.must(err)
	_, err = tx.ExecContext(c.t.Context(), `UPDATE inventory SET initial = initial`)
	c.must(err)
	return func() { c.must(tx.Rollback()) }
}

func (c *crew) brokerLog() string {
	c.t.Helper()
	text, err := c.servers.BrokerLog()
	c.must(err)
	return text
}

// ended returns how many orders have.
func (c *crew) ended() int { return c.count(`SELECT COUNT(*) FROM orders WHERE status <> 'PENDING'`) }

func (c *crew) allEnded() {
	c.t.Helper()
	c.eventually(120*time.Second, "all sagas have ended", func() error {
		if n := c.ended(); n < c.want.total() {
			return fmt.Errorf("%d of %d have", n, c.want.total())
		}
		return nil
	})
}

// order submits n orders.
func (c *crew) order(n int) {
	c.t.Helper()
	msgs, more := orders(n)
	c.want = c.want.plus(more)
	c.submit(msgs...)
}

// consumed demands that each lane consumes again.
func (c *crew) consumed() {
	c.t.Helper()
	c.eventually(20*time.Second, "all lanes consume", func() error {
		for _, name := range handlers.Queues {
			q, err := c.inspect(name)
			if err == nil && q.Consumers != len(c.workers) {
				err = fmt.Errorf("%d consume %s", q.Consumers, name)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// startedAgainAndAgain starts more workers, which die (B42): before there is a database they take
// no deliveries.
func (c *crew) startedAgainAndAgain() {
	c.t.Helper()
	for range 3 {
		p := c.start("worker", "BACKSTEP_AMQP_URL="+c.user)
		c.eventually(20*time.Second, "another worker waits", func() error {
			if !strings.Contains(p.text(), "waiting for the database") {
				return errors.New(p.text())
			}
			return nil
		})
		p.signal(syscall.SIGKILL)
		<-p.done
	}
}

// handedBack waits until lanes that were given orders meanwhile hold them no more.
func (c *crew) handedBack() {
	c.t.Helper()
	c.order(late)
	c.eventually(20*time.Second, "orders are handed back", func() error {
		q, err := c.inspect(handlers.OrdersQueue)
		if err == nil && (q.Consumers > 0 || q.Messages < late) {
			err = fmt.Errorf("%d consume, %d are ready", q.Consumers, q.Messages)
		}
		return err
	})
}

// inspect returns what the broker says about a queue; Messages are those that are ready.
func (c *crew) inspect(name string) (q amqp091.Queue, err error) {
	c.t.Helper()
	c.onChannel(func(ch *amqp091.Channel) error {
		q, err = ch.QueueDeclarePassive(name, true, false, false, false, nil)
		return nil
	})
	return q, err
}

// over demands that nothing is lost, doubled or parked, and that nobody has ended.
func (c *crew) over() {
	c.t.Helper()
	c.rest(c.want.total(), 60*time.Second)
	c.verify(c.want)
	c.nothingParked()
	for _, p := range c.procs {
		select {
		case <-p.done:
			c.t.Errorf("a %s ended: %v", p.role, p.err)
		default:
		}
	}
	stopAll(c.procs...)
}

// readOnly returns the variable that keeps everybody from writing who may not change it.
func (c *crew) readOnly() string {
	if c.count(`SELECT VERSION() LIKE '%MariaDB%'`) == 1 {
		return "read_only"
	}
	return "super_read_only"
}

// killConnections kills all of the crew's connections, for some seconds.
func (c *crew) killConnections() {
	c.t.Helper()
	for range 10 {
		if c.kill() == 0 {
			c.t.Error("nobody was connected")
		}
		time.Sleep(500 * time.Millisecond) // the pace of the KILLs is what is tested: in between they connect again, and work
	}
}

// kill kills the crew's connections and returns how many they were.
func (c *crew) kill() (n int) {
	c.t.Helper()
	cfg, err := mysql.ParseDSN(c.dsn)
	c.must(err)
	ids, err := testenv.Processes(c.t.Context(), c.db, `user = ?`, cfg.User)
	c.must(err)
	for _, id := range ids {
		if _, err := c.db.ExecContext(c.t.Context(), fmt.Sprintf("KILL %d", id)); err == nil {
			n++ // an error means that it has gone meanwhile
		}
	}
	return n
}

// useUpConnections gives all the connections that the server has to somebody else, until release.
func (c *crew) useUpConnections() {
	c.t.Helper()
	other := openDSN(c.t, c.account("hog"))
	const fewest = 10 // that MariaDB can be made to take
	c.exec(fmt.Sprintf(`SET GLOBAL max_connections = %d`, fewest))
	c.eventually(20*time.Second, "the crew has no connection and gets none", func() error {
		left := c.kill()
		for {
			// It is kept until the pool is closed.
			if _, err := other.Conn(c.t.Context()); err != nil {
				if left > 0 {
					return fmt.Errorf("it had %d", left)
				}
				return nil
			}
		}
	})
	c.release = func() {
		c.exec(`SET GLOBAL max_connections = 500`)
		c.must(other.Close())
	}
}

// rss returns how much memory the process has, in bytes.
func (p *proc) rss() int {
	p.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	var size, resident int
	if _, err := fmt.Sscan(string(text), &size, &resident); err != nil {
		p.t.Fatal(err)
	}
	return resident * os.Getpagesize()
}

func (e expectation) plus(o expectation) expectation {
	return expectation{e.confirmed + o.confirmed, e.noStock + o.noStock, e.declined + o.declined, e.refused + o.refused, e.cancelled + o.cancelled}
}
