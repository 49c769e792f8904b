package e2e

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/testenv/gateway"
)

// A payment that is given up while nobody knows what became of it, since its tries are used up or
// its time is over, is refunded if it was made. One whose worker is killed amid the third try is not
// given up (B98, B99).
func TestPaymentIsGivenUp(t *testing.T) {
	t.Parallel()
	k := newTill(t)
	p := k.partition()
	behind := "BACKSTEP_PAYMENT_URL=" + p.server.URL
	k.start("relay")
	victim := k.worker(behind, "CRASH_AT=call.intended:3")
	k.awaitQueues()
	total := 0
	order := func(n int) {
		msgs, _ := orders(n)
		k.submit(msgs...)
		total += n
	}

	// Two tries fail, and the worker dies in the third.
	k.fault(gateway.Fault{Kind: gateway.FailBefore, Times: 2})
	order(1)
	victim.killed(60 * time.Second)
	k.run("outbox", "republish", "--queue", handlers.PaymentQueue, "--since", "1h", "--reason", "more messages of the saga, in between")
	k.worker(behind)
	k.rest(total, 60*time.Second)
	if got := k.text(`SELECT GROUP_CONCAT(name, ' ', attempts ORDER BY step_order) FROM saga_steps`); got != "reserve-stock 1,charge-payment 3,create-shipment 1" {
		t.Errorf("the worker was killed in attempt 3 of charge-payment: %s", got)
	}

	// All five tries are used up, and nobody can be asked what they did.
	const n = 3
	k.fault(gateway.Fault{Kind: gateway.FailAfter, On: "charges"})
	p.become(unaskable)
	order(n)
	k.rest(total, 60*time.Second)

	// The time is over while they are charged.
	k.fault(gateway.Fault{})
	p.become(slow)
	order(n)
	k.eventually(30*time.Second, "all are charged", func() error {
		if l := k.ledger(); len(l.Charges) != 1+2*n {
			return fmt.Errorf("%+v", l)
		}
		return nil
	})
	k.exec(`UPDATE saga_pulse SET up_since = up_since - INTERVAL 1 MINUTE`)
	k.exec(`UPDATE saga_instances SET deadline_at = NOW(6) - INTERVAL (SELECT downtime_us FROM saga_pulse) MICROSECOND WHERE call_open`)
	k.eventually(30*time.Second, "their time is over", func() error {
		if left := k.count(`SELECT COUNT(*) FROM saga_instances WHERE deadline_at IS NOT NULL`); left > 0 {
			return fmt.Errorf("that of %d is not", left)
		}
		return nil
	})
	p.become(transparent)
	k.rest(total, 60*time.Second)

	k.verify(expectation{confirmed: 1})
	for _, why := range []string{"%gave up after 5 attempts%", "%not done within%"} {
		if got := k.count(`SELECT COUNT(*) FROM orders WHERE status = 'CANCELLED' AND reason LIKE ?`, why); got != n {
			t.Errorf("%d orders cancelled because of %s, want %d", got, why, n)
		}
	}
	k.balance()
	if l := k.ledger(); len(l.Charges) != total || len(l.Refunds) != 2*n {
		t.Errorf("%d charges and %d refunds, want %d and %d", len(l.Charges), len(l.Refunds), total, 2*n)
	}
}

// partition is between the workers and the payment gateway.
type partition struct {
	server *httptest.Server

	mu   sync.Mutex // guards below
	mode mode
	over chan struct{} // closed when the mode is
}

type mode string

const (
	transparent mode = "transparent"
	unaskable   mode = "unaskable" // nobody learns what became of a charge
	slow        mode = "slow"      // a charge is made at once, and answered when this mode is over
)

func (k *till) partition() *partition {
	k.t.Helper()
	u, err := url.Parse(k.url)
	if err != nil {
		k.t.Fatal(err)
	}
	p := &partition{mode: transparent, over: make(chan struct{})}
	proxy := httputil.NewSingleHostReverseProxy(u)
	proxy.ModifyResponse = func(resp *http.Response) error {
		p.mu.Lock()
		m, over := p.mode, p.over
		p.mu.Unlock()
		switch charge := strings.HasPrefix(resp.Request.URL.Path, "/charges"); {
		case charge && m == unaskable && resp.Request.Method == http.MethodGet:
			resp.StatusCode = http.StatusServiceUnavailable
		case charge && m == slow:
			<-over
		}
		return nil
	}
	p.server = httptest.NewServer(proxy)
	k.t.Cleanup(func() {
		p.become(transparent)
		p.server.Close()
	})
	return p
}

func (p *partition) become(m mode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.over)
	p.mode, p.over = m, make(chan struct{})
}
