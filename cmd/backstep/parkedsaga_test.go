package main

import (
	"fmt"
	"slices"
	"syscall"
	"testing"

	"backstep/internal/saga"
)

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
