package handlers

import (
	"strings"
	"testing"

	"backstep/internal/outbox"
	"backstep/internal/saga"
	"backstep/internal/testenv/gateway"
)

// B91: a refund that is refused, whose gateway never answers, or whose payment somebody has deleted, leaves
// the saga to an operator, with an event that says so. The stock, which is to be released after it,
// stays reserved. When what was wrong has been put right the saga goes on from there.
func TestRefundFails(t *testing.T) {
	for name, tt := range map[string]struct {
		fault    gateway.Fault
		spoil    string // "": the gateway does
		mend     string
		attempts int
		why      string
	}{
		"refused": {fault: gateway.Fault{Kind: gateway.Decline, On: "refunds"}, attempts: 1, why: "refuses to refund"},
		"no answer": {fault: gateway.Fault{Kind: gateway.FailBefore, On: "refunds"}, attempts: 5,
			why: "compensation of step charge-payment failed at attempt 5"},
		"no payment": {spoil: `DELETE FROM payments`, mend: `INSERT INTO payments SELECT * FROM kept`, attempts: 1, why: "is not charged"},
		"refunded before": {spoil: `UPDATE payments SET status = 'REFUNDED', refunded_at = NOW(6) - INTERVAL 1 DAY`,
			mend: `UPDATE payments SET status = 'CHARGED', refunded_at = NULL`, attempts: 1, why: "is not charged"},
	} {
		t.Run(name, func(t *testing.T) {
			k := newTill(t)
			k.batch(k.intake.HandleBatch, requests(t, 1, func(_ int, o *CreateOrder) { o.ShipTo.Country = "ZZ" }))
			k.deliver(k.commands()...) // the stock
			reserved := k.sum(`SELECT SUM(reserved) FROM inventory`)
			k.deliver(k.commands()...) // the payment
			k.exec(`CREATE TABLE kept AS SELECT * FROM payments`)
			k.fault(tt.fault)
			if tt.spoil != "" {
				k.exec(tt.spoil)
			}
			k.run()
			list, _, err := saga.List(t.Context(), k.db, saga.Filter{})
			if err != nil || len(list) != 1 {
				t.Fatalf("%d sagas, %v", len(list), err)
			}
			is := list[0]
			if is.Status != saga.ManualAction || is.Direction != saga.Compensate || is.Attempt != tt.attempts || !strings.Contains(is.LastError, tt.why) {
				t.Errorf("the saga is %+v", is)
			}
			counts, err := Counts(t.Context(), k.db)
			if err != nil || counts["NEEDS_ATTENTION"] != 1 {
				t.Errorf("%v, %v", counts, err)
			}
			if n := k.sum(`SELECT COUNT(*) FROM outbox_events WHERE routing_key = 'saga.manual_action' AND payload LIKE '%"step":"charge-payment"%' AND payload LIKE '%"direction":"compensate"%'`); n != 1 {
				t.Errorf("%d events that say so", n)
			}
			if n := k.sum(`SELECT SUM(reserved) FROM inventory`); n != reserved || n == 0 {
				t.Errorf("%d reserved, want %d", n, reserved)
			}

			k.fault(gateway.Fault{})
			if tt.mend != "" {
				k.exec(tt.mend)
			}
			op := saga.Operation{Verb: saga.VerbRetry, By: outbox.Operator{Actor: "ops", Reason: "mended"}}
			if eff, err := k.engine.Operate(t.Context(), k.db, is.ID, op); err != nil || eff.Step != "charge-payment" || eff.Direction != saga.Compensate {
				t.Errorf("%+v, %v", eff, err)
			}
			k.run()
			k.orderIs("CANCELLED")
			if l := k.agree(0, 1); len(l.Refunds) != 1 {
				t.Errorf("ledger %+v, want one refund", l)
			}
		})
	}
}

// A gateway that gives no answer for a while is asked again: nobody has to look, and no attempt too many
// is a second refund.
func TestRefundFailsForAWhile(t *testing.T) {
	k := newTill(t)
	k.fault(gateway.Fault{Kind: gateway.FailBefore, On: "refunds", Times: 4})
	k.order(requests(t, 1, func(_ int, o *CreateOrder) { o.ShipTo.Country = "ZZ" })...)
	k.orderIs("CANCELLED")
	if l := k.agree(0, 1); len(l.Refunds) != 1 {
		t.Errorf("ledger %+v, want one refund", l)
	}
	if n := k.sum(`SELECT COUNT(*) FROM outbox_events WHERE routing_key = 'saga.manual_action'`); n != 0 {
		t.Errorf("%d events that call for a person", n)
	}
	if n := k.sum(`SELECT calls FROM saga_calls WHERE direction = 'compensate'`); n != 5 {
		t.Errorf("%d calls to refund, want 5", n)
	}
}

func (w *world) sum(query string) (n int) {
	w.t.Helper()
	if err := w.db.QueryRowContext(w.t.Context(), query).Scan(&n); err != nil {
		w.t.Fatalf("%s: %v", query, err)
	}
	return n
}
