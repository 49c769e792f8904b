package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// B07: what no queue is bound for is never PUBLISHED. Its attempts are counted with a reason
// that names exchange and routing key; after ParkAfter it is PARKED and whoever waits is told
// in the same transaction.
func TestUnroutableIsParked(t *testing.T) {
	t.Parallel()
	db, b := database(t), newBroker(t)
	b.queue(t, "bound", nil)
	exec(t, db, `CREATE TABLE told (message_id VARBINARY(255), reason TEXT)`)
	var refuse atomic.Bool
	refuse.Store(true)
	tried := make(chan struct{}, 1000)
	parked := func(ctx context.Context, tx *sqltx.Tx, m *message.Message, reason string) error {
		if _, err := tx.Exec(ctx, `INSERT INTO told VALUES (?, ?)`, []byte(m.MessageID), reason); err != nil {
			return err
		}
		tried <- struct{}{}
		if refuse.Load() {
			return errors.New("the saga cannot be told now")
		}
		return nil
	}
	start(t, db, b, outbox.Config{ParkAfter: 500 * time.Millisecond, Parked: parked})
	var msgs []message.Message
	for i := range 10 {
		msgs = append(msgs, command("bound", fmt.Sprintf("good%d", i)), command("nowhere", fmt.Sprintf("bad%d", i)))
	}
	add(t, db, msgs...)
	s := b.consume(t, "bound")
	same(t, "arrived", s.await(t, 10), names("good", 10))
	eventually(t, "each was refused", func() bool {
		return number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE attempts > 0 AND last_error LIKE '%backstep.commands%nowhere%312%'`) == 10
	})
	<-tried
	<-tried
	if n := number(t, db, `SELECT (SELECT COUNT(*) FROM outbox_events WHERE status = 'PARKED') + (SELECT COUNT(*) FROM told)`); n != 0 {
		t.Errorf("%d rows are parked or told about, although that failed", n)
	}
	// Parking goes on failing, and nobody else has to wait for it.
	add(t, db, command("bound", "meanwhile"))
	eventually(t, "another row is marked", func() bool { return having(t, db, "PUBLISHED") == 11 })
	refuse.Store(false)
	eventually(t, "all are parked", func() bool { return having(t, db, "PARKED") == 10 })
	if n := number(t, db, `
SELECT COUNT(*) FROM outbox_events JOIN told USING (message_id)
 WHERE status = 'PARKED' AND routing_key = 'nowhere' AND last_error = reason AND reason LIKE '%backstep.commands%nowhere%'`); n != 10 {
		t.Errorf("%d rows are parked and told about with the same reason, want 10", n)
	}
	if n := number(t, db, `SELECT COUNT(*) FROM told`); n != 10 {
		t.Errorf("told %d times, want 10", n)
	}
	if n := len(s.all()); n != 11 {
		t.Errorf("%d messages arrived, want 11", n)
	}
}

// An unroutable row is delivered when its queue is bound in time, the rows of its key behind
// it, and others never wait for it.
func TestUnroutableIsDeliveredWhenBound(t *testing.T) {
	t.Parallel()
	db, b := database(t), newBroker(t)
	b.queue(t, "bound", nil)
	b.queue(t, "late", nil)
	b.Unbind(t, message.CommandsExchange, "late", "late")
	start(t, db, b, outbox.Config{})
	for i := range 5 {
		add(t, db, keyed(command("late", fmt.Sprintf("late%d", i)), "k"), keyed(command("bound", fmt.Sprintf("behind%d", i)), "k"),
			command("bound", fmt.Sprintf("other%d", i)))
	}
	bound := b.consume(t, "bound")
	same(t, "arrived", bound.await(t, 5), names("other", 5))
	eventually(t, "it was refused", func() bool {
		return number(t, db, `SELECT MAX(attempts) FROM outbox_events`) > 1
	})
	b.Bind(t, message.CommandsExchange, "late", "late")
	late := b.consume(t, "late")
	equal(t, "arrived", late.await(t, 5), names("late", 5))
	equal(t, "arrived", bound.await(t, 10)[5:], names("behind", 5))
	published(t, db, 15)
}

// B27: a full queue nacks. Its rows wait, unchanged, others do not, and all arrive when there
// is room.
func TestFullQueue(t *testing.T) {
	t.Parallel()
	db, b := database(t), newBroker(t)
	b.queue(t, "full", amqp091.Table{"x-max-length": 1, "x-overflow": "reject-publish"})
	b.queue(t, "free", nil)
	start(t, db, b, outbox.Config{ParkAfter: 300 * time.Millisecond})
	add(t, db, commands("full", names("m", 30))...)
	add(t, db, commands("free", names("f", 30))...)
	same(t, "arrived", b.consume(t, "free").await(t, 30), names("f", 30))
	add(t, db, commands("free", names("g", 30))...)
	eventually(t, "others are published", func() bool {
		return number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE status = 'PUBLISHED' AND routing_key = 'free'`) == 60
	})
	never(t, "a row is charged or parked", time.Second, func() bool {
		return number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE attempts > 0 OR status = 'PARKED'`) > 0
	})
	if n := number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE status = 'PUBLISHED' AND routing_key = 'full'`); n > 2 {
		t.Errorf("%d rows are PUBLISHED to a queue that holds one", n)
	}
	b.consume(t, "full").await(t, 30)
	published(t, db, 90)
}

