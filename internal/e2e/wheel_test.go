// Package e2e runs the real binaries against real servers, breaks things on the way, and
// then demands every invariant.
package e2e

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/inbox"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
	"backstep/migrations"
)

// binaries is the folder the real binaries are built into, with the build tag crashpoints.
var binaries string

func TestMain(m *testing.M) {
	if os.Getenv(hotelBroker) != "" {
		hotelMain()
	}
	if err := flag.Set("test.parallel", "3"); err != nil { // most of them wait; -parallel says otherwise
		panic(err)
	}
	dir, err := os.MkdirTemp("", "backstep-e2e-")
	if err != nil {
		panic(err)
	}
	binaries = dir
	code := 1
	args := []string{"build", "-tags", "crashpoints", "-o", dir}
	if raceEnabled {
		args = append(args, "-race")
	}
	build := exec.Command("go", append(args, "backstep/cmd/worker", "backstep/cmd/relay", "backstep/cmd/backstep", "backstep/internal/testenv/cmd/paymentgateway")...)
	build.Stdout, build.Stderr = os.Stdout, os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "build the binaries:", err)
	} else {
		code = testenv.M{M: m}.Run()
	}
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// wheel is a database and a vhost of a test's own, and the processes it runs on them.
type wheel struct {
	t      *testing.T
	dsn    string
	db     *sql.DB
	broker *testenv.Broker
	moot   map[string]bool // ids of commands that nobody awaited any more when the broker lost them
}

// skus is how many there are in a new wheel.
const skus = 20

func newWheel(t *testing.T) *wheel { return wheelOn(t, testenv.Shared(t)) }

func wheelOn(t *testing.T, servers *testenv.Servers) *wheel {
	t.Helper()
	w := &wheel{t: t, dsn: servers.Database(t), broker: servers.Vhost(t), moot: map[string]bool{}}
	w.db = openDSN(t, w.dsn)
	if _, err := migrations.Up(t.Context(), w.db, nil); err != nil {
		t.Fatal(err)
	}
	if err := handlers.Seed(t.Context(), w.db, skus, 1_000); err != nil {
		t.Fatal(err)
	}
	return w
}

// proc is one of our processes.
type proc struct {
	t    *testing.T
	role string
	cmd  *exec.Cmd
	log  *os.File
	done chan struct{}
	err  error
}

// start runs a relay or worker with the wheel's servers and more environment.
func (w *wheel) start(role string, env ...string) *proc {
	w.t.Helper()
	return w.startArgs(role, nil, env...)
}

func (w *wheel) startArgs(role string, args []string, env ...string) *proc {
	w.t.Helper()
	log, err := os.Create(filepath.Join(w.t.TempDir(), role+".log"))
	if err != nil {
		w.t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(binaries, role), args...)
	cmd.Env = append(os.Environ(), "BACKSTEP_MYSQL_DSN="+w.dsn, "BACKSTEP_AMQP_URL="+w.broker.URL)
	cmd.Env = append(cmd.Env, env...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	p := &proc{t: w.t, role: role, cmd: cmd, log: log, done: make(chan struct{})}
	go func() { p.err = cmd.Wait(); close(p.done) }()
	w.t.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		<-p.done
		if w.t.Failed() {
			w.t.Logf("--- log of %s %d\n%s", role, cmd.Process.Pid, p.text())
		} else if strings.Contains(p.text(), "WARNING: DATA RACE") {
			w.t.Errorf("data race in %s:\n%s", role, p.text())
		}
		_ = log.Close()
	})
	return p
}

func (p *proc) text() string {
	b, err := os.ReadFile(p.log.Name())
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func (p *proc) signal(s syscall.Signal) {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("signal %s: %v", p.role, err)
	}
}

// killed waits until the process has died of its crash point.
func (p *proc) killed(within time.Duration) {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(within):
		p.t.Fatalf("%s did not come to its crash point within %s", p.role, within)
	}
	if ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !ws.Signaled() || ws.Signal() != syscall.SIGKILL {
		p.t.Fatalf("%s ended with %v, not by SIGKILL:\n%s", p.role, p.err, p.text())
	}
}

