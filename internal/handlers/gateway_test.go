package handlers

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
	"backstep/internal/testenv/gateway"
)

// till is a world with a payment gateway.
type till struct {
	*world
	gateway gateway.Gateway
	client  *Gateway
	deaf    atomic.Int64 // how many questions about charges it does not answer
}

func newTill(t *testing.T) *till {
	t.Helper()
	k := &till{world: newWorld(t)}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && k.deaf.Add(-1) >= 0 {
			http.Error(w, "not now", http.StatusServiceUnavailable)
			return
		}
		k.gateway.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	client, err := NewGateway(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	k.client = client
	t.Cleanup(client.client.CloseIdleConnections)
	k.engine = NewEngineWithGateway(slog.New(slog.DiscardHandler), client)
	return k
}

func (k *till) fault(f gateway.Fault) {
	k.t.Helper()
	if err := k.gateway.Break(f); err != nil {
		k.t.Fatal(err)
	}
}

// deliver hands messages to the engine, in one transaction, and makes the calls that it asks for.
func (k *till) deliver(msgs ...message.Message) (out []message.Outcome) {
	k.t.Helper()
	err := sqltx.Once(k.t.Context(), k.db, func(ctx context.Context, tx *sqltx.Tx) error {
		out = k.engine.HandleBatch(ctx, tx, msgs)
		return tx.Err()
	})
	if err != nil {
		k.t.Fatal(err)
	}
	var again []message.Message
	for i, o := range out {
		if o.Kind == message.Outside {
			msgs[i].Answer = o.Call(k.t.Context())
			again = append(again, msgs[i])
		}
	}
	if len(again) > 0 {
		return k.deliver(again...)
	}
	return out
}

// retries returns the messages that wait for their time; they wait no longer.
func (k *till) retries() []message.Message {
	k.t.Helper()
	taken := k.taken
	k.taken = 0
	if _, err := k.db.ExecContext(k.t.Context(), `
INSERT INTO outbox_events (message_id, ordering_key, aggregate_type, aggregate_id, event_type, exchange, routing_key, mandatory, properties, headers, payload)
SELECT message_id, ordering_key, aggregate_type, aggregate_id, event_type, exchange, routing_key, mandatory, properties, headers, payload FROM scheduled_messages`); err != nil {
		k.t.Fatal(err)
	}
	if _, err := k.db.ExecContext(k.t.Context(), `DELETE FROM scheduled_messages`); err != nil {
		k.t.Fatal(err)
	}
	k.taken = taken
	return k.commands()
}

// run works everything off.
func (k *till) run() {
	k.t.Helper()
	for {
		msgs := k.commands()
		if len(msgs) == 0 {
			if msgs = k.retries(); len(msgs) == 0 {
				return
			}
		}
		k.deliver(msgs...)
	}
}

// order submits orders and works everything off.
func (k *till) order(msgs ...message.Message) {
	k.t.Helper()
	k.batch(k.intake.HandleBatch, msgs)
	k.run()
}

// agree demands the invariants, the number of orders of each status, and that the ledger is that of
// the orders.
func (k *till) agree(confirmed, cancelled int) gateway.Ledger {
	k.t.Helper()
	k.verify(confirmed)
	orders := map[string]string{}
	list, err := Outcomes(k.t.Context(), k.db, "", 1000)
	if err != nil {
		k.t.Fatal(err)
	}
	n := 0
	for _, o := range list {
		orders[o.OrderID] = o.Status
		if o.Status == "CANCELLED" {
			n++
		}
	}
	if n != cancelled {
		k.t.Errorf("%d orders cancelled, want %d: %+v", n, cancelled, list)
	}
	l := k.gateway.Ledger()
	for _, f := range l.Check(orders) {
		k.t.Error(f)
	}
	return l
}

// Of six orders two are refused by the carrier, so that they are refunded, and one is declined:
// whatever goes wrong at the gateway, the money is where the orders say.
func TestPaymentGateway(t *testing.T) {
	six := func(t *testing.T) []message.Message {
		return requests(t, 6, func(i int, o *CreateOrder) {
			switch i {
			case 1, 4:
				o.ShipTo.Country = "ZZ"
			case 2:
				o.PaymentToken = "decline"
			}
		})
	}
	for _, f := range []gateway.Fault{
		{},
		{Kind: gateway.FailBefore, Times: 3},
		{Kind: gateway.FailAfter},
		{Kind: gateway.CutAfter},
		{Kind: gateway.FailAfter, On: "refunds", Times: 4},
		{Kind: gateway.CutAfter, On: "refunds", Times: 4},
		{Kind: gateway.Slow, On: "charges", Delay: 300 * time.Millisecond, Times: 2},
		{Kind: gateway.Slow, On: "refunds", Delay: 300 * time.Millisecond, Times: 2},
	} {
		t.Run(strings.TrimSpace(string(f.Kind)+" "+f.On), func(t *testing.T) {
			k := newTill(t)
			k.client.client.Timeout = 100 * time.Millisecond
			if f.Kind == gateway.FailAfter && f.On == "" || f.Kind == gateway.CutAfter && f.On == "" {
				f.On = "charges" // for ever; a refund that always fails is an operator's
			}
			k.fault(f)
			k.order(six(t)...)
			l := k.agree(3, 3)
			if len(l.Refunds) != 2 {
				t.Errorf("refunds %+v, want 2", l.Refunds)
			}
		})
	}
}

// What is charged and not known to be is refunded, or kept from being charged.
func TestUnknownPayment(t *testing.T) {
	t.Run("it was charged", func(t *testing.T) {
		k := newTill(t)
		k.fault(gateway.Fault{Kind: gateway.CutAfter, On: "charges"})
		k.deaf.Store(1000)
		k.order(requests(t, 2, nil)...)
		l := k.agree(0, 2)
		if len(l.Charges) != 2 || len(l.Refunds) != 2 || l.Refunds[0].Status != gateway.Refunded {
			t.Errorf("ledger %+v, want two charges that were refunded", l)
		}
		var n int
		if err := k.db.QueryRowContext(t.Context(), `SELECT COUNT(*) FROM payments WHERE status = 'REFUNDED' AND id IN (?, ?)`,
			[]byte(l.Charges[0].ID), []byte(l.Charges[1].ID)).Scan(&n); err != nil || n != 2 {
			t.Errorf("%d refunded payments, %v", n, err)
		}
	})
	t.Run("it was not", func(t *testing.T) {
		k := newTill(t)
		k.fault(gateway.Fault{Kind: gateway.FailBefore, On: "charges"})
		k.order(requests(t, 1, nil)...)
		l := k.agree(0, 1)
		if len(l.Refunds) != 1 || l.Refunds[0].Status != gateway.Voided {
			t.Errorf("ledger %+v, want a charge that was voided", l)
		}
		// The charge comes late.
		order := saga.Info{SagaID: "x", Step: "y", Direction: saga.Execute}
		key := l.Charges[0].Key
		k.fault(gateway.Fault{})
		status, a, err := k.client.do(t.Context(), http.MethodPost, key, gatewayRequest{Order: order.SagaID, AmountCents: 1}, "charges")
		if err != nil || status != http.StatusPaymentRequired {
			t.Errorf("a late charge: HTTP %d, %+v, %v", status, a, err)
		}
		k.agree(0, 1)
	})
	t.Run("it is cancelled amid the call", func(t *testing.T) {
		k := newTill(t)
		k.batch(k.intake.HandleBatch, requests(t, 1, nil))
		k.deliver(k.commands()...)
		k.fault(gateway.Fault{Kind: gateway.FailAfter, On: "charges", Times: 1})
		k.deliver(k.commands()...)
		retry := k.retries()
		k.deliver(message.Message{
			Properties: message.Properties{MessageID: message.NewID(), Type: saga.CancelType},
			Headers:    message.Headers{message.HeaderSagaID: retry[0].Headers.String(message.HeaderSagaID)},
		})
		k.deliver(retry...)
		k.run()
		if l := k.agree(0, 1); len(l.Refunds) != 1 || l.Refunds[0].Status != gateway.Refunded {
			t.Errorf("ledger %+v, want a charge that was refunded", l)
		}
	})
}

// A gateway may say no and not why.
func TestRefundRefusedWithoutAWord(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnprocessableEntity) }))
	defer server.Close()
	g, err := NewGateway(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.refund(t.Context(), saga.Info{SagaID: "s", Unknown: true}, Order{ID: "o"}, Payment{}); !saga.IsPermanent(err) || !strings.HasSuffix(err.Error(), ": it does not say why") {
		t.Errorf("refund: %v", err)
	}
}

