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

func TestPublishConfirmed(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	p := newPublisher(t, c, PublisherConfig{Window: 100})
	ch := acquire(t, p)
	for round := range 3 { // Results and window are the same after each
		for i := range 100 {
			if err := ch.Publish(t.Context(), uint64(i), command("orders")); err != nil {
				t.Fatal(err)
			}
		}
		if err := ch.Publish(t.Context(), 100, command("orders")); !errors.Is(err, ErrWindowFull) {
			t.Fatalf("Publish into a full window = %v, want ErrWindowFull", err)
		}
		if got := kinds(results(t, ch, 100)); got[message.Confirmed] != 100 {
			t.Errorf("round %d: %v, want 100 confirmed", round, got)
		}
	}
	ch.Release()
	ch.Destroy() // does nothing after Release
	if got := acquire(t, p); got.confirmer != ch.confirmer {
		t.Error("a released channel is not used again")
	} else {
		got.Release()
	}
	if ready, _ := b.Queue(t, "orders"); ready != 300 {
		t.Errorf("%d messages are in the queue, want 300", ready)
	}
}

// TestPublishIsPersistent unless the message says otherwise.
func TestPublishIsPersistent(t *testing.T) {
	for mode, want := range map[uint8]uint8{0: 2, 1: 1, 2: 2} {
		p, err := publishing(&message.Message{Properties: message.Properties{DeliveryMode: mode}}, 0)
		if err != nil || p.DeliveryMode != want {
			t.Errorf("mode %d is written as %d, %v, want %d", mode, p.DeliveryMode, err, want)
		}
	}
}

// TestWholeWindowReturned: as many returns as the window holds, and nobody reads.
func TestWholeWindowReturned(t *testing.T) {
	const window = 500
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c)
	ch := acquire(t, newPublisher(t, c, PublisherConfig{Window: window}))
	defer ch.Release()
	for i := range window {
		if err := ch.Publish(t.Context(), uint64(i), command("nowhere")); err != nil {
			t.Fatal(err)
		}
	}
	got := results(t, ch, window)
	if n := kinds(got); n[message.Returned] != window {
		t.Errorf("%v, want %d returned", n, window)
	}
	const want = `exchange "backstep.commands", routing key "nowhere": returned: 312 NO_ROUTE`
	if got[0].Reason != want {
		t.Errorf("reason %q, want %q", got[0].Reason, want)
	}
}

// TestReturnsAmongConfirms mixes routable and unroutable messages, with ids, with equal ids
// and without.
func TestReturnsAmongConfirms(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	ch := acquire(t, newPublisher(t, c, PublisherConfig{Window: 1000}))
	defer ch.Release()
	var msgs []*message.Message
	var want []message.ResultKind
	for i := range 900 {
		m, kind := command("orders"), message.Confirmed
		if i%3 == 0 {
			m, kind = command("nowhere"), message.Returned
		}
		switch i % 5 {
		case 0:
			m.MessageID = "same"
		case 1:
			m.MessageID, m.Body = "", []byte{byte(i), byte(i >> 8)}
		case 2:
			if kind == message.Returned {
				m.Mandatory, kind = false, message.Confirmed // nobody asked for it back
			}
		}
		msgs, want = append(msgs, m), append(want, kind)
	}
	publish(t, ch, msgs...)
	for tag, r := range results(t, ch, len(msgs)) {
		if r.Kind != want[tag] {
			t.Errorf("message %d with key %q is %v, want %v", tag, msgs[tag].RoutingKey, r.Kind, want[tag])
		}
	}
}

// TestEqualMessagesOneReturned: the binding goes between two copies. One result says so.
func TestEqualMessagesOneReturned(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
	defer ch.Release()
	m := command("orders")
	publish(t, ch, m)
	first := results(t, ch, 1)[0]
	b.Unbind(t, message.CommandsExchange, "orders", "orders")
	publish(t, ch, m)
	second := results(t, ch, 1)[0]
	if first.Kind != message.Confirmed || second.Kind != message.Returned {
		t.Errorf("results %v and %v, want confirmed and returned", first.Kind, second.Kind)
	}
}

func TestNackByFullQueue(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c)
	queueWith(t, c, "full", amqp091.Table{"x-queue-type": "quorum", "x-max-length": int32(1), "x-overflow": "reject-publish"})
	ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
	defer ch.Release()
	// A quorum queue lets a few through before it notices that it is full.
	for i := range uint64(patience / time.Millisecond) {
		if err := ch.Publish(t.Context(), i, command("full")); err != nil {
			t.Fatal(err)
		}
		r := results(t, ch, 1)[i]
		if r.Kind == message.Confirmed {
			continue
		}
		if r.Kind != message.Nacked || !strings.Contains(r.Reason, `routing key "full"`) {
			t.Errorf("result %+v, want nacked with its routing key", r)
		}
		return
	}
	t.Error("never nacked")
}

