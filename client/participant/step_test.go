package participant_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"

	"backstep/client/participant"
)

// deliver makes the command of a delivery.
func deliver(c command) participant.Command {
	p := c.publishing()
	return participant.Command{MessageID: p.MessageId, ReplyTo: p.ReplyTo, Headers: p.Headers, Body: p.Body}
}

// scripted is a step whose functions write, and then do as they are told.
type scripted struct {
	t           *testing.T
	db          *sql.DB
	do, undo    func(tx *sql.Tx) error
	did, undone int
}

func (s *scripted) handle(c command) (participant.Reply, error) {
	s.t.Helper()
	write := func(ctx context.Context, tx *sql.Tx, query string, then func(*sql.Tx) error) error {
		if _, err := tx.ExecContext(ctx, query); err != nil || then == nil {
			return err
		}
		return then(tx)
	}
	step := participant.Step[stay, booking]{
		Execute: func(ctx context.Context, tx *sql.Tx, info participant.Info, in stay) (booking, error) {
			s.did++
			if info != (participant.Info{SagaID: c.saga, Step: "book-room", Attempt: c.attempt}) || in.Guest != "Ada" {
				s.t.Errorf("the action got %+v and %+v", info, in)
			}
			return booking{Rooms: 1}, write(ctx, tx, `UPDATE hotel SET free = free - 1`, s.do)
		},
		Compensate: func(ctx context.Context, tx *sql.Tx, _ participant.Info, _ stay, done booking) error {
			s.undone++
			if done.Rooms != 1 {
				s.t.Errorf("the compensation got %+v", done)
			}
			return write(ctx, tx, `UPDATE hotel SET free = free + 1`, s.undo)
		},
	}
	return step.Handle(s.t.Context(), s.db, deliver(c))
}

// wants demands an answer, and how many rooms are free then.
func (s *scripted) wants(c command, status, reason string, free int) {
	s.t.Helper()
	r, err := s.handle(c)
	if err != nil {
		s.t.Fatal(err)
	}
	var body struct{ Status, Error string }
	if err := json.Unmarshal(r.Body, &body); err != nil {
		s.t.Fatal(err)
	}
	if body.Status != status || !strings.Contains(body.Error, reason) {
		s.t.Errorf("answer %s, want %s %q", r.Body, status, reason)
	}
	s.free(free)
}

func (s *scripted) free(want int) {
	s.t.Helper()
	var free int
	if err := s.db.QueryRow(`SELECT free FROM hotel`).Scan(&free); err != nil {
		s.t.Fatal(err)
	}
	if free != want {
		s.t.Errorf("%d rooms are free, want %d", free, want)
	}
}

func newScripted(t *testing.T) *scripted { return &scripted{t: t, db: openHotel(t)} }

func fails(err error) func(*sql.Tx) error { return func(*sql.Tx) error { return err } }

// What may pass is not written down: the saga asks again, and then it works, or its compensation
// finds that nothing has happened.
func TestFailureThatMayPass(t *testing.T) {
	s := newScripted(t)
	s.do = fails(errors.New("no lift \xff"))
	s.wants(book("a"), "failed", "no lift \uFFFD", rooms)
	s.do = nil
	s.wants(book("a").again(), "completed", "", rooms-1)
	s.undo = fails(errors.New("no lift"))
	s.wants(cancel("a"), "failed", "no lift", rooms-1)
	s.undo = fails(participant.Refuse("guest %s is in bed", "Ada"))
	s.wants(cancel("a").again(), "refused", "guest Ada is in bed", rooms-1)
	s.undo = nil // and somebody has woken her
	s.wants(cancel("a").again(), "completed", "", rooms)

	s.do = fails(errors.New("no lift"))
	s.wants(book("b"), "failed", "no lift", rooms)
	s.undone = 0
	s.wants(cancel("b"), "completed", "", rooms)
	if s.undone != 0 {
		t.Error("what had never happened was undone")
	}
}