// heeds waits until the process has begun to log: before that a signal has its usual effect.
func (p *proc) heeds() {
	p.t.Helper()
	limit := time.After(30 * time.Second)
	tick := time.NewTicker(20 * time.Millisecond) // a file tells nobody that it grows
	defer tick.Stop()
	for p.text() == "" {
		select {
		case <-tick.C:
		case <-p.done:
			return
		case <-limit:
			p.t.Errorf("%s has not logged anything within 30 s", p.role)
			return
		}
	}
}

// stop asks the process to end and demands an orderly end.
func (p *proc) stop() {
	p.t.Helper()
	p.heeds()
	p.signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		p.t.Fatalf("%s did not stop within 30 s of SIGTERM", p.role)
	}
	if p.err != nil {
		p.t.Errorf("%s ended with %v", p.role, p.err)
	}
}

// expectation of a batch of orders.
type expectation struct{ confirmed, noStock, declined, refused, cancelled int }

func (e expectation) total() int {
	return e.confirmed + e.noStock + e.declined + e.refused + e.cancelled
}

// orders makes the messages of n orders: of each 10 one has no stock, one is declined and one
// refused.
func orders(n int) (msgs []amqp091.Publishing, want expectation) {
	for i := range n {
		o := handlers.CreateOrder{
			Customer:     fmt.Sprintf("customer %d", i),
			PaymentToken: "tok", ShipTo: handlers.ShipTo{Name: "名前 😀", Country: "DE"},
			Items: []handlers.Item{
				{SKU: handlers.SKU(i % 20), Quantity: 1, PriceCents: 100},
				{SKU: handlers.SKU((i + 7) % 20), Quantity: 2, PriceCents: 250},
			},
			TotalCents: 600,
		}
		switch i % 10 {
		case 3:
			o.Items[0].Quantity, o.TotalCents = 1_000_000, 100_000_500
			want.noStock++
		case 5:
			o.PaymentToken = "decline-me"
			want.declined++
		case 7:
			o.ShipTo.Country = "ZZ"
			want.refused++
		default:
			want.confirmed++
		}
		body, err := json.Marshal(o)
		if err != nil {
			panic(err)
		}
		msgs = append(msgs, amqp091.Publishing{
			MessageId: message.NewID(), Type: handlers.OrderCreateType, ContentType: "application/json",
			DeliveryMode: amqp091.Persistent, Body: body,
		})
	}
	return msgs, want
}

