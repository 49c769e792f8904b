package amqp

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/testenv"
)

func TestPublishConfirmed(t *testing.T) {
	b, _, p := ordersPublisher(t, PublisherConfig{Window: 100})
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

// TestRefused: nothing is written, the channel goes on.
func TestRefused(t *testing.T) {
	_, _, p := ordersPublisher(t, PublisherConfig{})
	ch := acquire(t, p)
	defer ch.Release()
	m := command("orders")
	m.Headers = message.Headers{"h": strings.Repeat("x", 70000)}
	if err := ch.Publish(t.Context(), 0, m); !errors.Is(err, ErrRefused) {
		t.Errorf("Publish = %v, want ErrRefused", err)
	}
	if r := result(t, ch, command("orders")); r.Kind != message.Confirmed {
		t.Errorf("after a refused message: %+v, want confirmed", r)
	}
}

// TestReleaseInDoubt: what is in flight is nobody else's business.
func TestReleaseInDoubt(t *testing.T) {
	_, _, p := ordersPublisher(t, PublisherConfig{Channels: 1})
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
