package amqp

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
	"backstep/internal/testenv"
)

// TestMissingExchange closes the channel: its messages are returned, its neighbours lost.
func TestMissingExchange(t *testing.T) {
	_, c, p := ordersPublisher(t, PublisherConfig{})
	before := session(t, c)
	for range 10 { // how many neighbours are acked before differs
		ch := acquire(t, p)
		var msgs []*message.Message
		for i := range 50 {
			m := command("orders")
			if i%10 == 9 {
				m.Exchange = "missing"
			}
			msgs = append(msgs, m)
		}
		sent := 0
		for i, m := range msgs {
			if err := ch.Publish(t.Context(), uint64(i), m); err != nil {
				if !errors.Is(err, ErrSessionGone) {
					t.Fatalf("Publish on a closed channel = %v, want ErrSessionGone", err)
				}
				break
			}
			sent++
		}
		if sent < 10 {
			t.Fatalf("only %d messages written", sent)
		}
		for tag, r := range results(t, ch, sent) {
			switch missing := msgs[tag].Exchange == "missing"; {
			case missing && r.Kind != message.Returned:
				t.Errorf("message to the missing exchange: %+v, want returned", r)
			case missing && !strings.Contains(r.Reason, "404 NOT_FOUND - no exchange 'missing'"):
				t.Errorf("reason %q does not say why", r.Reason)
			case !missing && r.Kind != message.Lost && r.Kind != message.Confirmed:
				t.Errorf("neighbour: %+v, want lost or confirmed", r)
			}
		}
		ch.Release() // is a Destroy
	}
	if session(t, c) != before {
		t.Error("the session went too")
	}
}

// TestForbiddenExchange is as TestMissingExchange, with 403.
func TestForbiddenExchange(t *testing.T) {
	b := testenv.Vhost(t)
	declare(t, start(t, Config{URL: b.URL}), "orders")
	c := start(t, Config{URL: b.User(t, "^$", "^amq\\.fanout$", "^$")})
	p := newPublisher(t, c, PublisherConfig{})
	for _, exchange := range []string{message.CommandsExchange, ""} {
		ch := acquire(t, p)
		m := command("orders")
		m.Exchange = exchange
		if r := result(t, ch, m); r.Kind != message.Returned || !strings.Contains(r.Reason, "403 ACCESS_REFUSED") {
			t.Errorf("forbidden exchange %q: %+v, want returned with the broker's 403", exchange, r)
		}
		ch.Destroy()
	}
}

// TestExchangeNames: whatever an exchange is called, the one the broker complains about is
// found. It cuts its text to 255 bytes, so of the longest names that does not hold all.
func TestExchangeNames(t *testing.T) {
	b := testenv.Vhost(t)
	may := start(t, Config{URL: b.URL})
	mayNot := start(t, Config{URL: b.User(t, "^$", "^amq\\.fanout$", "^$")})
	for _, exchange := range []string{
		"börse 名前 😀", "\xff\xfe\x00", "it's", "a' in vhost 'b", "%s ~p\n", "exchange 'x",
		strings.Repeat("x", 190), strings.Repeat("x", 215), strings.Repeat("x", 230), strings.Repeat("x", 255),
	} {
		for code, c := range map[string]*Client{"404": may, "403": mayNot} {
			ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
			neighbour, m := command("orders"), command("orders")
			neighbour.Exchange, neighbour.Mandatory, m.Exchange = "amq.fanout", false, exchange
			publish(t, ch, neighbour, m)
			for tag, r := range results(t, ch, 2) {
				switch {
				case tag == 1 && (r.Kind != message.Returned || !strings.Contains(r.Reason, code)):
					t.Errorf("exchange %q: %+v, want returned with the broker's %s", exchange, r, code)
				case tag == 0 && r.Kind != message.Lost && r.Kind != message.Confirmed:
					t.Errorf("neighbour of exchange %q: %+v, want lost or confirmed", exchange, r)
				}
			}
			ch.Destroy()
		}
	}
}

// TestPoison: the broker closes the channel over a message, and does not say which.
func TestPoison(t *testing.T) {
	_, _, p := ordersPublisher(t, PublisherConfig{})
	ch := acquire(t, p)
	defer ch.Destroy()
	m := command("orders")
	m.Expiration = "soon"
	if r := result(t, ch, m); r.Kind != message.Aborted || !strings.Contains(r.Reason, "406 PRECONDITION_FAILED") {
		t.Errorf("result %+v, want aborted with the broker's 406", r)
	}
}

// crashing is a message over which a channel crashes, and its connection with it. Publish would refuse it.
func crashing() amqp091.Publishing {
	return amqp091.Publishing{Headers: amqp091.Table{"n": math.NaN()}}
}

