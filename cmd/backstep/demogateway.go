package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"time"

	"backstep/internal/app"
	"backstep/internal/handlers"
	"backstep/internal/testenv/gateway"
)

// demoGateway is a payment gateway for the demo, in this process. The first of its answers to
// charges get lost, so that workers have to find out what became of them.
type demoGateway struct {
	gateway.Gateway
	server *http.Server
	url    string
}

// lostAnswers is how many.
const lostAnswers = 10

func startDemoGateway() (*demoGateway, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start the payment gateway: %w", err)
	}
	g := &demoGateway{url: "http://" + l.Addr().String()}
	if err := g.Break(gateway.Fault{Kind: gateway.CutAfter, On: "charges", Times: lostAnswers}); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	g.server = &http.Server{Handler: &g.Gateway, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = g.server.Serve(l) }() // it ends when it is closed; were it to end before, no order would be charged
	return g, nil
}

func (g *demoGateway) environment() string { return app.Prefix + "_PAYMENT_URL=" + g.url }

// breaking is the command that has the gateway go wrong in a way, or no more.
func (g *demoGateway) breaking(k gateway.Kind) string {
	fault := fmt.Sprintf(`{"fault": %q}`, k)
	if k == gateway.Slow {
		fault = fmt.Sprintf(`{"fault": %q, "delay_ms": %d}`, k, demoDelay.Milliseconds())
	}
	return fmt.Sprintf("curl -d '%s' %s/faults", fault, g.url)
}

// demoDelay is seen in the time that a saga takes, and no call runs into its time-out.
const demoDelay = 2 * time.Second

// howToBreak tells a person how to have the gateway go wrong, and how to end that.
func (d *demo) howToBreak() {
	d.say("to have the payment gateway go wrong from now on, until the next of these:\n")
	for _, k := range append(slices.Clone(gateway.Kinds), gateway.None) {
		d.say("  %s   # %s", d.pay.breaking(k), k.Meaning())
	}
	d.say(`
with "on": "charges", or "refunds", these alone; with "times": 3 so often, and then no more
`)
}

// ledger compares the gateway's ledger with the orders.
func (t *trial) ledger(ctx context.Context, _ []order, r *result) error {
	if t.pay == nil {
		return nil
	}
	statuses := map[string]string{}
	err := t.eachOutcome(ctx, func(o handlers.Outcome) { statuses[o.OrderID] = o.Status })
	if err != nil {
		return err
	}
	r.LedgerFaults = t.pay.Ledger().Check(statuses)
	return nil
}
