package amqp

import (
	"context"
	"testing"
	"time"

	"backstep/internal/testenv"
)

// runBell runs a bell on a client of its own until the test ends.
func runBell(t *testing.T, url string) *Bell {
	t.Helper()
	b := NewBell(start(t, Config{URL: url, Name: "bell"}))
	session(t, b.client)
	untilEnd(t, b.Run)
	return b
}

// listen runs a listener until the test ends and returns what it hears.
func listen(t *testing.T, c *Client) <-chan uint16 {
	t.Helper()
	heard := make(chan uint16, 1000)
	untilEnd(t, func(ctx context.Context) error {
		return c.Listen(ctx, func(shards uint16) { heard <- shards })
	})
	return heard
}

// untilEnd runs run in the background and ends it before what the test started earlier.
func untilEnd(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("ended with %v, want nil", err)
		}
	})
}

// ringUntil rings for shards until somebody hears all of them.
func ringUntil(t *testing.T, b *Bell, shards uint16, heard <-chan uint16) {
	t.Helper()
	var got uint16
	again := time.NewTicker(10 * time.Millisecond) // nobody may be listening yet
	defer again.Stop()
	limit := time.After(patience)
	b.Ring(shards)
	for {
		select {
		case s := <-heard:
			if got |= s; got&shards == shards {
				return
			}
		case <-again.C:
			b.Ring(shards)
		case <-limit:
			t.Fatalf("heard %016b of %016b", got, shards)
		}
	}
}

func TestBell(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c)
	bell := runBell(t, b.URL)
	one, two := listen(t, c), listen(t, c)
	ringUntil(t, bell, 0x8001, one)
	ringUntil(t, bell, 0x0180, two)

	// A thousand rings in no time are a few messages.
	ringUntil(t, bell, 1<<5, one)
	for len(one) > 0 {
		<-one
	}
	for range 1000 {
		bell.Ring(1)
	}
	ringUntil(t, bell, 1<<6, one)
	if n := len(one); n > 500 {
		t.Errorf("%d rings came of 1000 in a row", n)
	}
}

// A process that rings once and ends is heard.
func TestRingOnce(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	bell := NewBell(start(t, Config{URL: b.URL}))
	session(t, bell.client)
	if err := bell.RingOnce(t.Context(), 1); err == nil {
		t.Error("no error, and no exchange")
	}
	declare(t, c)
	heard := listen(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for len(heard) == 0 { // nobody may be listening yet
		if err := bell.RingOnce(ctx, 0x8001); err != nil {
			t.Fatal(err)
		}
	}
	if s := <-heard; s != 0x8001 {
		t.Errorf("heard %016b", s)
	}
}

// TestBellWithTheRightsOfAWorkerAndARelay and no more.
func TestBellRights(t *testing.T) {
	b := testenv.Vhost(t)
	declare(t, start(t, Config{URL: b.URL}))
	bell := runBell(t, b.User(t, "^$", "^backstep\\.wake$", "^$"))
	const own = "^backstep\\.wake\\."
	heard := listen(t, start(t, Config{URL: b.User(t, own, own, "^backstep\\.wake(\\.|$)")}))
	ringUntil(t, bell, 1, heard)
}

func TestBellAfterReconnect(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	declare(t, c)
	bell := runBell(t, b.URL)
	heard := listen(t, c)
	ringUntil(t, bell, 1, heard)
	old, oldBell := session(t, c), session(t, bell.client)
	b.CloseConnections(t)
	<-old.Done()
	<-oldBell.Done()
	for all := false; !all; {
		select {
		case s := <-heard: // something may have been missed
			all = s == AllShards
		case <-time.After(patience):
			t.Fatal("no ring for all shards when the connection was lost")
		}
	}
	ringUntil(t, bell, 2, heard)
}

// TestRingNeverWaits: not without a broker either.
func TestRingNeverWaits(t *testing.T) {
	c, err := New(Config{URL: "amqp://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	b := NewBell(c)
	for range 10 {
		b.Ring(1)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := b.Run(ctx); err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
}
