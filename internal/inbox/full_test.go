package inbox

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// A database without room is an outage, however often it says so and however many messages wait: they are
// held, and nothing is spent. Before the broker would complain they go back to it.
func TestDatabaseFull(t *testing.T) {
	t.Parallel()
	for name, hold := range map[string]time.Duration{"for a while": time.Hour, "for long": time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := database(t)
			small := fill(t, db)
			msgs := newMsgs(3)
			h := &effects{OutcomeFunc: func(ctx context.Context, tx *sqltx.Tx, _ *message.Message) message.Outcome {
				if _, err := tx.Exec(ctx, small); err != nil {
					return message.Outcome{Kind: message.Retry, Reason: err.Error()} // as the saga engine does with a step's error
				}
				return message.Outcome{}
			}}
			b := newBroker("q", msgs...)
			l := run(t, db, b, Config{Queue: "q", Handler: h, MaxAttempts: 1, MaxHold: hold})
			eventually(t, "it has been tried more often than one is when its connection is lost", func() bool { return len(h.calls()) > maxLostAlone+1 })
			equal(t, "it is said", l.logged("database full; holding deliveries") > 0, true)
			equal(t, "acked", b.settled(1)(), false)
			equal(t, "they went back", l.logged("consumer ended; subscribing again") > 0, hold < time.Second)
			exec(t, db, `DROP TRIGGER full`)
			eventually(t, "all are acked", b.settled(3))
			equal(t, "effects", number(t, db, `SELECT COUNT(*) FROM effects`), 3)
			if s := l.stats.Snapshot(); s.Done != 3 || s.Retried+s.Parked != 0 {
				t.Errorf("stats %+v", s)
			}
			if hold > time.Second { // else it may be another batch that finds room
				equal(t, "it is said that there is room", l.logged("database has room again"), 1)
			}
			equal(t, "faults", b.faults, []string(nil))
		})
	}
}

// One whose own table is full for ever, as one in memory may be, holds up no other, and ends as what fails does.
func TestOneThatNeverHasRoom(t *testing.T) {
	t.Parallel()
	db := database(t)
	small := fill(t, db)
	msgs := newMsgs(4)
	culprit := msgs[1].MessageID
	h := noRoomFor(culprit, small)
	b := newBroker("q", msgs...)
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 4, MaxAttempts: 1, MaxHold: 4 * time.Second})
	eventually(t, "the others are done", func() bool { return l.stats.Done.Load() == 3 })
	equal(t, "it is not parked at once", l.stats.Parked.Load(), int64(0))
	eventually(t, "all are acked", b.settled(4))
	r := one(t, "outbox rows", outboxRows(t, db, "TRUE"))
	if got := r.Headers.String(message.HeaderParkedReason); r.MessageID != culprit || !strings.Contains(got, "is full") {
		t.Errorf("parked %s because %q", r.MessageID, got)
	}
	equal(t, "effects", number(t, db, `SELECT COUNT(*) FROM effects`), 3)
}

// It comes first, so it is a batch of its own, and a lane that it holds up has nothing done beside it.
func TestTheFirstThatNeverHasRoom(t *testing.T) {
	t.Parallel()
	db := database(t)
	small := fill(t, db)
	msgs := newMsgs(4)
	culprit := msgs[0].MessageID
	h := noRoomFor(culprit, small)
	b := newBroker("q", msgs...)
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 4, MaxAttempts: 1, MaxHold: time.Second})
	eventually(t, "the others are done", func() bool { return l.stats.Done.Load() == 3 })
	equal(t, "that its failed attempt found room says that there is", l.logged("database has room again"), 0)
}

// That another found the last room at the beginning of an outage says nothing of its rest: nothing is spent.
func TestDatabaseFullAfterTheLastRoom(t *testing.T) {
	t.Parallel()
	db := database(t)
	small := fill(t, db)
	msgs := newMsgs(2)
	large := msgs[1].MessageID
	h := noRoomFor(large, small)
	b := newBroker("q")
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 2, MaxHold: 6 * time.Second})
	b.put(newMsgs(1)...) // opens the prefetch, so that the two come together
	eventually(t, "it is open", func() bool { return l.stats.Done.Load() == 1 })
	b.put(msgs...)
	eventually(t, "the small one is done", func() bool { return l.stats.Done.Load() == 2 })
	exec(t, db, `CREATE TRIGGER fulllater BEFORE INSERT ON scheduled_messages FOR EACH ROW SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1114, MESSAGE_TEXT = 'The table scheduled is full'`)
	exec(t, db, `CREATE TRIGGER fulloutbox BEFORE INSERT ON outbox_events FOR EACH ROW SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1114, MESSAGE_TEXT = 'The table outbox is full'`)
	eventually(t, "a failed attempt was to be counted", func() bool {
		return l.logged("no room for a message; counting a failed attempt, if there is for that") > 0
	})
	counted := len(h.callsWith(large))
	eventually(t, "there was no room for that, and it was tried again", func() bool { return len(h.callsWith(large)) > counted+1 })
	exec(t, db, `DROP TRIGGER full`)
	exec(t, db, `DROP TRIGGER fulloutbox`)
	exec(t, db, `DROP TRIGGER fulllater`)
	eventually(t, "all are acked", b.settled(3))
	if s := l.stats.Snapshot(); s.Done != 3 || s.Retried+s.Parked != 0 {
		t.Errorf("stats %+v", s)
	}
	equal(t, "faults", b.faults, []string(nil))
}

// noRoomFor is a handler whose statement for one message needs room, unless that message's failure is counted.
func noRoomFor(id, insert string) *effects {
	return &effects{OutcomeFunc: func(ctx context.Context, tx *sqltx.Tx, m *message.Message) message.Outcome {
		if m.Failure != "" {
			return message.Outcome{Kind: message.Retry, Reason: m.Failure}
		}
		if m.MessageID == id {
			if _, err := tx.Exec(ctx, insert); err != nil {
				return message.Outcome{Kind: message.Retry, Reason: err.Error()} // as the saga engine does with a step's error
			}
		}
		return message.Outcome{}
	}}
}

// fill makes a table that is full until its trigger is dropped, and returns a statement that needs room in it.
// Neither server has a table that can be full and takes part in transactions.
func fill(t *testing.T, db *sql.DB) (insert string) {
	t.Helper()
	exec(t, db, `CREATE TABLE small (filling CHAR(255) NOT NULL)`)
	exec(t, db, `CREATE TRIGGER full BEFORE INSERT ON small FOR EACH ROW SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1114, MESSAGE_TEXT = 'The table small is full'`)
	insert = `INSERT INTO small VALUES ('')`
	if _, err := db.ExecContext(t.Context(), insert); sqltx.Classify(err) != sqltx.Full {
		t.Fatalf("the table is not full: %v", err)
	}
	return insert
}
