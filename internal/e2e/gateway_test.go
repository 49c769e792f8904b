package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/testenv/gateway"
)

// till is a wheel whose workers charge at a payment gateway, a process of its own.
type till struct {
	*wheel
	url string
}

func newTill(t *testing.T) *till {
	t.Helper()
	k := &till{wheel: newWheel(t)}
	p := k.startArgs("paymentgateway", []string{"-listen", "127.0.0.1:0"})
	says := regexp.MustCompile(`BACKSTEP_PAYMENT_URL=(\S+)\n`)
	k.eventually(30*time.Second, "the payment gateway listens", func() error {
		m := says.FindStringSubmatch(p.text())
		if m == nil {
			return errors.New(p.text())
		}
		k.url = m[1]
		return nil
	})
	return k
}

func (k *till) worker(env ...string) *proc {
	k.t.Helper()
	return k.start("worker", append([]string{"BACKSTEP_PAYMENT_URL=" + k.url, "BACKSTEP_BATCH=4"}, env...)...)
}

// fault has something go wrong at the gateway from now on.
func (k *till) fault(f gateway.Fault) {
	k.t.Helper()
	body := fmt.Sprintf(`{"fault":%q,"on":%q,"times":%d,"delay_ms":%d}`, f.Kind, f.On, f.Times, f.Delay.Milliseconds())
	req, err := http.NewRequestWithContext(k.t.Context(), http.MethodPost, k.url+"/faults", strings.NewReader(body))
	if err != nil {
		k.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		k.t.Fatal(err)
	}
	_ = resp.Body.Close() // it has none
	if resp.StatusCode != http.StatusNoContent {
		k.t.Fatalf("POST /faults %s: %s", body, resp.Status)
	}
}

func (k *till) ledger() (l gateway.Ledger) {
	k.t.Helper()
	req, err := http.NewRequestWithContext(k.t.Context(), http.MethodGet, k.url+"/ledger", http.NoBody)
	if err != nil {
		k.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		k.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }() // it was read
	if err := json.NewDecoder(resp.Body).Decode(&l); err != nil {
		k.t.Fatal(err)
	}
	return l
}

// agree demands that the orders end, every invariant, and balance.
func (k *till) agree(want expectation) {
	k.t.Helper()
	k.rest(want.total(), 60*time.Second)
	k.verify(want)
	k.balance()
}

// balance demands that the ledger says of the money what the orders say, which have ended.
func (k *till) balance() {
	k.t.Helper()
	orders := map[string]string{}
	list, err := handlers.Outcomes(k.t.Context(), k.db, "", 10_000)
	if err != nil {
		k.t.Fatal(err)
	}
	for _, o := range list {
		orders[o.OrderID] = o.Status
	}
	for _, f := range k.ledger().Check(orders) {
		k.t.Error(f)
	}
	if n := k.count(`SELECT COUNT(*) FROM saga_instances WHERE call_open`); n > 0 {
		k.t.Errorf("%d sagas have an open call", n)
	}
	k.run("verify")
}

// run runs the CLI to its end, which must be a good one.
func (k *till) run(args ...string) {
	k.t.Helper()
	p := k.startArgs("backstep", args)
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		k.t.Fatalf("backstep %v did not end", args)
	}
	if p.err != nil {
		k.t.Errorf("backstep %v: %v\n%s", args, p.err, p.text())
	}
}

// Whatever goes wrong at the payment gateway, each order is charged once, and what is not delivered
// is refunded once.
func TestPaymentGatewayFaults(t *testing.T) {
	t.Parallel()
	k := newTill(t)
	procs := []*proc{k.start("relay"), k.worker(), k.worker()}
	k.awaitQueues()
	var want expectation
	for _, f := range []gateway.Fault{
		{},
		{Kind: gateway.FailBefore, Times: 3},
		{Kind: gateway.FailAfter, On: "charges"}, // always: it is asked what it did
		{Kind: gateway.CutAfter, On: "charges"},
		{Kind: gateway.FailAfter, On: "refunds", Times: 1},
		{Kind: gateway.CutAfter, On: "refunds", Times: 1},
		{Kind: gateway.Slow, Delay: 300 * time.Millisecond},
		{Kind: gateway.Decline, On: "charges"},
	} {
		k.fault(f)
		msgs, more := orders(10)
		if f.Kind == gateway.Decline {
			more = expectation{noStock: 1, declined: 9}
		}
		want = want.plus(more)
		k.submit(msgs...)
		k.rest(want.total(), 60*time.Second)
	}
	k.agree(want)
	stopAll(procs...)
}

