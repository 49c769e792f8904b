package amqp

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"backstep/internal/message"
	"backstep/internal/testenv"
)

// TestDeclare looks at what the broker made of it, through the management API.
func TestDeclare(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	for range 2 { // the second time there is nothing to do
		declare(t, c, "orders", "payment")
	}
	m, err := newManagement(b.ManagementURL)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"orders", "orders.parked", "payment", "payment.parked"} {
		var q struct {
			Type      string         `json:"type"`
			Durable   bool           `json:"durable"`
			Arguments map[string]any `json:"arguments"`
		}
		if err := m.call(within(t), http.MethodGet, nil, &q, "queues", b.Vhost, name); err != nil {
			t.Fatal(err)
		}
		want := map[string]any{"x-queue-type": "quorum", "x-overflow": "reject-publish"}
		if work, parked := strings.CutSuffix(name, ".parked"); parked {
			want["x-delivery-limit"] = float64(2147483647)
		} else {
			want["x-dead-letter-exchange"] = "backstep.parked"
			want["x-dead-letter-routing-key"] = work
			want["x-dead-letter-strategy"] = "at-least-once"
		}
		if diff := cmp.Diff(want, q.Arguments); diff != "" || q.Type != "quorum" || !q.Durable {
			t.Errorf("queue %s: type %s, durable %t, arguments (-want +got):\n%s", name, q.Type, q.Durable, diff)
		}
	}
	want := map[string]string{
		"backstep.commands": "direct", "backstep.events": "topic", "backstep.parked": "direct", "backstep.wake": "fanout",
	}
	for name, kind := range want {
		var e struct {
			Type    string `json:"type"`
			Durable bool   `json:"durable"`
		}
		if err := m.call(within(t), http.MethodGet, nil, &e, "exchanges", b.Vhost, name); err != nil {
			t.Fatal(err)
		}
		if e.Type != kind || !e.Durable {
			t.Errorf("exchange %s: type %s, durable %t, want a durable %s", name, e.Type, e.Durable, kind)
		}
	}
	ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
	defer ch.Release()
	parked := command("payment")
	parked.Exchange = message.ParkedExchange
	publish(t, ch, command("orders"), parked)
	if got := kinds(results(t, ch, 2)); got[message.Confirmed] != 2 {
		t.Errorf("published through the bindings: %v", got)
	}
}

func TestDeclareOverSomethingElse(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	if _, err := channel(t, c).QueueDeclare("orders", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	err := Topology{Queues: []string{"orders"}}.Declare(within(t), session(t, c))
	if err == nil {
		t.Fatal("Declare took a classic queue for its own")
	}
	for _, want := range []string{`queue "orders"`, "406", "delete it"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not say %q", err, want)
		}
	}
}

func TestDeclareRefusesNames(t *testing.T) {
	for _, name := range []string{"", strings.Repeat("q", 249)} {
		if err := (Topology{Queues: []string{name}}).Declare(t.Context(), nil); err == nil {
			t.Errorf("Declare took a queue name of %d bytes", len(name))
		}
	}
}

// TestEnsureWithoutConfigure: a process that may not declare looks, and says what is missing.
func TestEnsureWithoutConfigure(t *testing.T) {
	b := testenv.Vhost(t)
	admin := start(t, Config{URL: b.URL})
	topology := Topology{Queues: []string{"orders", "payment"}}
	// RabbitMQ 4.3 lets a user look at what it has any right on, 3.10 at everything.
	worker := start(t, Config{URL: b.User(t, "^$", "^backstep\\.", "^(orders|payment)(\\.parked)?$")})

	err := topology.Ensure(within(t), session(t, worker))
	if !errors.Is(err, ErrMissing) {
		t.Fatalf("Ensure on an empty broker = %v, want ErrMissing", err)
	}
	for _, want := range []string{`exchange "backstep.commands"`, `queue "payment.parked"`, "backstep topology apply"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not say %q", err, want)
		}
	}
	declare(t, admin, topology.Queues...)
	if err := topology.Ensure(within(t), session(t, worker)); err != nil {
		t.Errorf("Ensure = %v, want nil", err)
	}
	b.DeleteQueue(t, "payment")
	err = topology.Ensure(within(t), session(t, worker))
	if !errors.Is(err, ErrMissing) || !strings.Contains(err.Error(), `queue "payment"`) || strings.Contains(err.Error(), "orders") {
		t.Errorf("Ensure without one queue = %v, want ErrMissing naming it alone", err)
	}
	if err := topology.Ensure(within(t), session(t, admin)); err != nil {
		t.Errorf("Ensure with the right to configure = %v, want nil", err)
	}
	if err := topology.Ensure(within(t), session(t, worker)); err != nil {
		t.Errorf("Ensure after the queue was made = %v, want nil", err)
	}
}

