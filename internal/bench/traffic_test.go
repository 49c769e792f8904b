package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/testenv"
)

// queue makes a quorum queue on a virtual host of the test's own.
func queue(t *testing.T, name string) *testenv.Broker {
	t.Helper()
	b := testenv.Vhost(t)
	conn, ch, err := dial(b.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	args := amqp091.Table{amqp091.QueueTypeArg: amqp091.QueueTypeQuorum}
	if _, err := ch.QueueDeclare(name, true, false, false, false, args); err != nil {
		t.Fatal(err)
	}
	return b
}

func sender(t *testing.T, b *testenv.Broker) *Sender {
	t.Helper()
	s, err := NewSender(b.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func TestSenderToReceiver(t *testing.T) {
	for _, prefetch := range []int{0, 10} {
		t.Run(fmt.Sprintf("prefetch %d", prefetch), func(t *testing.T) {
			b := queue(t, "q")
			s := sender(t, b)
			r, err := NewReceiver(b.URL, "q", prefetch)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			for i := range 30 {
				want, before := fmt.Sprint(i), time.Now()
				if err := s.Send("", "q", want, Body(400)); err != nil {
					t.Fatal(err)
				}
				if err := s.Settle(t.Context()); err != nil {
					t.Fatal(err)
				}
				id, at, err := r.Next(t.Context())
				if err != nil || id != want || at.Before(before) || at.After(time.Now()) {
					t.Fatalf("got %q at %s, %v; want %q after %s", id, at, err, want, before)
				}
			}
		})
	}
}

func TestReceiverEnds(t *testing.T) {
	b := queue(t, "q")
	r, err := NewReceiver(b.URL, "q", 1)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := r.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Next of an ended context: %v", err)
	}
	r.Close()
	if _, _, err := r.Next(t.Context()); err == nil {
		t.Error("Next after Close gave a message")
	}
	if _, err := NewReceiver(b.URL, "missing", 1); err == nil || !strings.Contains(err.Error(), `"missing"`) {
		t.Errorf("consumed a queue that is not there: %v", err)
	}
}

func TestFlood(t *testing.T) {
	for _, window := range []int{1, 7, 1000} {
		t.Run(fmt.Sprintf("window %d", window), func(t *testing.T) {
			b := queue(t, "q")
			var told []int
			f := Flood{Key: "q", Body: Body(400), Messages: 50, Window: window, Confirmed: func(n int) { told = append(told, n) }}
			took, err := f.Run(t.Context(), sender(t, b))
			if err != nil || took <= 0 {
				t.Fatalf("took %s, %v", took, err)
			}
			if n := b.Purge(t, "q"); n != 50 {
				t.Errorf("%d messages in the queue, want 50", n)
			}
			if len(told) != 50/window || !slices.IsSorted(told) {
				t.Errorf("told of %v", told)
			}
		})
	}
}

func TestFloodFails(t *testing.T) {
	b := queue(t, "q")
	f := Flood{Key: "nowhere", Body: Body(400), Messages: 5, Window: 5}
	if _, err := f.Run(t.Context(), sender(t, b)); err == nil || !strings.Contains(err.Error(), "returned") {
		t.Errorf("unroutable: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f.Key = "q"
	if _, err := f.Run(ctx, sender(t, b)); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

func TestPace(t *testing.T) {
	var done []int
	err := Pace(t.Context(), time.Millisecond, 5, func(i int) error { done = append(done, i); return nil })
	if err != nil || !slices.Equal(done, []int{0, 1, 2, 3, 4}) {
		t.Errorf("did %v, %v", done, err)
	}
	wrong := errors.New("wrong")
	n := 0
	err = Pace(t.Context(), time.Millisecond, 5, func(int) error { n++; return wrong })
	if !errors.Is(err, wrong) || n != 1 {
		t.Errorf("after an error: %v, %d calls", err, n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Pace(ctx, time.Hour, 5, func(int) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

func TestBody(t *testing.T) {
	for _, size := range []int{10, 11, 400} {
		if b := Body(size); len(b) != size || !json.Valid(b) {
			t.Errorf("Body(%d) is %s", size, b)
		}
	}
}