// A gateway that has lost a charge which it answered has refunded nothing: an operator has to look.
func TestRefundOfALostCharge(t *testing.T) {
	k := newTill(t)
	k.batch(k.intake.HandleBatch, requests(t, 1, func(_ int, o *CreateOrder) { o.ShipTo.Country = "ZZ" }))
	k.deliver(k.commands()...) // the stock
	k.deliver(k.commands()...) // the payment
	lost := k.gateway.Ledger().Charges[0]
	k.gateway.Forget()
	k.run()
	var id, status, reason string
	if err := k.db.QueryRowContext(t.Context(), `SELECT id, status, last_error FROM saga_instances`).Scan(&id, &status, &reason); err != nil {
		t.Fatal(err)
	}
	if status != string(saga.ManualAction) || !strings.Contains(reason, "payment "+lost.ID) || !strings.Contains(reason, k.client.root.Host) {
		t.Errorf("the saga is %s, because %s", status, reason)
	}
	var paid string
	if err := k.db.QueryRowContext(t.Context(), `SELECT status FROM payments`).Scan(&paid); err != nil || paid != "CHARGED" {
		t.Errorf("the payment is %s, %v", paid, err)
	}
	k.order(requests(t, 1, nil)...)
	if again := k.gateway.Ledger().Charges; again[len(again)-1].ID == lost.ID {
		t.Errorf("two payments have the id %s", lost.ID)
	}
}