// TestEnsureOnSession: a client has no session until the topology is there.
func TestEnsureOnSession(t *testing.T) {
	b := testenv.Vhost(t)
	topology := Topology{Queues: []string{"orders"}}
	worker := start(t, Config{URL: b.User(t, "^$", "^$", "^orders$"), OnSession: topology.Ensure})
	until(t, worker, func() bool { return strings.Contains(worker.State(), `queue "orders"`) })
	declare(t, start(t, Config{URL: b.URL}), "orders")
	session(t, worker)
}

func TestApplyPolicies(t *testing.T) {
	b := testenv.Vhost(t)
	m, err := newManagement(b.ManagementURL)
	if err != nil {
		t.Fatal(err)
	}
	for name, queues := range map[string][]string{"of the files": nil, "given": {"orders", "stock.v2"}} {
		t.Run(name, func(t *testing.T) {
			names, err := ApplyPolicies(within(t), b.ManagementURL, b.Vhost, queues...)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{"backstep-work", "backstep-parked"}, names); diff != "" {
				t.Errorf("applied (-want +got):\n%s", diff)
			}
			for _, name := range names {
				var got policy
				if err := m.call(within(t), http.MethodGet, nil, &got, "policies", b.Vhost, name); err != nil {
					t.Fatal(err)
				}
				if matches := strings.Contains(got.Pattern, `stock\.v2`); matches != (queues != nil) {
					t.Errorf("policy %s has pattern %s", name, got.Pattern)
				}
			}
		})
	}
}

// TestDeliveryLimit: with the policies, a message that is handed back again and again is parked.
func TestDeliveryLimit(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	m, err := newManagement(b.ManagementURL)
	if err != nil {
		t.Fatal(err)
	}
	policies, err := policiesFor("3.10.8", nil) // the later ones delay each try by a second more
	if err != nil {
		t.Fatal(err)
	}
	if err := m.call(within(t), http.MethodPut, policies[0], nil, "policies", b.Vhost, "work"); err != nil {
		t.Fatal(err)
	}
	fill(t, c, "orders", 1)
	parked := subscribe(t, c, ParkedQueue("orders"), 1)
	sub := subscribe(t, c, "orders", 1)
	deliveries := 0
	for limit := time.After(patience); ; {
		select {
		case d := <-sub.Deliveries():
			deliveries++
			if err := sub.ch.Reject(d.Tag, true); err != nil { // a failure on every version
				t.Fatal(err)
			}
			continue
		case d := <-parked.Deliveries():
			if string(d.Body) != "0" || deliveries != 21 {
				t.Errorf("message %s was parked after %d deliveries, want 21", d.Body, deliveries)
			}
		case <-limit:
			t.Errorf("not parked after %d deliveries", deliveries)
		}
		return
	}
}

func TestApplyPoliciesErrors(t *testing.T) {
	b := testenv.Vhost(t)
	tests := []struct{ name, url, vhost, want string }{
		{"no such vhost", b.ManagementURL, "nowhere", "does the virtual host exist"},
		{"wrong password", strings.Replace(b.ManagementURL, "@", "s3cret@", 1), b.Vhost, "401"},
		{"not a URL", "localhost:15672", b.Vhost, "http(s)://user:password@host:port"},
		{"broken URL", "http://app:s3cret%@broker", b.Vhost, "percent-encoded"},
		{"nobody listens", "http://app:s3cret@127.0.0.1:1", b.Vhost, "127.0.0.1:1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := ApplyPolicies(within(t), tt.url, tt.vhost)
			if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "s3cret") {
				t.Errorf("ApplyPolicies = %v, want an error with %q and no password", err, tt.want)
			}
		})
	}
}

func TestPoliciesFor(t *testing.T) {
	extra := map[string]bool{
		"3.10.8": false, "3.13.7": false, "4.2.4": false, "4.3.0": false, "unknown": false,
		"4.3.1": true, "4.3.10": true, "4.4.0-rc.1": true, "5.0.0": true,
	}
	for version, want := range extra {
		policies, err := policiesFor(version, nil)
		if err != nil {
			t.Fatal(err)
		}
		work := policies[0].Definition
		if _, got := work["delayed-retry-type"]; got != want {
			t.Errorf("policies for %s have delayed retry: %t, want %t", version, got, want)
		}
		if work["delivery-limit"] != float64(20) {
			t.Errorf("policies for %s: delivery limit %v, want 20", version, work["delivery-limit"])
		}
	}
	policies, err := policiesFor("3.10.8", []string{"a.b", "c"})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{`^(a\.b|c)$`, `^(a\.b|c)\.parked$`} {
		if got := policies[i].Pattern; got != want {
			t.Errorf("pattern %s, want %s", got, want)
		}
	}
}
