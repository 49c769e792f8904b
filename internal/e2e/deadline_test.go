package e2e

import (
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/saga"
	"backstep/internal/testenv"
)

// The database is away for longer than the deadline of a step that another service takes part in.
// TestRescue does the same to the broker.
func TestDeadlineOutlastsDatabase(t *testing.T) {
	t.Parallel()
	servers := testenv.PrivateDatabase(t)
	h := newHotels(t, servers)
	mysqld := servers.MySQLPID()
	if err := syscall.Kill(mysqld, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	time.Sleep(away) // that is how long it lasts
	lasted := time.Since(began)
	if err := syscall.Kill(mysqld, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	h.answerOne()
	h.ended(lasted)
}

const (
	hotelDeadline = 10 * time.Second
	away          = 12 * time.Second // longer than that, and than a gap in the pulse may be
	hotelSettle   = time.Second
)

// hotels are two sagas whose step another service takes part in. When an outage is over that is
// longer than their deadline, the step has as much time as it had left: the reply that comes then
// completes a saga, and one that gets none is undone when the rest has passed, and no earlier.
type hotels struct {
	*wheel
	answered amqp091.Delivery // the command of one
	asked    string           // when the other's was published
	up       string           // since when all was
}

// newHotels begins them, and has the hotel asked.
func newHotels(t *testing.T, servers *testenv.Servers) *hotels {
	t.Helper()
	def := saga.Define("away", 1, saga.RemoteStep[int, int]("hotel", "hotel", saga.Deadline(hotelDeadline), saga.NothingToUndo()))
	h := &hotels{wheel: wheelOn(t, servers)}
	h.start("relay")
	h.awaitQueues()
	h.sink("hotel")
	h.ownWorker(def, saga.KeeperConfig{Settle: hotelSettle}, 8, handlers.RepliesQueue)
	h.eventually(30*time.Second, "the pulse beats", func() error {
		if h.count(`SELECT COUNT(*) FROM saga_pulse`) == 0 {
			return errors.New("it does not")
		}
		return nil
	})
	h.begin(def, "a", 1)
	h.begin(def, "b", 2)
	h.eventually(20*time.Second, "the hotel is asked, twice", func() error {
		if n := h.count(`SELECT COUNT(*) FROM outbox_events WHERE status = 'PUBLISHED'`); n != 2 {
			return fmt.Errorf("%d times", n)
		}
		return nil
	})
	var ok bool
	if h.answered, ok = h.broker.Get(t, "hotel"); !ok {
		t.Fatal("there is no command in hotel")
	}
	h.asked = h.text(`SELECT published_at FROM outbox_events WHERE aggregate_id <> ?`, []byte(h.answered.CorrelationId))
	h.up = h.text(`SELECT up_since FROM saga_pulse`)
	return h
}

// answerOne answers one when all has been up again for so long that deadlines fire.
func (h *hotels) answerOne() {
	h.t.Helper()
	h.eventually(30*time.Second, "all is up again, for long enough for deadlines to fire", func() error {
		if h.count(`SELECT COUNT(*) FROM saga_pulse WHERE up_since > ? AND beat_at > up_since + INTERVAL ? MICROSECOND`, h.up, hotelSettle.Microseconds()) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	d := h.answered
	h.broker.Publish(h.t, message.CommandsExchange, d.ReplyTo, amqp091.Publishing{
		MessageId: message.NewID(), Type: saga.ReplyType, CorrelationId: d.CorrelationId, DeliveryMode: amqp091.Persistent,
		ContentType: "application/json", Headers: d.Headers, Body: []byte(`{"status":"completed","result":7}`),
	})
}

// ended demands that the sagas end as they should after an outage that lasted so long.
func (h *hotels) ended(lasted time.Duration) {
	h.t.Helper()
	h.eventually(60*time.Second, "both have ended", func() error {
		if n := h.count(`SELECT COUNT(*) FROM saga_instances WHERE status IN ('RUNNING', 'COMPENSATING')`); n > 0 {
			return fmt.Errorf("%d have not", n)
		}
		return nil
	})
	answered := []byte(h.answered.CorrelationId)
	if got := h.text(`SELECT GROUP_CONCAT(id = ?, ' ', status ORDER BY status SEPARATOR ', ') FROM saga_instances`, answered); got != "0 COMPENSATED, 1 COMPLETED" {
		h.t.Errorf("answered or not, the sagas are %s", got)
	}
	after := time.Duration(h.count(`SELECT TIMESTAMPDIFF(MICROSECOND, ?, updated_at) FROM saga_instances WHERE id <> ?`, h.asked, answered)) * time.Microsecond
	h.t.Logf("it was undone %.1f s after its command was published, %.1f s of which nobody could count", after.Seconds(), lasted.Seconds())
	if after < hotelDeadline+lasted {
		h.t.Errorf("it was undone %s after its command was published; the outage was %s of that, which leaves less than its %s", after, lasted, hotelDeadline)
	}
}
