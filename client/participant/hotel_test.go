package participant_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/client/participant"
	"backstep/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// rooms is how many are free in a new hotel.
const rooms = 10

// hotel is a participant in one language or another, on a broker of its own.
type hotel struct {
	t       *testing.T
	broker  *testenv.Broker
	ch      *amqp091.Channel
	replies <-chan amqp091.Delivery

	start func() (ended <-chan error) // begins to serve
	free  func() int                  // rooms, by the database
}

// newHotel makes what the engine of a saga would have: the exchange, and a queue for replies, which
// is bound by listen.
func newHotel(t *testing.T) *hotel {
	t.Helper()
	h := &hotel{t: t, broker: testenv.Vhost(t)}
	conn, err := amqp091.Dial(h.broker.URL)
	h.must(err)
	t.Cleanup(func() { _ = conn.Close() }) // the vhost goes too
	h.ch, err = conn.Channel()
	h.must(err)
	h.must(h.ch.ExchangeDeclare(participant.Exchange, "direct", true, false, false, false, nil))
	h.must(h.ch.ExchangeDeclare("backstep.parked", "direct", true, false, false, false, nil))
	for queue, args := range map[string]amqp091.Table{
		"replies": {"x-queue-type": "quorum"},
		"hotel": { // what docs/messages.md asks for
			"x-queue-type": "quorum", "x-overflow": "reject-publish", "x-delivery-limit": int32(20),
			"x-dead-letter-exchange": "backstep.parked", "x-dead-letter-routing-key": "hotel", "x-dead-letter-strategy": "at-least-once",
		},
		"hotel.parked": {"x-queue-type": "quorum", "x-overflow": "reject-publish", "x-delivery-limit": int32(math.MaxInt32)},
	} {
		_, err = h.ch.QueueDeclare(queue, true, false, false, false, args)
		h.must(err)
	}
	h.must(h.ch.QueueBind("hotel", "hotel", participant.Exchange, false, nil))
	h.must(h.ch.QueueBind("hotel.parked", "hotel", "backstep.parked", false, nil))
	h.replies, err = h.ch.Consume("replies", "", true, false, false, false, nil)
	h.must(err)
	return h
}

func (h *hotel) must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatal(err)
	}
}

// listen makes replies routable.
func (h *hotel) listen() {
	h.t.Helper()
	h.must(h.ch.QueueBind("replies", "replies", participant.Exchange, false, nil))
}

// goHotel is served by the package's example.
func goHotel(t *testing.T) *hotel {
	h := newHotel(t)
	db := openHotel(t)
	h.start = func() <-chan error {
		ended := make(chan error, 1)
		ctx, cancel := context.WithCancel(context.Background()) // ended by the test's cleanup
		done := make(chan struct{})
		go func() { defer close(done); ended <- serve(ctx, db, h.broker.URL) }()
		t.Cleanup(func() { cancel(); <-done })
		return ended
	}
	h.free = func() (n int) {
		h.must(db.QueryRow(`SELECT free FROM hotel`).Scan(&n))
		return n
	}
	return h
}