// TestCrash: a message that crashes its channel takes the connection along, with 541. That is
// not held against it if it is the broker that is going down.
func TestCrash(t *testing.T) {
	crash := func(t *testing.T, c *Client) message.Result {
		ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
		defer ch.Destroy()
		confirm, err := ch.ch.PublishWithDeferredConfirm("amq.fanout", "", false, false, crashing())
		if err != nil {
			t.Fatal(err)
		}
		if !ch.admit() || !ch.note(flight{confirm: confirm}) {
			t.Fatal("the channel ended first")
		}
		r := results(t, ch, 1)[0]
		if !strings.Contains(r.Reason, "541 INTERNAL_ERROR") {
			t.Errorf("reason %q does not say why", r.Reason)
		}
		return r
	}
	b := testenv.Vhost(t)
	t.Run("broker serves", func(t *testing.T) {
		if r := crash(t, start(t, Config{URL: b.URL})); r.Kind != message.Aborted {
			t.Errorf("result %v, want aborted", r.Kind)
		}
	})
	t.Run("broker is gone", func(t *testing.T) {
		first := true
		c := start(t, Config{URL: b.URL, OnSession: func(context.Context, *Session) error {
			if first {
				first = false
				return nil
			}
			return errors.New("as if there were no broker")
		}})
		if r := crash(t, c); r.Kind != message.Lost {
			t.Errorf("result %v, want lost", r.Kind)
		}
	})
}

// TestCrashAgainAndAgain: a broker that closes connections over messages is there, so it is not
// waited for as if it were not.
func TestCrashAgainAndAgain(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	const rounds = 15
	began := time.Now()
	for range rounds {
		s := session(t, c)
		ch, err := s.conn.Channel()
		if err != nil {
			t.Fatal(err)
		}
		if err := ch.Publish("amq.fanout", "", false, false, crashing()); err != nil {
			t.Fatal(err)
		}
		<-s.Done()
	}
	session(t, c)
	// With the waits of an outage it takes twice as long.
	if took := time.Since(began); took > 9*time.Second {
		t.Errorf("%d connections took %s", rounds, took)
	}
}

// TestConnectionClosedWhilePublishing: each message has its result, and no healthy one is blamed.
func TestConnectionClosedWhilePublishing(t *testing.T) {
	b, _, p := ordersPublisher(t, PublisherConfig{Window: 200})
	ch := acquire(t, p)
	closed := make(chan struct{})
	go func() { defer close(closed); b.CloseConnections(t) }()

	got := map[message.ResultKind]int{}
	var sent, settled uint64
	for limit := time.After(patience); ; {
		err := ch.Publish(t.Context(), sent, command("orders"))
		if err == nil {
			sent++
			continue
		}
		if !errors.Is(err, ErrWindowFull) {
			break
		}
		select {
		case r := <-ch.Results():
			settled++
			got[r.Kind]++
		case <-limit:
			t.Fatal("neither results nor the end of the connection")
		}
	}
	for range sent - settled {
		select {
		case r := <-ch.Results():
			got[r.Kind]++
		case <-time.After(patience):
			t.Fatalf("%d of %d results came", got, sent)
		}
	}
	if got[message.Confirmed]+got[message.Lost] != int(sent) {
		t.Errorf("%v of %d, want confirmed and lost only", got, sent)
	}
	ch.Destroy()
	<-closed

	ch = acquire(t, p)
	defer ch.Release()
	if r := result(t, ch, command("orders")); r.Kind != message.Confirmed {
		t.Errorf("on the next session: %+v, want confirmed", r)
	}
}

// TestEnd: what becomes of messages in flight, by their exchange, when their channel is closed.
func TestEnd(t *testing.T) {
	type kinds = map[string]message.ResultKind
	server := func(code int, reason string) *amqp091.Error {
		return &amqp091.Error{Code: code, Reason: reason, Server: true}
	}
	missing := server(404, "NOT_FOUND - no exchange 'a' in vhost '/'")
	tests := []struct {
		name string
		e    *amqp091.Error
		want kinds
	}{
		{"we closed it", nil, kinds{"a": message.Lost}},
		{"socket", &amqp091.Error{Code: 501, Reason: "EOF"}, kinds{"a": message.Lost}},
		{"shutdown", server(320, "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'"), kinds{"a": message.Lost}},
		{"missing", missing, kinds{"a": message.Returned, "b": message.Lost, "": message.Lost, "aa": message.Lost}},
		{"missing, and acked before", missing, kinds{"b": message.Aborted}},
		{"forbidden", server(403, "ACCESS_REFUSED - access to exchange 'amq.default' in vhost '/' refused for user 'x'"),
			kinds{"": message.Returned, "a": message.Lost}},
		{"forbidden topic", server(403, "ACCESS_REFUSED - access to topic 'k' in exchange 'a' in vhost '/' refused for user 'x'"),
			kinds{"a": message.Returned, "b": message.Lost}},
		{"frame", server(501, "FRAME_ERROR"), kinds{"a": message.Aborted}},
		{"precondition", server(406, "PRECONDITION_FAILED - invalid expiration"), kinds{"a": message.Aborted}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := flights{confirmer: &confirmer{results: make(chan message.Result, len(tt.want))}}
			tags := map[uint64]string{}
			for exchange := range tt.want {
				tag := uint64(len(tags))
				tags[tag] = exchange
				f.pending = append(f.pending, flight{tag: tag, key: returnKey{exchange: exchange}, confirm: &amqp091.DeferredConfirmation{}})
			}
			f.end(tt.e)
			for range tt.want {
				r := <-f.results
				if got, want := r.Kind, tt.want[tags[r.Tag]]; got != want {
					t.Errorf("message to exchange %q is %v, want %v", tags[r.Tag], got, want)
				}
			}
		})
	}
}
