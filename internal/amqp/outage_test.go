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

// until waits until cond holds, looking again whenever the client's state changes.
func until(t testing.TB, c *Client, cond func() bool) {
	t.Helper()
	limit := time.After(patience)
	for {
		c.mu.Lock()
		changed := c.changed
		c.mu.Unlock()
		if cond() {
			return
		}
		select {
		case <-changed:
		case <-limit:
			t.Fatalf("state is still %q", c.State())
		}
	}
}

// TestOutages uses a broker of its own, to set off alarms and to stop it.
func TestOutages(t *testing.T) {
	s := testenv.Private(t)
	b := s.Vhost(t)
	alarm := func(t *testing.T, on bool) {
		t.Helper()
		limit := "0.4"
		if on {
			limit = "0.00001"
		}
		if _, err := s.Rabbitmqctl(within(t), "set_vm_memory_high_watermark", limit); err != nil {
			t.Fatal(err)
		}
	}
	c := start(t, Config{URL: b.URL})
	declare(t, c, "orders")

	t.Run("blocked", func(t *testing.T) {
		alarm(t, true)
		p := newPublisher(t, c, PublisherConfig{})
		ch := acquire(t, p)
		defer ch.Release()
		publish(t, ch, command("orders")) // it takes a publish for the broker to block
		until(t, c, func() bool { return !c.Ready() })
		if state := c.State(); !strings.Contains(state, "blocked by the broker: low on memory") {
			t.Errorf("state %q", state)
		}
		alarm(t, false)
		until(t, c, c.Ready)
		if r := results(t, ch, 1)[0]; r.Kind != message.Confirmed {
			t.Errorf("after the alarm: %+v, want confirmed", r)
		}
	})

	// The broker reads no farewell either from who has published, so nobody may wait for its answer.
	t.Run("nobody waits for an answer", func(t *testing.T) {
		c := start(t, Config{URL: b.URL})
		declare(t, c)
		ctx, stop := context.WithCancel(context.Background())
		defer stop()
		heard, ended := make(chan uint16, 1000), make(chan error, 1)
		go func() { ended <- c.Listen(ctx, func(shards uint16) { heard <- shards }) }()
		ringUntil(t, runBell(t, b.URL), 1, heard)
		alarm(t, true)
		defer alarm(t, false)
		ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
		defer ch.Destroy()
		publish(t, ch, command("orders"))
		until(t, c, func() bool { return !c.Ready() })
		stop()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Listen = %v, want nil", err)
			}
		case <-time.After(patience):
			t.Error("Listen waits for the broker")
		}
		short, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		defer cancel()
		rung := make(chan error, 1)
		go func() { rung <- NewBell(c).RingOnce(short, 1) }()
		select {
		case err := <-rung:
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("RingOnce = %v, want its context's error", err)
			}
		case <-time.After(patience):
			t.Error("RingOnce waits for the broker")
		}
	})

	// The broker reads nothing, the socket fills up, Publish waits in it.
	stuff := func(ctx context.Context, ch *ConfirmChannel) (sent uint64, err error) {
		m := command("orders")
		m.Body = make([]byte, 1<<20)
		for {
			if err := ch.Publish(ctx, sent, m); err != nil {
				return sent, err
			}
			sent++
		}
	}
	t.Run("write times out", func(t *testing.T) {
		c := start(t, Config{URL: b.URL, WriteTimeout: 500 * time.Millisecond})
		old := session(t, c)
		ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
		defer ch.Destroy()
		alarm(t, true)
		defer alarm(t, false)
		sent, err := stuff(context.Background(), ch)
		if err == nil || errors.Is(err, ErrWindowFull) {
			t.Fatalf("Publish into a blocked socket = %v after %d messages", err, sent)
		}
		if got := kinds(results(t, ch, int(sent))); got[message.Lost] != int(sent) {
			t.Errorf("%v of %d, want all lost", got, sent)
		}
		<-old.Done()
		session(t, c) // connecting is possible under an alarm
	})
	t.Run("Publish gives up with its context", func(t *testing.T) {
		c := start(t, Config{URL: b.URL})
		old := session(t, c)
		ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
		defer ch.Destroy()
		alarm(t, true)
		defer alarm(t, false)
		ctx, giveUp := context.WithCancel(context.Background())
		defer giveUp()
		began := time.Now()
		time.AfterFunc(3*time.Second, giveUp) // the socket has long been full
		if _, err := stuff(ctx, ch); err == nil {
			t.Error("Publish into a blocked socket gave nil")
		}
		if took := time.Since(began); took > 15*time.Second {
			t.Errorf("Publish gave up after %s", took) // half the write time-out
		}
		<-old.Done()
	})
	t.Run("Run ends while Publish waits", func(t *testing.T) {
		alarm(t, true)
		defer alarm(t, false)
		c, err := New(Config{URL: b.URL})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		ran := make(chan error, 1)
		go func() { ran <- c.Run(ctx) }()
		p := NewPublisher(c, PublisherConfig{})
		ch := acquire(t, p)
		stuffed := make(chan struct{})
		go func() { defer close(stuffed); _, _ = stuff(context.Background(), ch) }()
		until(t, c, func() bool { return !c.Ready() })
		began := time.Now()
		cancel()
		if err := <-ran; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
		if took := time.Since(began); took > closeTimeout+5*time.Second {
			t.Errorf("Run took %v to end", took)
		}
		<-stuffed
		ch.Destroy()
		p.Close()
	})
	t.Run("restart", func(t *testing.T) {
		old := session(t, c)
		sub := subscribe(t, c, "orders", 1)
		if err := s.RestartBroker(t.Context()); err != nil { // how long a server takes to start is its own affair
			t.Fatal(err)
		}
		<-old.Done()
		awaitEnd(t, sub)
		fill(t, c, "orders", 10) // waits for the next session
	})
	t.Run("kill", func(t *testing.T) {
		old := session(t, c)
		if err := s.KillBroker(); err != nil {
			t.Fatal(err)
		}
		<-old.Done()
		until(t, c, func() bool { return strings.Contains(c.State(), "refused") })
		if err := s.StartBroker(t.Context()); err != nil { // likewise
			t.Fatal(err)
		}
		fill(t, c, "orders", 10)
	})
}