// openHotel makes the database of a hotel. Its isolation level is the server's default, as most
// services have it.
func openHotel(t *testing.T) *sql.DB {
	t.Helper()
	pool, err := sql.Open("mysql", testenv.Database(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pool.Close() })
	for _, query := range []string{
		participant.Schema, participant.Schema, // it can be run twice
		`CREATE TABLE hotel (free INT NOT NULL)`, fmt.Sprintf(`INSERT INTO hotel VALUES (%d)`, rooms),
	} {
		if _, err := pool.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	return pool
}

// pythonHotel is examples/participant-python.
func pythonHotel(t *testing.T) *hotel {
	python := testenv.PythonWithPika(t)
	h := newHotel(t)
	file := filepath.Join(t.TempDir(), "hotel.db")
	h.start = func() <-chan error {
		cmd := exec.Command(python, "../../examples/participant-python/participant.py")
		cmd.Env = append(os.Environ(), "AMQP_URL="+h.broker.URL, "HOTEL_DB="+file)
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		h.must(cmd.Start())
		ended, done := make(chan error, 1), make(chan struct{})
		go func() {
			defer close(done)
			err := cmd.Wait()
			ended <- fmt.Errorf("%w: %s", err, out.String())
		}()
		t.Cleanup(func() { _ = cmd.Process.Kill(); <-done }) // it may have ended
		return ended
	}
	h.free = func() int {
		out, err := exec.CommandContext(t.Context(), python, "-c",
			`import sqlite3, sys; print(sqlite3.connect(sys.argv[1], timeout=30).execute("SELECT free FROM hotel").fetchone()[0])`, file).CombinedOutput()
		n, e := strconv.Atoi(strings.TrimSpace(string(out)))
		if err != nil || e != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return n
	}
	return h
}

// command is one that a saga sends.
type command struct {
	saga, direction string
	attempt, nights int
}

func book(saga string) command   { return command{saga, "execute", 1, 2} }
func cancel(saga string) command { return command{saga, "compensate", 1, 2} }

func (c command) id() string { return fmt.Sprintf("%s-%s-%d", c.saga, c.direction, c.attempt) }

func (c command) publishing() amqp091.Publishing {
	return amqp091.Publishing{
		MessageId: c.id(), Type: "trip.book-room", CorrelationId: c.saga, ReplyTo: "replies", ContentType: "application/json", DeliveryMode: 2,
		Headers: amqp091.Table{
			"x-saga-id": c.saga, "x-saga-type": "trip", "x-saga-version": int64(1), "x-step": "book-room",
			"x-direction": c.direction, "x-attempt": int64(c.attempt), "x-request-id": c.saga, "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		},
		Body: fmt.Appendf(nil, `{"input":{"guest":"Ada","nights":%d},"result":null}`, c.nights),
	}
}

func (h *hotel) send(p amqp091.Publishing) {
	h.t.Helper()
	h.must(h.ch.Publish(participant.Exchange, "hotel", true, false, p))
}

// reply is what the saga gets.
type reply struct{ id, status, rooms, err string }

// next waits for a reply.
func (h *hotel) next() amqp091.Delivery {
	h.t.Helper()
	select {
	case d := <-h.replies:
		return d
	case <-time.After(20 * time.Second):
		h.t.Fatal("no reply")
	}
	panic("not reached")
}

// opens waits until the hotel answers: then it has made its tables.
func (h *hotel) opens() {
	h.t.Helper()
	h.send(cancel("nobody").publishing())
	h.next()
}

// ask sends copies of a command, demands one and the same answer to each, which is returned, and no
// change of the rooms but the given one.
func (h *hotel) ask(c command, copies, change int) (r reply) {
	h.t.Helper()
	before := h.free()
	for i := range copies {
		h.send(c.publishing())
		d := h.next()
		var body struct {
			Status, Error string
			Result        json.RawMessage
		}
		h.must(json.Unmarshal(d.Body, &body))
		got := reply{d.MessageId, body.Status, string(body.Result), body.Error}
		if i > 0 && got != r {
			h.t.Errorf("copy %d of %s got another answer: %+v, not %+v", i+1, c.id(), got, r)
		}
		r = got
		want := c.publishing()
		for _, name := range []string{"x-saga-id", "x-saga-type", "x-step", "x-direction", "x-attempt", "x-request-id", "traceparent"} {
			if fmt.Sprint(d.Headers[name]) != fmt.Sprint(want.Headers[name]) {
				h.t.Errorf("the reply has %s %v, the command %v", name, d.Headers[name], want.Headers[name])
			}
		}
		if age := time.Since(d.Timestamp); age < -time.Second || age > time.Minute {
			h.t.Errorf("the reply is said to be made %s ago", age)
		}
		if d.Type != "saga.reply" || d.CorrelationId != c.saga || d.ContentType != "application/json" || d.DeliveryMode != 2 || d.MessageId == "" {
			h.t.Errorf("properties of the reply: %+v", d)
		}
	}
	if after := h.free(); after != before+change {
		h.t.Errorf("%d copies of %s changed the free rooms by %d, want %d", copies, c.id(), after-before, change)
	}
	return r
}
