package main

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/saga"
)

// statuses counts the sagas.
func statuses(t *testing.T, o *operator) (map[saga.Status]int, []saga.Summary) {
	t.Helper()
	var list []saga.Summary
	o.run("", "saga", "list", "--json").want(exitOK).decode(&list)
	n := map[saga.Status]int{}
	for _, s := range list {
		n[s.Status]++
	}
	return n, list
}

// TestParkedWithSagas: a worker parks commands of sagas, which then wait for somebody. When the
// cause is cured a replay moves them on by itself; one that is dropped stays; and to replay
// what is done changes nothing.
func TestParkedWithSagas(t *testing.T) {
	o, db, _ := lotOf(t)
	first := o.start("worker")
	o.start("relay").says("connected to the broker")
	// Their definition is edited in place as soon as they are there, and payment runs none of them.
	if code := first.stop(syscall.SIGTERM); code != exitOK {
		t.Errorf("the worker exited with %d", code)
	}
	some := newOperator(t, append(slices.Clone(o.env), "BACKSTEP_QUEUES=orders,inventory")...)
	head := some.start("worker")
	o.run("", "submit", "--count", "3", "--stock", "1000").want(exitOK)
	var plan []byte
	eventually(t, "their payment waits", func() error {
		n := 0
		if err := db.QueryRowContext(t.Context(), `SELECT COUNT(*) FROM saga_instances WHERE current_step = 1`).Scan(&n); err != nil || n != 3 {
			return fmt.Errorf("%d sagas, %w", n, err)
		}
		return db.QueryRowContext(t.Context(), `SELECT plan FROM saga_instances LIMIT 1`).Scan(&plan)
	})
	if code := head.stop(syscall.SIGTERM); code != exitOK {
		t.Errorf("the worker exited with %d", code)
	}
	execute(t, db, `UPDATE saga_instances SET plan = CONCAT(plan, ', one-more')`)
	o.start("worker")
	var sagas []saga.Summary
	eventually(t, "their commands are parked", func() error {
		var n map[saga.Status]int
		if n, sagas = statuses(t, o); n[saga.ManualAction] != 3 {
			return fmt.Errorf("sagas %v", n)
		}
		var list parkedList
		o.run("", "parked", "list", "--queue", "payment", "--json").want(exitOK).decode(&list)
		if len(list.Groups) != 1 || list.Groups[0].Count != 3 {
			return fmt.Errorf("%+v", list)
		}
		return nil
	})
	commands := map[string]string{} // by saga
	for _, s := range sagas {
		var d shown
		o.run("", "saga", "show", s.ID, "--json").want(exitOK).decode(&d)
		commands[s.ID] = d.CommandID
	}
	replayedOne, dropped, last := sagas[0].ID, sagas[1].ID, sagas[2].ID
	o.run("", "saga", "show", dropped).want(exitOK, "backstep parked replay "+commands[dropped]+" --queue payment")
	o.run("", "parked", "show", commands[dropped]).want(exitOK, "place-order.charge-payment", dropped+", MANUAL_ACTION, awaits it", "backstep saga show "+dropped)

	o.run("", append([]string{"parked", "drop", commands[dropped]}, because...)...).want(exitOK, "1 message dropped")
	execute(t, db, `UPDATE saga_instances SET plan = ?`, plan)
	o.run("", append([]string{"parked", "replay", commands[replayedOne]}, because...)...).want(exitOK, "1 message replayed")
	eventually(t, "its saga completes", func() error {
		d, err := saga.Get(t.Context(), db, replayedOne)
		if err != nil || d.Status != saga.Completed {
			return fmt.Errorf("%s, %w", d.Status, err)
		}
		return nil
	})
	o.run("", append([]string{"parked", "replay", commands[replayedOne]}, because...)...).want(exitOK, "queue payment has processed it; it was replayed by ops", "0 messages replayed, 1 done already")

	// Somebody has moved the last one on by other means: its command is not awaited any more.
	execute(t, db, `UPDATE saga_instances SET command_id = 'another' WHERE id = ?`, []byte(last))
	o.run("", append([]string{"parked", "replay", "--all"}, because...)...).want(exitOK, "its saga "+last+" is MANUAL_ACTION and does not await it", "1 done already")
	n, _ := statuses(t, o)
	if n[saga.Completed] != 1 || n[saga.ManualAction] != 2 {
		t.Errorf("sagas %v, want one COMPLETED and two in MANUAL_ACTION", n)
	}
	var payments int
	if err := db.QueryRowContext(t.Context(), `SELECT COUNT(*) FROM payments`).Scan(&payments); err != nil || payments != 1 {
		t.Errorf("%d payments, %v", payments, err)
	}
}