// An instance goes from workers with the gateway to those without, and back.
func TestGatewayHereAndThere(t *testing.T) {
	k := newTill(t)
	with, without := k.engine, NewEngine(slog.New(slog.DiscardHandler))
	k.batch(k.intake.HandleBatch, requests(t, 2, func(i int, o *CreateOrder) { o.ShipTo.Country = "ZZ" }))
	k.engine = without
	k.deliver(k.commands()...) // the stock
	charges := k.commands()
	k.engine = with
	k.deliver(charges[0])
	k.engine = without
	k.deliver(charges[1])
	k.deliver(k.commands()...) // the carrier refuses both
	refunds := k.commands()
	outs := k.deliver(refunds...)
	if outs[0].Kind != message.Deferred || !strings.Contains(outs[0].Reason, "no BACKSTEP_PAYMENT_URL") || outs[1].Kind != message.Done {
		t.Errorf("the refunds are %+v", outs)
	}
	k.engine = with
	k.deliver(refunds[0])
	k.run()
	if l := k.agree(0, 2); len(l.Charges) != 1 || len(l.Refunds) != 1 {
		t.Errorf("ledger %+v, want one charge and one refund", l)
	}

	// And the other way round: what was only recorded is not refunded at the gateway.
	k = newTill(t)
	with = k.engine
	k.batch(k.intake.HandleBatch, requests(t, 1, func(i int, o *CreateOrder) { o.ShipTo.Country = "ZZ" }))
	k.engine = without
	k.deliver(k.commands()...)
	k.deliver(k.commands()...)
	k.engine = with
	k.run()
	if l := k.agree(0, 1); l.Requests != 0 {
		t.Errorf("ledger %+v, want nothing", l)
	}
}

// What the gateway answers that it must not is unknown, never a payment.
func TestGatewayTalksNonsense(t *testing.T) {
	for body, status := range map[string]int{
		`{`: 200, `{}`: 201, `{"id":""}`: 200, `{"id":"` + strings.Repeat("x", 37) + `"}`: 200,
		`{"id":"a"}`: 500, `x`: 404, ` `: 401, `[]`: 302, `no`: 409,
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = w.Write([]byte(body))
		}))
		g, err := NewGateway(server.URL)
		if err != nil {
			t.Fatal(err)
		}
		info := saga.Info{SagaID: "s", Step: "charge-payment", Direction: saga.Execute}
		if p, err := g.charge(t.Context(), info, Order{ID: "o"}); err == nil || saga.IsPermanent(err) {
			t.Errorf("%d %s: %+v, %v", status, body, p, err)
		}
		info.Direction = saga.Compensate
		if r, err := g.refund(t.Context(), info, Order{ID: "o"}, Payment{Gateway: true}); err == nil || saga.IsPermanent(err) {
			t.Errorf("%d %s: %+v, %v", status, body, r, err)
		}
		server.Close()
	}
	for _, raw := range []string{"", "x", "ftp://x", "http://", "http://user:secret@x", "http://x?a=b", "http://x#y", "://"} {
		if _, err := NewGateway(raw); err == nil {
			t.Errorf("%q was accepted", raw)
		}
	}
}
