package e2e

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/client/participant"
	"backstep/internal/handlers"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

// journey is the input of a saga with a step of another service, a hotel, between two of ours.
type journey struct{ Number int }

type ticket struct{ Seat int }

var travel = saga.Define("travel", 1,
	saga.Step("train", "inventory", buy("train"), giveBack("train")),
	saga.RemoteStep[journey, ticket]("room", "hotel", saga.Retry(3, 100*time.Millisecond), saga.Deadline(20*time.Second)),
	saga.Step("theatre", "inventory", buy("theatre"), nil, saga.Retry(2, 100*time.Millisecond)),
)

// buy takes one of a kind; every fifth journey finds the theatre closed.
func buy(what string) func(context.Context, *sqltx.Tx, journey) (ticket, error) {
	return func(ctx context.Context, tx *sqltx.Tx, in journey) (ticket, error) {
		if what == "theatre" && in.Number%5 == 0 {
			return ticket{}, saga.Fail("closed")
		}
		_, err := tx.Exec(ctx, `UPDATE sold SET n = n + 1 WHERE what = ?`, what)
		return ticket{Seat: in.Number}, err
	}
}

func giveBack(what string) func(context.Context, *sqltx.Tx, journey, ticket) error {
	return func(ctx context.Context, tx *sqltx.Tx, _ journey, _ ticket) error {
		_, err := tx.Exec(ctx, `UPDATE sold SET n = n - 1 WHERE what = ?`, what)
		return err
	}
}

// room is the hotel's part. Every seventh journey is refused, every eleventh fails at first.
var room = participant.Step[journey, ticket]{
	Execute: func(ctx context.Context, tx *sql.Tx, info participant.Info, in journey) (ticket, error) {
		_, err := tx.ExecContext(ctx, `UPDATE rooms SET taken = taken + 1`)
		switch {
		case err == nil && in.Number%7 == 0:
			err = participant.Refuse("no room for number %d", in.Number)
		case err == nil && in.Number%11 == 0 && info.Attempt == 1:
			err = errors.New("the porter sleeps")
		}
		return ticket{Seat: in.Number}, err
	},
	Compensate: func(ctx context.Context, tx *sql.Tx, _ participant.Info, _ journey, _ ticket) error {
		_, err := tx.ExecContext(ctx, `UPDATE rooms SET taken = taken - 1`)
		return err
	},
}

const (
	hotelBroker = "E2E_HOTEL_BROKER" // set: the test binary is the hotel
	hotelDSN    = "E2E_HOTEL_DSN"
	hotelDies   = "E2E_HOTEL_DIES" // between which commit and its reply
)

// hotelMain is a service with a database of its own.
func hotelMain() {
	if err := serveHotel(context.Background(), os.Getenv(hotelBroker), os.Getenv(hotelDSN)); err != nil { // it is a process's main
		_, _ = fmt.Fprintln(os.Stderr, err) // the test shows it
	}
	os.Exit(1)
}

func serveHotel(ctx context.Context, broker, dsn string) error {
	db, err := sql.Open("mysql", dsn)
	if err != nil {
		return err
	}
	conn, err := amqp091.Dial(broker)
	if err != nil {
		return err
	}
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	_, err = ch.QueueDeclare("hotel", true, false, false, false, amqp091.Table{"x-queue-type": "quorum"})
	if err := errors.Join(err, ch.QueueBind("hotel", "hotel", participant.Exchange, false, nil), ch.Qos(8, 0, false), ch.Confirm(false)); err != nil {
		return err
	}
	deliveries, err := ch.Consume("hotel", "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	last, err := strconv.Atoi(os.Getenv(hotelDies))
	if err != nil {
		return err
	}
	for d := range deliveries {
		r, err := room.Handle(ctx, db, participant.Command{MessageID: d.MessageId, ReplyTo: d.ReplyTo, Headers: d.Headers, Body: d.Body})
		if err != nil {
			return err
		}
		if last--; last == 0 {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL) // cannot fail on oneself
			select {}
		}
		confirm, err := ch.PublishWithDeferredConfirm(participant.Exchange, r.RoutingKey, true, false, amqp091.Publishing{
			DeliveryMode: amqp091.Persistent, MessageId: r.MessageID, Type: r.Type, CorrelationId: r.CorrelationID,
			ContentType: r.ContentType, Headers: r.Headers, Body: r.Body,
		})
		if err != nil {
			return err
		}
		if acked, err := confirm.WaitContext(ctx); err != nil || !acked {
			return fmt.Errorf("reply %s: acked %t, %w", r.MessageID, acked, err)
		}
		if err := d.Ack(false); err != nil {
			return err
		}
	}
	return amqp091.ErrClosed
}

