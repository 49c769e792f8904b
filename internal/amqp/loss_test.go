package amqp

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/testenv"
)

// TestConfirmedIsInAQueue: while connections are cut and the binding comes and goes, each
// message has one result, and what is said to be confirmed is there.
func TestConfirmedIsInAQueue(t *testing.T) {
	const total = 3000
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL, MaxBackoff: 20 * time.Millisecond})
	declare(t, c, "orders")
	p := newPublisher(t, c, PublisherConfig{Window: 100})

	admin := channel(t, start(t, Config{URL: b.URL}))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for bound := true; ; bound = !bound {
			var err error
			if bound {
				err = admin.QueueUnbind("orders", "orders", message.CommandsExchange, nil)
			} else {
				err = admin.QueueBind("orders", "orders", message.CommandsExchange, false, nil)
			}
			if err != nil {
				t.Errorf("change the binding: %v", err)
				return
			}
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(rand.IntN(5)) * time.Millisecond):
			}
		}
	}()

	confirmed := map[string]bool{}
	counts := map[message.ResultKind]int{}
	settle := func(ids map[uint64]string, r message.Result) {
		id, waiting := ids[r.Tag]
		if !waiting {
			t.Fatalf("result %+v for a message that has one", r)
		}
		delete(ids, r.Tag)
		counts[r.Kind]++
		if r.Kind == message.Confirmed {
			confirmed[id] = true
		}
	}
	for sent := uint64(0); sent < total; {
		ch := acquire(t, p)
		inFlight := map[uint64]string{}
		for alive := true; alive && sent < total; {
			m := command("orders")
			err := ch.Publish(t.Context(), sent, m)
			switch {
			case err == nil:
				inFlight[sent] = m.MessageID
				sent++
			case errors.Is(err, ErrWindowFull):
				settle(inFlight, <-ch.Results())
			default:
				alive = false
			}
			if rand.IntN(200) == 0 {
				ch.session.cut()
			}
		}
		for len(inFlight) > 0 {
			select {
			case r := <-ch.Results():
				settle(inFlight, r)
			case <-time.After(patience):
				t.Fatalf("no result for %d messages", len(inFlight))
			}
		}
		ch.Release()
	}
	close(stop)
	<-stopped
	t.Logf("results: %v", counts)
	if counts[message.Confirmed] == 0 || counts[message.Returned] == 0 || counts[message.Lost] == 0 {
		t.Errorf("results %v: want some confirmed, some returned and some lost, or nothing was tested", counts)
	}

	sub := subscribe(t, c, "orders", 1000)
	for limit := time.After(patience); len(confirmed) > 0; {
		select {
		case d := <-sub.Deliveries():
			delete(confirmed, d.MessageID)
			if err := sub.Ack(d.Tag, false); err != nil {
				t.Fatal(err)
			}
		case <-limit:
			t.Fatalf("%d confirmed messages are not in the queue", len(confirmed))
		}
	}
}

// TestAckedWasDelivered: while connections are cut and prefetch changes, a cumulative ack
// takes no message along that did not come out of Deliveries.
func TestAckedWasDelivered(t *testing.T) {
	const total = 3000
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL, MaxBackoff: 20 * time.Millisecond})
	declare(t, c, "orders")
	fill(t, c, "orders", total)
	seen := map[string]bool{}
	for limit := time.After(patience); len(seen) < total; {
		sub := subscribe(t, c, "orders", 1)
		var last uint64
		for alive := true; alive && len(seen) < total; {
			select {
			case d, ok := <-sub.Deliveries():
				if !ok {
					alive = false
					break
				}
				seen[string(d.Body)], last = true, d.Tag
				if rand.IntN(100) == 0 {
					alive = sub.Reopen(t.Context(), 1+rand.IntN(30)) == nil
				}
				if rand.IntN(2) == 0 {
					alive = sub.Ack(d.Tag, true) == nil && alive
				}
				if rand.IntN(300) == 0 {
					session(t, c).cut()
				}
			case <-time.After(5 * time.Millisecond): // all that prefetch allows is unacked
				alive = last == 0 || sub.Ack(last, true) == nil
			case <-limit:
				t.Fatalf("%d of %d messages came", len(seen), total)
			}
		}
		_ = sub.Close() // it may have ended
	}
}
