package amqp

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/testenv"
)

func TestSubscribeToMissingQueue(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	_, err := NewConsumer(c, "test").Subscribe(within(t), "nowhere", 1)
	if err == nil || !strings.Contains(err.Error(), `"nowhere"`) || !strings.Contains(err.Error(), "404") {
		t.Errorf("Subscribe = %v, want an error naming the queue and the broker's 404", err)
	}
}

func TestSubscribeWaitsForASession(t *testing.T) {
	c, err := New(Config{URL: "amqp://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := NewConsumer(c, "test").Subscribe(ctx, "orders", 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Subscribe = %v, want the context's error", err)
	}
}

func TestConsumerTagFits(t *testing.T) {
	c := NewConsumer(nil, "backstep@"+strings.Repeat("h", 300))
	one, two := c.nextTag("orders"), c.nextTag("orders")
	if len(one) != 255 || one == two {
		t.Errorf("tags of %d bytes, equal %t", len(one), one == two)
	}
	if got := NewConsumer(nil, "backstep@host").nextTag("orders"); got != "backstep@host.orders-1" {
		t.Errorf("tag %q", got)
	}
}

// TestPrefetchBoundsDeliveries: no more come than prefetch allows, until they are acked.
func TestPrefetchBoundsDeliveries(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	fill(t, c, "orders", 10)
	sub := subscribe(t, c, "orders", 4)
	var last uint64
	for range 4 {
		last = receive(t, sub).Tag
	}
	// Another consumer gets the rest, so the broker has decided that the first gets no more.
	other := subscribe(t, c, "orders", 10)
	for i := 4; i < 10; i++ {
		if d := receive(t, other); string(d.Body) != fmt.Sprint(i) {
			t.Errorf("the other consumer got %s, want %d", d.Body, i)
		}
	}
	if len(sub.Deliveries()) > 0 {
		t.Error("a fifth delivery came with prefetch 4")
	}
	if err := sub.Ack(last, true); err != nil {
		t.Error(err)
	}
}

func TestNackDeadLetters(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	fill(t, c, "orders", 1)
	sub := subscribe(t, c, "orders", 1)
	d := receive(t, sub)
	if err := sub.Nack(d.Tag, false, true); err != nil {
		t.Fatal(err)
	}
	if d = receive(t, sub); !d.Redelivered {
		t.Error("after a requeue the delivery does not say redelivered")
	}
	if err := sub.Nack(d.Tag, false, false); err != nil {
		t.Fatal(err)
	}
	parked := subscribe(t, c, ParkedQueue("orders"), 1)
	if d := receive(t, parked); string(d.Body) != "0" || d.Headers["x-death"] == nil {
		t.Errorf("parked: body %s, headers %v", d.Body, d.Headers)
	}
}

// TestReopen changes the prefetch again and again; each message is delivered once.
func TestReopen(t *testing.T) {
	const total = 2000
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	fill(t, c, "orders", total)
	sub := subscribe(t, c, "orders", 1)
	prefetch := 1
	seen := map[string]bool{}
	for i := range uint64(total) {
		d := receive(t, sub)
		if d.Tag != i+1 {
			t.Fatalf("delivery %d has tag %d", i+1, d.Tag)
		}
		if seen[string(d.Body)] {
			t.Fatalf("message %s came twice", d.Body)
		}
		seen[string(d.Body)] = true
		if i%50 == 10 {
			prefetch = prefetch%7 + 1
			if err := sub.Reopen(t.Context(), prefetch); err != nil {
				t.Fatal(err)
			}
		}
		if err := sub.Ack(d.Tag, true); err != nil {
			t.Fatal(err)
		}
	}
	if err := sub.Close(); err != nil {
		t.Error(err)
	}
	if ready, _ := b.Queue(t, "orders"); ready != 0 {
		t.Errorf("%d messages are left", ready)
	}
}