// Sagas with a step of a service that uses client/participant and is killed again and again between
// its commit and its reply. Its command comes back, and so does the answer; what refuses, fails and
// is cancelled meanwhile ends whole or not at all, here and there.
func TestParticipantIsKilled(t *testing.T) {
	t.Parallel()
	w := newWheel(t)
	w.exec(`CREATE TABLE sold (what VARCHAR(16) PRIMARY KEY, n INT NOT NULL)`)
	w.exec(`INSERT INTO sold VALUES ('train', 0), ('theatre', 0)`)
	hotelsOwn := testenv.Database(t)
	hotel := openDSN(t, hotelsOwn)
	for _, query := range []string{participant.Schema, `CREATE TABLE rooms (taken INT NOT NULL)`, `INSERT INTO rooms VALUES (0)`} {
		if _, err := hotel.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	w.start("relay")
	w.ownWorker(travel, saga.KeeperConfig{}, 8, handlers.InventoryQueue, handlers.RepliesQueue)
	w.awaitQueues()

	const total = 60
	for number := 1; number <= total; number++ {
		w.begin(travel, strconv.Itoa(number), journey{number})
	}
	deaths := 0
	open := func() int {
		return w.count(`SELECT COUNT(*) FROM saga_instances WHERE status IN ('RUNNING', 'COMPENSATING')`)
	}
	for open() > 0 {
		dies := "9"
		if deaths == 5 {
			dies = "0" // not by itself any more
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), hotelBroker+"="+w.broker.URL, hotelDSN+"="+hotelsOwn, hotelDies+"="+dies)
		cmd.Stderr = t.Output()
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() { defer close(ended); _ = cmd.Wait() }() // it is killed, by itself or by us
		w.eventually(60*time.Second, "the hotel dies, or nobody needs it", func() error {
			select {
			case <-ended:
				deaths++
				return nil
			default:
			}
			if n := open(); n > 0 {
				return fmt.Errorf("%d sagas are under way", n)
			}
			return cmd.Process.Kill()
		})
	}
	if deaths < 5 {
		t.Errorf("it died %d times: the test shows too little", deaths)
	}
	completed := w.count(`SELECT COUNT(*) FROM saga_instances WHERE status = 'COMPLETED'`)
	want := 0
	for number := 1; number <= total; number++ {
		if number%5 != 0 && number%7 != 0 {
			want++
		}
	}
	var taken int
	if err := hotel.QueryRowContext(t.Context(), `SELECT taken FROM rooms`).Scan(&taken); err != nil {
		t.Fatal(err)
	}
	for what, n := range map[string]int{
		"completed sagas": completed, "rooms": taken,
		"trains":   w.count(`SELECT n FROM sold WHERE what = 'train'`),
		"theatres": w.count(`SELECT n FROM sold WHERE what = 'theatre'`),
	} {
		if n != want {
			t.Errorf("%d %s, want %d", n, what, want)
		}
	}
	violations, err := saga.Verify(t.Context(), w.db)
	if err != nil || len(violations) > 0 {
		t.Errorf("%v, %v", violations, err)
	}
	t.Logf("the hotel died %d times; %d of %d sagas completed", deaths, completed, total)
}