// TestPaymentGatewayCrash kills a worker around a call: the next one asks what became of it.
func TestPaymentGatewayCrash(t *testing.T) {
	slow := gateway.Fault{Kind: gateway.Slow, Delay: time.Second}
	kill := func(_ *till, victim *proc) {
		victim.signal(syscall.SIGKILL)
		victim.killed(10 * time.Second)
	}
	tests := []struct {
		name  string
		point string
		fault gateway.Fault
		end   func(k *till, victim *proc) // instead of a crash point
		// All the victim's calls are refunds, and of those it leaves so many: open ones, ones whose
		// outcome is recorded, and ones that the ledger has.
		refunds func(open, recorded, made int) bool
	}{
		{name: "the intent is committed", point: "call.intended:5"},
		{name: "answered", point: "call.answered:5"},
		{name: "recorded", point: "call.recorded:5"},
		{name: "answered in vain", point: "call.answered:3", fault: gateway.Fault{Kind: gateway.FailAfter, Times: 2}},
		{name: "killed amid calls", fault: slow, end: kill},
		{name: "stopped amid calls", fault: slow, end: func(k *till, victim *proc) {
			victim.stop()
			known := k.count(`SELECT COUNT(*) FROM saga_calls WHERE status <> 'OPEN'`)
			if made := k.ledger().Requests; made != known {
				k.t.Errorf("%d calls were made, and the outcome of %d is known", made, known)
			}
		}},
		{name: "the intent to refund is not committed", point: "worker.before-commit:1",
			refunds: func(open, recorded, made int) bool { return open == 0 && recorded == 0 && made == 0 }},
		{name: "killed amid refunds", fault: slow, end: kill,
			refunds: func(open, _, _ int) bool { return open >= 3 }},
		{name: "refunds are answered", point: "call.answered:3",
			refunds: func(open, recorded, made int) bool { return open > 0 && made > recorded }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			k := newTill(t)
			k.start("relay")
			env := []string{"CRASH_AT=" + tt.point}
			var want expectation
			if tt.refunds != nil {
				want = k.toRefund(10)
				env = append(env, "BACKSTEP_QUEUES=payment")
			} else {
				k.awaitQueues()
				var msgs []amqp091.Publishing
				msgs, want = orders(30)
				k.submit(msgs...)
			}
			k.fault(tt.fault)
			victim := k.worker(env...)
			if tt.end == nil {
				victim.killed(60 * time.Second)
			} else {
				k.eventually(60*time.Second, "calls are being made", func() error {
					if l := k.ledger(); l.Requests-len(l.Charges)-len(l.Refunds) < 3 {
						return fmt.Errorf("%+v", l)
					}
					return nil
				})
				tt.end(k, victim)
				k.fault(gateway.Fault{})
			}
			if tt.refunds != nil {
				const calls = `SELECT COUNT(*) FROM saga_calls WHERE direction = 'compensate' AND status = `
				open, recorded, made := k.count(calls+`'OPEN'`), k.count(calls+`'DONE'`), len(k.ledger().Refunds)
				if !tt.refunds(open, recorded, made) {
					t.Errorf("%d refunds were open, %d recorded and %d made when the worker had ended", open, recorded, made)
				}
			}
			k.worker()
			k.agree(want)
		})
	}
}

// toRefund makes n orders that are charged and refused a shipment: what becomes of their payments is
// for the next worker to do.
func (k *till) toRefund(n int) (want expectation) {
	k.t.Helper()
	w := k.worker("BACKSTEP_QUEUES=orders,inventory,payment")
	k.awaitQueues()
	for range n {
		k.submit(request(k.t, func(o *handlers.CreateOrder) { o.ShipTo.Country = "ZZ" }))
	}
	k.eventually(60*time.Second, "all are charged", func() error {
		if got := k.count(`SELECT COUNT(*) FROM saga_instances WHERE current_step = 2`); got != n {
			return fmt.Errorf("%d are", got)
		}
		return nil
	})
	w.stop()
	k.worker("BACKSTEP_QUEUES=shipping")
	return expectation{refused: n}
}