// TestReopenKeepsOrder if nothing can be on its way to the old consumer.
func TestReopenKeepsOrder(t *testing.T) {
	const total = 200
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	fill(t, c, "orders", total)
	sub := subscribe(t, c, "orders", 1)
	for i := range total {
		d := receive(t, sub)
		if string(d.Body) != fmt.Sprint(i) || d.Redelivered {
			t.Fatalf("delivery %d is message %s, redelivered %t", i, d.Body, d.Redelivered)
		}
		if i == 0 {
			if err := sub.Reopen(t.Context(), 10); err != nil {
				t.Fatal(err)
			}
		}
		if err := sub.Ack(d.Tag, true); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReopenTwice without anybody reading in between.
func TestReopenTwice(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	fill(t, c, "orders", 6)
	sub := subscribe(t, c, "orders", 1)
	for _, prefetch := range []int{2, 3} {
		if err := sub.Reopen(t.Context(), prefetch); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[string]bool{}
	for i := range uint64(6) {
		d := receive(t, sub)
		if d.Tag != i+1 || seen[string(d.Body)] {
			t.Errorf("delivery %d is message %s with tag %d, seen before %t", i+1, d.Body, d.Tag, seen[string(d.Body)])
		}
		seen[string(d.Body)] = true
		if err := sub.Ack(d.Tag, false); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReopenGivenUp: whoever stops while the prefetch is being changed still gets the end of the
// deliveries, and what is left in the queue stays there.
func TestReopenGivenUp(t *testing.T) {
	for name, giveUp := range map[string]func(*Subscription, context.Context, func()) error{
		"before it began": func(sub *Subscription, ctx context.Context, stop func()) error {
			stop()
			return sub.Reopen(ctx, 10)
		},
		"before the broker answered": func(sub *Subscription, ctx context.Context, stop func()) error {
			sub.op.Lock() // as while an earlier question has no answer
			defer sub.op.Unlock()
			reopened := make(chan error)
			go func() { reopened <- sub.Reopen(ctx, 10) }()
			stop()
			return <-reopened
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := testenv.Vhost(t)
			c := start(t, Config{URL: b.URL})
			declare(t, c, "orders")
			fill(t, c, "orders", 50)
			sub := subscribe(t, c, "orders", 1)
			first := receive(t, sub)
			ctx, stop := context.WithCancel(within(t))
			if err := giveUp(sub, ctx, stop); !errors.Is(err, context.Canceled) {
				t.Errorf("Reopen = %v, want context.Canceled", err)
			}
			if err := sub.Err(); err != nil {
				t.Errorf("Err = %v, want nil: it goes on", err)
			}
			if err := sub.Cancel(); err != nil {
				t.Error(err)
			}
			for _, d := range awaitEnd(t, sub) {
				if err := sub.Nack(d.Tag, false, true); err != nil {
					t.Error(err)
				}
			}
			if err := sub.Ack(first.Tag, false); err != nil {
				t.Error(err)
			}
			if err := sub.Close(); err != nil {
				t.Error(err)
			}
			if ready := awaitDepth(t, c, "orders", 49); ready != 49 {
				t.Errorf("%d messages are left, want 49", ready)
			}
		})
	}
}

func TestReopenAfterQueueIsGone(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	sub := subscribe(t, c, "orders", 1)
	b.DeleteQueue(t, "orders")
	awaitEnd(t, sub)
	if err := sub.Reopen(t.Context(), 2); !errors.Is(err, ErrConsumerCancelled) {
		t.Errorf("Reopen = %v, want ErrConsumerCancelled", err)
	}
}

// TestCancel: what had arrived still comes and can be acked, nothing new does.
func TestCancel(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	fill(t, c, "orders", 5)
	sub := subscribe(t, c, "orders", 3)
	first := receive(t, sub)
	for range 2 {
		if err := sub.Cancel(); err != nil { // the second time it does nothing
			t.Fatal(err)
		}
	}
	last := first
	for _, d := range awaitEnd(t, sub) {
		last = d
	}
	if last.Tag > 3 {
		t.Errorf("tag %d came with prefetch 3", last.Tag)
	}
	if err := sub.Err(); err != nil {
		t.Errorf("Err after Cancel = %v, want nil", err)
	}
	if err := sub.Ack(first.Tag, false); err != nil {
		t.Errorf("Ack after Cancel = %v", err)
	}
	if err := sub.Close(); err != nil {
		t.Error(err)
	}
	again := subscribe(t, c, "orders", 10)
	seen := map[string]bool{}
	for range 4 { // what was not acked
		seen[string(receive(t, again).Body)] = true
	}
	if seen[string(first.Body)] {
		t.Error("the message acked after Cancel came again")
	}
	if err := sub.Ack(last.Tag, false); !errors.Is(err, ErrSessionGone) {
		t.Errorf("Ack after Close = %v, want ErrSessionGone", err)
	}
}

// TestQueueDeleted: the broker cancels the consumer.
func TestQueueDeleted(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	sub := subscribe(t, c, "orders", 3)
	b.DeleteQueue(t, "orders")
	awaitEnd(t, sub)
	if err := sub.Err(); !errors.Is(err, ErrConsumerCancelled) || !strings.Contains(err.Error(), `"orders"`) {
		t.Errorf("Err = %v, want ErrConsumerCancelled naming the queue", err)
	}
}

// TestDeletedQueueIsDeclaredAgain, where that is what a session is set up with, when somebody
// subscribes to it.
func TestDeletedQueueIsDeclaredAgain(t *testing.T) {
	b := testenv.Vhost(t)
	topology := Topology{Queues: []string{"orders"}}
	c := start(t, Config{URL: b.URL, OnSession: topology.Ensure})
	before := session(t, c)
	for _, name := range []string{"orders", "orders.parked"} {
		b.DeleteQueue(t, name)
	}
	sub := subscribe(t, c, "orders", 1)
	fill(t, c, "orders", 1) // it is bound, too
	receive(t, sub)
	if session(t, c) != before {
		t.Error("the session went")
	}
	// One that does not belong to it stays missing.
	if _, err := NewConsumer(c, "test").Subscribe(within(t), "nowhere", 1); !isCode(err, amqp091.NotFound) {
		t.Errorf("Subscribe = %v, want the broker's 404", err)
	}
}

// TestChannelClosedByBroker: acking a tag twice costs the channel, not the session.
func TestChannelClosedByBroker(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	before := session(t, c)
	sub := subscribe(t, c, "orders", 3)
	if err := sub.Ack(7, false); err != nil {
		t.Fatal(err)
	}
	awaitEnd(t, sub)
	if err := sub.Err(); !errors.Is(err, ErrSessionGone) || !strings.Contains(err.Error(), "406") {
		t.Errorf("Err = %v, want ErrSessionGone with the broker's 406", err)
	}
	if session(t, c) != before {
		t.Error("the session went too")
	}
}

// TestCloseWhileNobodyReads: more has arrived than Deliveries holds.
func TestCloseWhileNobodyReads(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")
	fill(t, c, "orders", 2*minArrived)
	sub := subscribe(t, c, "orders", minArrived)
	if err := sub.Reopen(t.Context(), 2*minArrived); err != nil {
		t.Fatal(err)
	}
	for ctx := within(t); len(sub.Deliveries()) < minArrived; {
		if ctx.Err() != nil {
			t.Fatal("Deliveries did not fill")
		}
	}
	if err := sub.Close(); err != nil {
		t.Error(err)
	}
	if rest := awaitEnd(t, sub); len(rest) > 0 {
		t.Errorf("%d deliveries came after Close", len(rest))
	}
	if err := sub.Err(); err != nil {
		t.Errorf("Err after Close = %v, want nil", err)
	}
}