// TestDropTellsTheSaga: of what the broker dead-lettered nobody has told the saga.
func TestDropTellsTheSaga(t *testing.T) {
	o, db, broker := lotOf(t)
	execute(t, db, `INSERT INTO saga_instances (id, type, version, correlation_id, status, direction, current_step, attempt, command_id, payload)
VALUES ('s', 'place-order', 1, 'c', 'RUNNING', 'execute', 1, 1, 'm', '{}')`)
	m := parkedCopy("m", "place-order.charge-payment", "r", time.Now())
	m.Headers[message.HeaderSagaID] = "s"
	broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, m)
	o.run("", append([]string{"parked", "drop", "m"}, because...)...).want(exitOK, "1 message dropped")
	d, err := saga.Get(t.Context(), db, "s")
	if err != nil || d.Status != saga.ManualAction || !strings.HasPrefix(d.LastError, "command parked: dropped by ops: cured, ticket 12") {
		t.Errorf("saga %+v, %v", d.Summary, err)
	}
}

// TestParkedReplayInterrupted: whatever ends a replay, and however often, no message is lost.
func TestParkedReplayInterrupted(t *testing.T) {
	o, _, broker := lotOf(t)
	const total = 120
	want := map[string]bool{}
	for i := range total {
		id := fmt.Sprint("m-", i)
		want[id] = true
		broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, parkedCopy(id, "t", "r", time.Now()))
	}
	args := append([]string{"parked", "replay", "--all", "--rate", "20"}, because...)
	sent := 0
	for _, end := range []struct {
		by   func(*background)
		code int
	}{
		{func(b *background) { b.stop(syscall.SIGKILL) }, -1},
		{func(*background) { broker.CloseConnections(t) }, exitFailed},
		{func(b *background) { b.stop(syscall.SIGINT) }, exitFailed},
	} {
		b := o.start("backstep", args...)
		eventually(t, "it has begun", func() error {
			if ready, _ := broker.Queue(t, "payment"); ready < sent+5 {
				return fmt.Errorf("%d of %d are sent", ready, total)
			}
			return nil
		})
		end.by(b)
		if code := b.wait(); code != end.code {
			t.Errorf("exit code %d, want %d:\n%s", code, end.code, b.text())
		}
		sent, _ = broker.Queue(t, "payment")
		if sent >= total {
			t.Fatalf("all %d were sent before it was interrupted", sent)
		}
	}
	eventually(t, "a run finishes it", func() error {
		o.run("", append([]string{"parked", "replay", "--all", "--rate", "1000"}, because...)...).want(exitOK)
		if ready, unacked := broker.Queue(t, "payment.parked"); ready+unacked > 0 {
			return fmt.Errorf("%d and %d are left", ready, unacked)
		}
		return nil
	})
	got := drained(t, broker, "payment")
	for _, id := range got {
		delete(want, id)
	}
	if len(want) > 0 || len(got) > total+3 {
		t.Errorf("%d lost (%v); %d came of %d", len(want), want, len(got), total)
	}
}

// TestParkedMany: a list of many takes no memory for each body. The messages are 100 MB.
func TestParkedMany(t *testing.T) {
	o, _, broker := lotOf(t)
	const total, size = 10_000, 10_000
	m := parkedCopy("m", "t", "r 17", time.Now())
	m.Body = make([]byte, size)
	for range 10 {
		broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, slices.Repeat([]amqp091.Publishing{m}, total/10)...)
	}
	for range 2 {
		cmd := o.command("backstep", "parked", "list")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		answer{t: t, stdout: string(out)}.want(0, "10000 messages", "r N")
		usage, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage)
		if !ok {
			t.Fatal("nothing is known of its memory")
		}
		t.Logf("it took %d MiB and %s", usage.Maxrss>>10, cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime())
		if limit := int64(96 << 10); !raceEnabled && usage.Maxrss > limit { // the race detector multiplies it
			t.Errorf("it took %d KiB, want less than %d", usage.Maxrss, limit)
		}
	}
	if ready, _ := broker.Queue(t, "payment.parked"); ready != total {
		t.Errorf("%d are left", ready)
	}
}