// awaitQueues waits until a process has declared the topology.
func (w *wheel) awaitQueues() {
	w.t.Helper()
	w.eventually(60*time.Second, "the topology is declared", func() error {
		conn, err := amqp091.Dial(w.broker.URL)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		ch, err := conn.Channel()
		if err != nil {
			return err
		}
		for _, q := range handlers.Queues {
			for _, name := range []string{q, q + ".parked"} {
				if _, err := ch.QueueDeclarePassive(name, true, false, false, false, nil); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func (w *wheel) submit(msgs ...amqp091.Publishing) {
	w.t.Helper()
	w.broker.Publish(w.t, message.CommandsExchange, handlers.OrdersQueue, msgs...)
}

// eventually waits until check gives nil.
func (w *wheel) eventually(within time.Duration, what string, check func() error) {
	w.t.Helper()
	deadline := time.Now().Add(within)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("not within %s: %s: %v", within, what, err)
		}
		<-tick.C
	}
}

func (w *wheel) count(query string, args ...any) int {
	w.t.Helper()
	var n int
	if err := w.db.QueryRowContext(w.t.Context(), query, args...).Scan(&n); err != nil {
		w.t.Fatalf("%s: %v", query, err)
	}
	return n
}

// rest waits until n orders exist and everything that was started has ended.
func (w *wheel) rest(n int, within time.Duration) {
	w.t.Helper()
	w.eventually(within, "everything is at rest", func() error {
		var total, open, pending, scheduled int
		err := w.db.QueryRowContext(w.t.Context(), `
SELECT (SELECT COUNT(*) FROM orders),
       (SELECT COUNT(*) FROM saga_instances WHERE status IN ('RUNNING', 'COMPENSATING')),
       (SELECT COUNT(*) FROM outbox_events WHERE status = 'PENDING'),
       (SELECT COUNT(*) FROM scheduled_messages)`).Scan(&total, &open, &pending, &scheduled)
		if err != nil {
			return err
		}
		if total != n || open > 0 || pending > 0 || scheduled > 0 {
			return fmt.Errorf("%d of %d orders, %d sagas open, %d rows pending, %d scheduled", total, n, open, pending, scheduled)
		}
		for _, q := range handlers.Queues {
			// What is delivered and not acked is not looked at: that figure is seconds old.
			if ready, _ := w.broker.Queue(w.t, q); ready > 0 {
				return fmt.Errorf("queue %s has %d messages", q, ready)
			}
		}
		return nil
	})
}

// verifyInvariants demands every invariant.
func (w *wheel) verifyInvariants() {
	w.t.Helper()
	for _, check := range []func(context.Context, sqltx.Querier) ([]sqltx.Violation, error){
		handlers.Verify, saga.Verify, outbox.Verify,
	} {
		violations, err := check(w.t.Context(), w.db)
		if err != nil {
			w.t.Fatal(err)
		}
		for _, v := range violations {
			w.t.Errorf("violated: %s: %s: %s", v.Rule, v.Subject, v.Detail)
		}
	}
	w.verifyProcessed()
}

// verify demands every invariant, and the outcomes that were expected.
func (w *wheel) verify(want expectation) {
	w.t.Helper()
	w.verifyInvariants()
	for reason, n := range map[string]int{"%not enough stock%": want.noStock, "%declined%": want.declined, "%country ZZ%": want.refused, "%changed my mind%": want.cancelled} {
		if got := w.count(`SELECT COUNT(*) FROM orders WHERE status = 'CANCELLED' AND reason LIKE ?`, reason); got != n {
			w.t.Errorf("%d orders cancelled because of %s, want %d", got, reason, n)
		}
	}
	if got := w.count(`SELECT COUNT(*) FROM orders WHERE status = 'CONFIRMED'`); got != want.confirmed {
		w.t.Errorf("%d orders confirmed, want %d", got, want.confirmed)
	}
}

// verifyProcessed demands that each command that was published has been recorded by the
// queue it went to.
func (w *wheel) verifyProcessed() {
	w.t.Helper()
	rows, err := w.db.QueryContext(w.t.Context(), `
SELECT routing_key, message_id FROM outbox_events WHERE status = 'PUBLISHED' AND exchange = ?`, []byte(message.CommandsExchange))
	if err != nil {
		w.t.Fatal(err)
	}
	defer rows.Close()
	byQueue := map[string][]string{}
	for rows.Next() {
		var queue, id []byte
		if err := rows.Scan(&queue, &id); err != nil {
			w.t.Fatal(err)
		}
		byQueue[string(queue)] = append(byQueue[string(queue)], string(id))
	}
	if err := rows.Err(); err != nil {
		w.t.Fatal(err)
	}
	for queue, ids := range byQueue {
		seen, err := inbox.Recorded(w.t.Context(), w.db, queue, ids)
		if err != nil {
			w.t.Fatal(err)
		}
		for _, id := range ids {
			if !seen[id] && !w.moot[id] {
				w.t.Errorf("message %s was published to %s but never processed", id, queue)
			}
		}
	}
}

// together starts several processes of a role.
func (w *wheel) together(role string, n int, env ...string) []*proc {
	var procs []*proc
	for range n {
		procs = append(procs, w.start(role, env...))
	}
	return procs
}

func stopAll(procs ...*proc) {
	var wg sync.WaitGroup
	for _, p := range procs {
		wg.Go(p.stop)
	}
	wg.Wait()
}
