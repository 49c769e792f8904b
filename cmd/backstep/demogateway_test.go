package main

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"backstep/internal/testenv/gateway"
)

// TestPaymentFaultsDoc runs each command of that section of docs/operations.md as it stands there, with the
// demo's gateway, and demands its effect on a charge and on a refund, and what of them is in the ledger.
func TestPaymentFaultsDoc(t *testing.T) {
	t.Parallel()
	const none = 0 // no answer
	effects := []struct {
		command          string
		charge, refund   int // statuses
		charges, refunds int // in the ledger
	}{
		{`curl -d '{"fault": "fail-before", "on": "charges"}' "$BACKSTEP_PAYMENT_URL/faults"`, 500, 201, 1, 1}, // one is voided
		{`curl -d '{"fault": "cut-after", "times": 3}' "$BACKSTEP_PAYMENT_URL/faults"`, none, none, 1, 1},
		{`curl -d '{"fault": "slow", "delay_ms": 2000}' "$BACKSTEP_PAYMENT_URL/faults"`, none, none, -1, -1}, // it may be doing it yet
		{`curl -d '{"fault": "none"}' "$BACKSTEP_PAYMENT_URL/faults"`, 201, 201, 1, 1},
	}
	section, commands := documented(t, "Payments over HTTP")
	for _, k := range append([]gateway.Kind{gateway.None}, gateway.Kinds...) {
		if !strings.Contains(section, "`"+string(k)+"`") {
			t.Errorf("docs/operations.md does not name the fault %s", k)
		}
	}
	o := newOperator(t)
	for _, e := range effects {
		commands.take(t, e.command)
		g, err := startDemoGateway()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = g.server.Close() })
		if said := o.shell(e.command, "", g.environment()); strings.Contains(said, "error") {
			t.Errorf("%s: %s", e.command, said)
		}
		if charge, refund := askGateway(t, g, "charges"), askGateway(t, g, "refunds"); charge != e.charge || refund != e.refund {
			t.Errorf("after %s a charge is answered with %d and a refund with %d, want %d and %d", e.command, charge, refund, e.charge, e.refund)
		}
		if l := g.Ledger(); e.charges >= 0 && (len(l.Charges) != e.charges || len(l.Refunds) != e.refunds) {
			t.Errorf("after %s the ledger is %+v", e.command, l)
		}
	}
	commands.end(t)
}

// askGateway asks for a charge or a refund, does not wait for long, and returns the answer's status; 0: none.
func askGateway(t *testing.T, g *demoGateway, what string) int {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, g.url+"/"+what, strings.NewReader(`{"order": "o", "charge_key": "charges"}`))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Idempotency-Key", what)
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(r)
	if err != nil {
		return 0
	}
	_ = resp.Body.Close() // what it says is the gateway's own tests' matter
	return resp.StatusCode
}
