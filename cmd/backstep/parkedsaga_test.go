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
	"backstep/internal/testenv"
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
	t.Parallel()
	o, db, _ := lotOf(t)
	first := o.start("worker")
	relay := o.start("relay")
	for _, b := range []*background{first, relay} {
		b.says("connected to the broker") // before that a signal may have its usual effect
	}
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

// TestParkedWishes: nobody awaits a wish to cancel, or a reply, under its id: they are sent again all
// the same, unless the saga has ended, so that nothing is left to cancel.
func TestParkedWishes(t *testing.T) {
	t.Parallel()
	broker := testenv.Vhost(t)
	l := sagasOf(t, "BACKSTEP_AMQP_URL="+broker.URL, "BACKSTEP_AMQP_MANAGEMENT_URL="+broker.ManagementURL)
	l.run("", "topology", "apply").want(exitOK)
	running, ended := l.place("running"), l.work(l.place("ended"), 3)
	wish := func(id, typ, sagaID, body string) amqp091.Publishing {
		p := parkedCopy(id, typ, "gateway away", time.Now())
		p.Body = []byte(body)
		if sagaID != "" {
			p.Headers[message.HeaderSagaID] = sagaID
		}
		return p
	}
	named := func(request string) string {
		d, err := saga.Get(t.Context(), l.db, map[string]string{"running": running, "ended": ended}[request])
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf(`{"type":"place-order","correlation_id":%q}`, d.CorrelationID)
	}
	broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue,
		wish("cancel", saga.CancelType, running, `{}`), wish("cancel-named", saga.CancelType, "", named("running")),
		wish("too-late", saga.CancelType, ended, `{}`), wish("too-late-named", saga.CancelType, "", named("ended")),
		wish("reply", saga.ReplyType, running, `{"status":"completed"}`), wish("late-reply", saga.ReplyType, ended, `{"status":"completed"}`))
	for _, id := range []string{"cancel", "cancel-named", "reply", "late-reply"} {
		l.run("", "parked", "show", id).want(exitOK, "Then send it to queue payment again:", "backstep parked replay "+id, "backstep saga show ")
	}
	l.run("", "parked", "show", "too-late").want(exitOK, "A replay would change nothing: its saga "+ended+" has ended, as COMPLETED: nothing is left to cancel")
	l.run("", append([]string{"parked", "replay", "--all"}, because...)...).want(exitOK, "4 messages replayed, 2 done already",
		"message too-late: done already: its saga "+ended, "message too-late-named: done already: its saga "+ended)
	if got := drained(t, broker, "payment"); !slices.Equal(got, []string{"cancel", "cancel-named", "reply", "late-reply"}) {
		t.Errorf("payment has %q", got)
	}

	// One that names a saga which there is not.
	broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, wish("nobodys", saga.CancelType, "nope", `{}`))
	if a := l.run("", "parked", "show", "nobodys").want(exitOK, "nope, which there is not", "It says that it is for saga nope, which there is not, or not any more."); strings.Contains(a.stdout, "saga show") {
		t.Errorf("%s", a.stdout)
	}

	broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, wish("by-request", saga.CancelType, "running", `{}`),
		wish("by-request-named", saga.CancelType, "", `{"type":"place-order","correlation_id":"running"}`))
	for id, says := range map[string]string{
		"nobodys": "\n  backstep saga cancel ID --reason", "by-request": "\n  backstep saga cancel " + running, "by-request-named": "\n  backstep saga cancel " + running,
	} {
		a := l.run("", "parked", "show", id).want(exitOK, "The fault is in the message itself, so a replay cannot help: ", says)
		if strings.Contains(a.stdout, "parked replay") {
			t.Errorf("%s", a.stdout)
		}
	}

	// What names no saga is parked by the engine, which says so.
	cancel, reply := wish("no-cancel", saga.CancelType, "", `{"reason":"sick"}`), wish("no-reply", saga.ReplyType, "", `{"status":"completed"}`)
	cancel.Headers, reply.Headers = nil, nil
	parkAll(t, l.operator, broker, cancel, reply)
	for _, id := range []string{"no-cancel", "no-reply"} {
		l.run("", "parked", "show", id).want(exitOK, "no x-saga-id header; ", "a replay cannot help. Whoever sent it has to send it anew")
	}
}
