package amqp

import (
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/testenv"
)

// B50: what is dead-lettered while its queue is missing, or full, waits at its source until it
// is there, or has room.
func TestNothingVanishesOnItsWayToTheParkedQueue(t *testing.T) {
	const n, room = 200, 5
	servers := testenv.Private(t)
	// How long the broker waits before it tries again; its default is three minutes.
	if _, err := servers.Rabbitmqctl(within(t), "eval", "application:set_env(rabbit, dead_letter_worker_publisher_confirm_timeout, 1000)."); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		full bool
	}{{"missing", false}, {"full", true}} {
		t.Run(tt.name, func(t *testing.T) {
			c := start(t, Config{URL: servers.Vhost(t).URL})
			declare(t, c, "q")
			if _, err := channel(t, c).QueueDelete("q.parked", false, false, false); err != nil {
				t.Fatal(err)
			}
			if tt.full {
				args := parkedArgs()
				args["x-max-length"] = int32(room)
				queueWith(t, c, "q.parked", args)
				if err := channel(t, c).QueueBind("q.parked", "q", message.ParkedExchange, false, nil); err != nil {
					t.Fatal(err)
				}
			}
			ch := acquire(t, newPublisher(t, c, PublisherConfig{}))
			defer ch.Release()
			msgs, missing := make([]*message.Message, n), map[string]bool{}
			for i := range msgs {
				msgs[i] = command("q")
				missing[msgs[i].MessageID] = true
			}
			publish(t, ch, msgs...)
			results(t, ch, n)
			sub := subscribe(t, c, "q", n)
			for range n {
				if err := sub.Nack(receive(t, sub).Tag, false, false); err != nil {
					t.Fatal(err)
				}
			}
			if tt.full {
				if got := awaitDepth(t, c, "q.parked", room); got == n {
					t.Fatalf("a queue for %d took all %d: the test shows nothing", room, n)
				}
			} else {
				declare(t, c, "q")
			}
			parked := subscribe(t, c, "q.parked", 1)
			for len(missing) > 0 { // a copy may come twice: at least once
				d := receive(t, parked)
				delete(missing, d.MessageID)
				if err := parked.Ack(d.Tag, false); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// awaitDepth waits until at least n messages are ready in a queue, and returns how many are.
func awaitDepth(t *testing.T, c *Client, queue string, n int) int {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) { // a queue tells nobody: it is asked
		got, err := session(t, c).Depth(within(t), queue)
		if err == nil && got >= n {
			return got
		}
		if time.Now().After(end) {
			t.Fatalf("%d messages in %s (%v), want %d", got, queue, err, n)
		}
	}
}