// A refusal leaves no write of the action, and none of a copy.
func TestRefusalLeavesNothing(t *testing.T) {
	s := newScripted(t)
	s.do = fails(participant.Refuse("no %s", "pets"))
	s.wants(book("a"), "refused", "no pets", rooms)
	s.do = nil
	s.wants(book("a"), "refused", "no pets", rooms)
	if s.did != 1 {
		t.Errorf("the action ran %d times, want once", s.did)
	}
}

// What says nothing about the work is no answer: a lost connection is an error, a deadlock is tried
// again at once, even if the function hid it.
func TestDatabaseIsToBlame(t *testing.T) {
	s := newScripted(t)
	s.do = func(tx *sql.Tx) error {
		_, err := s.db.ExecContext(t.Context(), `KILL `+connectionID(t, tx))
		if err != nil {
			t.Fatal(err)
		}
		_, err = tx.ExecContext(t.Context(), `DO 0`)
		return err
	}
	if r, err := s.handle(book("a")); err == nil {
		t.Errorf("the connection is gone, but it answers %s", r.Body)
	}
	s.free(rooms)
	for what, cause := range map[string]error{
		"is full":                          &mysql.MySQLError{Number: 1114, Message: "The table 'bookings' is full"},
		"takes no writes":                  &mysql.MySQLError{Number: 1290, Message: "The server is running with --read-only"},
		"takes none in this transaction":   &mysql.MySQLError{Number: 1792, Message: "Cannot execute statement in a READ ONLY transaction"},
		"was not waited for":               context.Canceled,
		"was not waited for, past a limit": context.DeadlineExceeded,
	} {
		s.do = fails(fmt.Errorf("book: %w", cause))
		if r, err := s.handle(book("a")); err == nil {
			t.Errorf("the database %s, but it answers %s", what, r.Body)
		}
		s.free(rooms)
	}

	deadlock := fails(&mysql.MySQLError{Number: 1213, Message: "Deadlock found"})
	hidden := func(tx *sql.Tx) error {
		_, err := tx.ExecContext(t.Context(), `ROLLBACK`) // what the server does in a deadlock
		if err != nil {
			t.Fatal(err)
		}
		return participant.Refuse("it did not work")
	}
	for name, first := range map[string]func(*sql.Tx) error{"deadlock": deadlock, "hidden deadlock": hidden} {
		n := 0
		s.do = func(tx *sql.Tx) error {
			if n++; n == 1 {
				return first(tx)
			}
			return nil
		}
		s.wants(book(name), "completed", "", rooms-1)
		if n != 2 {
			t.Errorf("%s: the action ran %d times, want 2", name, n)
		}
		s.wants(cancel(name), "completed", "", rooms)
	}
}

func connectionID(t *testing.T, tx *sql.Tx) (id string) {
	t.Helper()
	if err := tx.QueryRow(`SELECT CONNECTION_ID()`).Scan(&id); err != nil {
		t.Fatal(err)
	}
	return id
}

// An input that does not decode is refused: another version of the service may take it when the
// saga asks again.
func TestInputThatDoesNotDecode(t *testing.T) {
	s := newScripted(t)
	c := deliver(book("a"))
	c.Body = []byte(`{"input":{"nights":"two"}}`)
	r, err := bookRoom.Handle(t.Context(), s.db, c)
	if err != nil || !strings.Contains(string(r.Body), `"refused"`) || !strings.Contains(string(r.Body), "nights") {
		t.Errorf("answer %s, error %v", r.Body, err)
	}
	s.wants(book("a").again(), "completed", "", rooms-1)
}

func TestNoCommand(t *testing.T) {
	s := newScripted(t)
	for i, p := range noCommands() {
		c := participant.Command{MessageID: p.MessageId, ReplyTo: p.ReplyTo, Headers: p.Headers, Body: p.Body}
		if _, err := bookRoom.Handle(t.Context(), s.db, c); !errors.Is(err, participant.ErrNoCommand) {
			t.Errorf("number %d: error %v, want ErrNoCommand", i, err)
		}
	}
	var rows int
	if err := s.db.QueryRow(`SELECT COUNT(*) FROM backstep_barriers`).Scan(&rows); err != nil || rows > 0 {
		t.Errorf("%d rows, %v", rows, err)
	}
}
