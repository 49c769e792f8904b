package handlers

import (
	"strings"
	"testing"

	"backstep/internal/outbox"
	"backstep/internal/saga"
)

// run delivers commands until there are none.
func (w *world) run() {
	w.t.Helper()
	for commands := w.commands(); len(commands) > 0; commands = w.commands() {
		w.batch(w.engine.HandleBatch, commands)
	}
}

func (w *world) exec(query string, args ...any) {
	w.t.Helper()
	if _, err := w.db.ExecContext(w.t.Context(), query, args...); err != nil {
		w.t.Fatalf("%s: %v", query, err)
	}
}

// orderIs demands the status of the only order, and that every invariant holds.
func (w *world) orderIs(status string) {
	w.t.Helper()
	var got string
	if err := w.db.QueryRowContext(w.t.Context(), `SELECT status FROM orders`).Scan(&got); err != nil || got != status {
		w.t.Errorf("the order is %s, %v, want %s", got, err, status)
	}
	confirmed := 0
	if status == "CONFIRMED" {
		confirmed = 1
	}
	w.verify(confirmed)
}

// TestOperatorsAndOrders: an order's status follows what an operator does to its saga, and no
// invariant is broken by it. What would break one is refused.
func TestOperatorsAndOrders(t *testing.T) {
	order := func(t *testing.T) (w *world, id string) {
		w = newWorld(t)
		w.batch(w.intake.HandleBatch, requests(t, 1, nil))
		list, _, err := saga.List(t.Context(), w.db, saga.Filter{})
		if err != nil || len(list) != 1 {
			t.Fatalf("%d sagas, %v", len(list), err)
		}
		return w, list[0].ID
	}
	does := func(w *world, id string, op saga.Operation, refused string) {
		w.t.Helper()
		op.By = outbox.Operator{Actor: "ops", Reason: "ticket 12"}
		eff, err := w.engine.Operate(w.t.Context(), w.db, id, op)
		switch {
		case refused == "" && (err != nil || !eff.Changed):
			w.t.Errorf("%s: %+v, %v", op.Verb, eff, err)
		case refused != "" && (err == nil || !strings.Contains(err.Error(), refused)):
			w.t.Errorf("%s: %+v, %v, want %q", op.Verb, eff, err, refused)
		}
	}
	compensate, completed, compensated := saga.Operation{Verb: saga.VerbCompensate},
		saga.Operation{Verb: saga.VerbResolve, As: saga.Completed}, saga.Operation{Verb: saga.VerbResolve, As: saga.Compensated}

	t.Run("reversed", func(t *testing.T) {
		w, id := order(t)
		w.run()
		w.orderIs("CONFIRMED")
		w.exec(`UPDATE shipments SET status = 'CANCELLED'`) // by somebody: its compensation will say so
		does(w, id, compensate, "")
		w.run()
		w.exec(`UPDATE shipments SET status = 'CREATED'`) // put right
		w.orderIs("NEEDS_ATTENTION")
		does(w, id, completed, "")
		w.orderIs("CONFIRMED") // after all
		does(w, id, compensate, "")
		w.run()
		w.orderIs("CANCELLED")
	})
	t.Run("stopped before its shipment", func(t *testing.T) {
		w, id := order(t)
		w.batch(w.engine.HandleBatch, w.commands())
		w.batch(w.engine.HandleBatch, w.commands())
		w.commands() // its shipment's: never comes
		w.exec(`UPDATE saga_instances SET status = 'MANUAL_ACTION'`)
		w.exec(`UPDATE orders SET status = 'NEEDS_ATTENTION'`)
		w.orderIs("NEEDS_ATTENTION")
		does(w, id, completed, "cannot be CONFIRMED: it is charged and not shipped")
		does(w, id, saga.Operation{Verb: saga.VerbSkip, Step: "create-shipment"}, "cannot be CONFIRMED")
		does(w, id, compensated, "cannot be CANCELLED: it is charged and not shipped; refund the payment")
		w.orderIs("NEEDS_ATTENTION")
		does(w, id, saga.Operation{Verb: saga.VerbCancel}, "")
		w.run()
		w.orderIs("CANCELLED")
	})
	t.Run("put right by hand", func(t *testing.T) {
		w, id := order(t)
		w.exec(`UPDATE saga_instances SET status = 'MANUAL_ACTION'`)
		w.exec(`UPDATE orders SET status = 'NEEDS_ATTENTION'`)
		does(w, id, compensated, "")
		w.orderIs("CANCELLED")
	})
}