// TestMissingExchange closes the channel: its messages are returned, its neighbours lost.
func TestMissingExchange(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	before := session(t, c)
	p := newPublisher(t, c, PublisherConfig{})
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
		publish(t, ch, m)
		if r := results(t, ch, 1)[0]; r.Kind != message.Returned || !strings.Contains(r.Reason, "403 ACCESS_REFUSED") {
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
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
	defer ch.Destroy()
	m := command("orders")
	m.Expiration = "soon"
	publish(t, ch, m)
	if r := results(t, ch, 1)[0]; r.Kind != message.Aborted || !strings.Contains(r.Reason, "406 PRECONDITION_FAILED") {
		t.Errorf("result %+v, want aborted with the broker's 406", r)
	}
}

// TestCrash: a message that crashes its channel takes the connection along, with 541. That is
// not held against it if it is the broker that is going down.
func TestCrash(t *testing.T) {
	crash := func(t *testing.T, c *Client) message.Result {
		ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
		defer ch.Destroy()
		// Publish would refuse it.
		nan := amqp091.Publishing{Headers: amqp091.Table{"n": math.NaN()}}
		confirm, err := ch.ch.PublishWithDeferredConfirm("amq.fanout", "", false, false, nan)
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
		nan := amqp091.Publishing{Headers: amqp091.Table{"n": math.NaN()}} // Publish would refuse it
		if err := ch.Publish("amq.fanout", "", false, false, nan); err != nil {
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
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	p := newPublisher(t, c, PublisherConfig{Window: 200})
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
	publish(t, ch, command("orders"))
	if r := results(t, ch, 1)[0]; r.Kind != message.Confirmed {
		t.Errorf("on the next session: %+v, want confirmed", r)
	}
}

// TestLateConfirmHoldsUpNobody: a message whose confirm does not come is the oldest.
func TestLateConfirmHoldsUpNobody(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
	if !ch.admit() || !ch.note(flight{tag: 7, confirm: &amqp091.DeferredConfirmation{}}) {
		t.Fatal("the channel has ended")
	}
	msgs := []*message.Message{command("orders"), command("nowhere"), command("orders")}
	for range 3 {
		publish(t, ch, msgs...)
		got := results(t, ch, 3)
		if got[0].Kind != message.Confirmed || got[1].Kind != message.Returned || got[2].Kind != message.Confirmed {
			t.Errorf("results %v, want confirmed, returned, confirmed", got)
		}
	}
	ch.Destroy()
	if r := results(t, ch, 1)[7]; r.Kind != message.Lost {
		t.Errorf("after Destroy the late one is %+v, want lost", r)
	}
}

// TestRefused: nothing is written, the channel goes on.
func TestRefused(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
	defer ch.Release()
	m := command("orders")
	m.Headers = message.Headers{"h": strings.Repeat("x", 70000)}
	if err := ch.Publish(t.Context(), 0, m); !errors.Is(err, ErrRefused) {
		t.Errorf("Publish = %v, want ErrRefused", err)
	}
	publish(t, ch, command("orders"))
	if r := results(t, ch, 1)[0]; r.Kind != message.Confirmed {
		t.Errorf("after a refused message: %+v, want confirmed", r)
	}
}

// TestReleaseInDoubt: what is in flight is nobody else's business.
func TestReleaseInDoubt(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	p := newPublisher(t, c, PublisherConfig{Channels: 1})
	ch := acquire(t, p)
	publish(t, ch, command("orders"))
	ch.Release()
	next := acquire(t, p)
	defer next.Release()
	if next.confirmer == ch.confirmer {
		t.Error("a channel with a message in flight was handed on")
	}
}

func TestAcquireWaitsForAFreeChannel(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	p := newPublisher(t, c, PublisherConfig{Channels: 1})
	ch := acquire(t, p)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := p.Acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Acquire = %v, want the context's error", err)
	}
	ch.Release()
	acquire(t, p).Release()
	if s := p.Stat(); s.Idle != 1 || s.Acquired != 0 || s.Max != 1 {
		t.Errorf("Stat = %+v", s)
	}
}

func TestAcquireAfterClose(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	p := NewPublisher(c, PublisherConfig{})
	p.Close()
	if _, err := p.Acquire(within(t)); !errors.Is(err, ErrStopped) {
		t.Errorf("Acquire = %v, want ErrStopped", err)
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
