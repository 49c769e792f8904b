package main

import (
	"fmt"
	"net/url"
)

// report prints the outcome and where to look at it.
func (d *demo) report(r *result, p *place) error {
	if d.asJSON {
		if err := printJSON(d.out, r); err != nil {
			return err
		}
	} else {
		d.printResult(r)
	}
	if d.keep {
		d.whereToLook(r, p)
	} else if !d.asJSON {
		fmt.Fprintln(d.out, "\nall of it is stopped and removed now; to look around: make demo KEEP=1, or backstep demo --keep")
	}
	return nil
}

func (d *demo) printResult(r *result) {
	t := newTable("outcome", "expected", "actual", "")
	for _, o := range r.Outcomes {
		mark := "ok"
		if o.Expected != o.Actual {
			mark = "DIFFERENT"
		}
		t.AppendRow([]any{o.Name, o.Expected, o.Actual, mark})
	}
	fmt.Fprintln(d.out)
	render(d.out, t)
	for i, diff := range r.Differences {
		if i == perRule {
			fmt.Fprintf(d.out, "… and %d more; --json has them\n", len(r.Differences)-perRule)
			break
		}
		fmt.Fprintf(d.out, "request %s, order %s: expected %s, is %s\n", diff.RequestID, diff.OrderID, diff.Expected, diff.Actual)
	}
	for _, fault := range r.LedgerFaults[:min(perRule, len(r.LedgerFaults))] {
		fmt.Fprintln(d.out, "payment gateway:", fault)
	}
	if d.gateway && len(r.LedgerFaults) == 0 {
		fmt.Fprintln(d.out, "payment gateway: every order that is confirmed was charged once, every other is not charged or refunded")
	}
	w := columns(d.out)
	fmt.Fprintf(w, "\nsagas per second\t%.0f\n", r.SagasPerSecond)
	fmt.Fprintf(w, "from submit to end\tp50 %.0f ms, p99 %.0f ms\n", r.P50, r.P99)
	fmt.Fprintf(w, "messages published by the relays\t%d\n", r.Published)
	fmt.Fprintf(w, "duplicates dropped by the workers\t%d\n", r.Duplicates)
	fmt.Fprintf(w, "batches run again after a lock conflict\t%d\n", r.Conflicts)
	_ = w.Flush() // as for all that is printed: nobody is left to tell
	fmt.Fprintln(d.out)
	r.Verify.print(d.out)
}

// whereToLook tells a person what to look at, and how. It goes where progress goes, so that
// --json stays JSON.
func (d *demo) whereToLook(r *result, p *place) {
	d.say("")
	if u, err := url.Parse(p.config.AMQP.ManagementURL); err == nil && u.User != nil {
		password, _ := u.User.Password()
		u.User = nil
		d.say("management UI   %s  user %s, password %s, virtual host %s", u, p.managementUser(), password, p.name)
	}
	if d.pay != nil {
		d.say("payment gateway %s/ledger", d.pay.url)
	}
	d.say("logs            %s", d.logs)
	d.say("a saga          %s", r.Sample)
	d.say("\nto look at it, in another terminal:\n")
	d.say("  export BACKSTEP_MYSQL_DSN='%s'", p.config.MySQL.DSN)
	d.say("  export BACKSTEP_AMQP_URL='%s'", p.config.AMQP.URL)
	d.say("  export BACKSTEP_AMQP_MANAGEMENT_URL='%s'", p.config.AMQP.ManagementURL)
	if d.pay != nil {
		d.say("  export BACKSTEP_PAYMENT_URL='%s'", d.pay.url)
	}
	d.say("  bin/backstep saga list --status COMPENSATED")
	d.say("  bin/backstep saga show %s", r.Sample)
	d.say("  bin/backstep submit --count 10")
	d.say("  bin/backstep verify --wait 30s\n")
	if d.pay != nil {
		d.howToBreak()
	}
}

func (p *place) managementUser() string {
	u, err := url.Parse(p.config.AMQP.ManagementURL)
	if err != nil {
		return ""
	}
	return u.User.Username()
}