// B09: a row whose exchange does not exist waits as an unroutable one does. It costs its
// neighbours at most a copy when it is met first, and nothing when it is tried again.
func TestMissingExchange(t *testing.T) {
	t.Parallel()
	db, b := database(t), newBroker(t)
	b.queue(t, "q", nil)
	start(t, db, b, outbox.Config{})
	lost := to("does.not.exist", "k", "lost")
	add(t, db, command("q", "first"), lost, command("q", "a"), command("q", "b"))
	s := b.consume(t, "q")
	s.await(t, 3)
	attempts := func() int { return number(t, db, `SELECT attempts FROM outbox_events WHERE message_id = 'lost'`) }
	eventually(t, "it was refused", func() bool { return attempts() > 0 })
	contains(t, "the reason", text(t, db, `SELECT last_error FROM outbox_events WHERE message_id = 'lost'`), "404", "does.not.exist")
	eventually(t, "all others are marked", func() bool { return having(t, db, "PUBLISHED") == 3 })
	copies, n := len(s.all()), 0
	for attempts() < 5 {
		var ids []string
		for range 20 {
			n++
			ids = append(ids, fmt.Sprintf("n%d", n))
		}
		add(t, db, commands("q", ids)...)
	}
	s.await(t, 3+n)
	eventually(t, "all others are marked", func() bool { return having(t, db, "PUBLISHED") == 3+n })
	if got := len(s.all()); got != copies+n {
		t.Errorf("%d deliveries of %d rows while the missing exchange was tried", got-copies, n)
	}
	b.on(t, func(ch *amqp091.Channel) error {
		if err := ch.ExchangeDeclare("does.not.exist", "fanout", false, false, false, false, nil); err != nil {
			return err
		}
		return ch.QueueBind("q", "", "does.not.exist", false, nil)
	})
	published(t, db, 4+n)
}

// The broker closes the channel over a property it does not accept. That row is parked with
// the broker's words, its neighbours are published.
func TestRowTheBrokerClosesTheChannelOver(t *testing.T) {
	t.Parallel()
	db, b := database(t), newBroker(t)
	b.queue(t, "q", nil)
	msgs := commands("q", names("m", 60))
	msgs[20].UserID = "somebody-else"
	msgs[40].Expiration = "soon"
	add(t, db, msgs...)
	start(t, db, b, outbox.Config{})
	eventually(t, "the others are published", func() bool { return having(t, db, "PUBLISHED") == 58 && having(t, db, "PENDING") == 0 })
	for id, says := range map[string]string{"m20": "user_id", "m40": "expiration"} {
		contains(t, "the reason", text(t, db, `SELECT last_error FROM outbox_events WHERE status = 'PARKED' AND message_id = ?`, []byte(id)), "406", says)
	}
	if ids := b.consume(t, "q").await(t, 58); len(ids) != 58 {
		t.Errorf("%d different messages arrived", len(ids))
	}
}
