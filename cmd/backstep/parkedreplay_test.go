package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/message"
)

// TestParkedReplay: what can be replayed is, and of the rest it is said why not.
func TestParkedReplay(t *testing.T) {
	t.Parallel()
	o, db, broker := lotOf(t)
	now := time.Now()
	old := parkedCopy("old", "t", "r", now)
	old.Timestamp = now.Add(-15 * 24 * time.Hour)
	long := parkedCopy("long ago", "t", "r", now.Add(-15*24*time.Hour)) // when it was made nobody knows
	none := parkedCopy("given", "t", "no message_id", now)
	none.Headers[message.HeaderParkedProperties] = `{"type":"t"}`
	nameless := parkedCopy("", "t", "r", now)
	copies := parkedCopy("cc", "t", "r", now)
	copies.Headers[message.HeaderParkedEnvelope], copies.Headers[message.HeaderParkedProperties] = true, `{"message_id":"cc","user_id":"guest"}`
	copies.Body = []byte(`{"headers":{"CC":{"$list":["payment"]}},"body":"eA=="}`)
	torn := parkedCopy("torn", "t", "r", now)
	torn.Headers[message.HeaderParkedEnvelope] = true
	bad := parkedCopy("bad", "t", "r", now)
	bad.Headers[message.HeaderParkedProperties] = `{"message_id":"bad","expiration":"soon"}`
	broker.Publish(t, message.ParkedExchange, handlers.OrdersQueue,
		parkedCopy("one", "t", "r", now), old, long, none, nameless, torn, bad, parkedCopy("done", "t", "r", now), parkedCopy("one", "t", "r", now))
	broker.Publish(t, message.ParkedExchange, handlers.ShippingQueue, copies)
	execute(t, db, `INSERT INTO inbox_messages (consumer, message_id) VALUES ('orders', 'done'), ('payment', 'long ago')`)
	run := func(args ...string) answer {
		t.Helper()
		return o.run("", append(append([]string{"parked"}, args...), because...)...)
	}

	o.run("", "parked", "show", "old").want(exitOK, "It cannot be replayed as it is: it was made 15d0h ago", "backstep parked show old --body | backstep submit -")
	o.run("", "parked", "show", "given").want(exitOK, "it had none; that is the one it got when it was parked", "--give-id")
	o.run("", "parked", "show", "done").want(exitOK, "queue orders has recorded its id", "A replay would change nothing")
	o.run("", "parked", "show", "torn").want(exitOK, "the envelope does not decode")
	var r, some replayed
	run("replay", "--queue", "orders", "--dry-run", "--json").want(exitFailed, "not replayed: 6 of 9 messages; of 1 this run sent a copy: run the same command again").decode(&r)
	r.want(t, map[fate]int{fateReplayed: 2, fateKept: 1, fateDone: 1, fateRefused: 5})
	parkedAre(t, o, "orders", 9)

	a := run("replay", "--queue", "orders").want(exitFailed, "1 message replayed, 1 done already, 7 not",
		"message old: left as it is: it was made 15d0h ago", "message long ago: left as it is", "known for 14d0h (BACKSTEP_INBOX_RETENTION)",
		"message given: left as it is: it had no message_id", "message torn: left as it is: what it was before it was parked cannot be read",
		"message bad: left as it is: the broker refuses it", "message done: done already: queue orders has processed", "message one: left as it is: a copy of it was sent",
		"not replayed: 7 of 9 messages")
	if strings.Contains(a.stderr, "not finished") {
		t.Errorf("it says %s", a.stderr)
	}
	if got := drained(t, broker, "orders"); !slices.Equal(got, []string{"one"}) {
		t.Errorf("orders has %q", got)
	}
	parkedAre(t, o, "orders", 7)

	// Who does not know what became of a message sends its copy; then the worker has it.
	execute(t, db, `INSERT INTO inbox_messages (consumer, message_id) VALUES ('orders', 'one')`)
	run("replay", "one").want(exitOK, "0 messages replayed, 1 done already")
	run("replay", "one", "done", "long ago", "--queue", "orders,payment").want(exitFailed, "message one: done already: it had been processed, and was removed by ops at", "2 done already, 1 not")
	run("replay", "nobody").want(exitFailed, "message nobody: not found: no such message is parked from orders, inventory", "not replayed: 1 of 1 message")
	run("replay", "long ago", "--queue", "payment").want(exitOK, "it is not parked, and queue payment has processed it")
	run("replay", "given", "--give-id").want(exitOK, "1 message replayed")
	run("replay", "cc").want(exitOK, "without user_id", "without header CC")
	if d, ok := broker.Get(t, "shipping"); !ok || d.MessageId != "cc" || d.Headers["CC"] != nil || string(d.Body) != "x" {
		t.Errorf("shipping has %t, %+v", ok, d)
	}
	if got := drained(t, broker, "payment"); len(got) > 0 {
		t.Errorf("payment has %q", got)
	}
	d, ok := broker.Get(t, "orders")
	delete(d.Headers, "x-delivery-count") // the broker's
	if !ok || d.MessageId != "given" || d.Type != "t" || !maps.Equal(d.Headers, amqp091.Table{"mine": int32(7)}) {
		t.Errorf("orders has %t, %+v", ok, d)
	}
	run("replay", "given").want(exitOK, "queue orders has it, or has had it; it was replayed by ops at")

	// No queue: nothing is lost.
	broker.Unbind(t, message.CommandsExchange, "payment", "payment")
	broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, parkedCopy("p1", "t", "r", now), parkedCopy("p2", "t", "r", now), parkedCopy("p3", "t", "r", now))
	run("replay", "--queue", "payment").want(exitFailed, `replay message "p1" to queue payment: no queue took it`, "backstep topology apply", "not finished", "0 messages replayed")
	parkedAre(t, o, "payment", 3)
	o.run("", "topology", "apply").want(exitOK)
	run("replay", "--queue", "payment", "--max", "2", "--rate", "1000", "--json").want(exitOK, "there are more").decode(&some)
	some.want(t, map[fate]int{fateReplayed: 2})
	if got := drained(t, broker, "payment"); !slices.Equal(got, []string{"p1", "p2"}) || !some.More {
		t.Errorf("payment has %q, more %t", got, some.More)
	}
	// What stays is not counted, or the rest would never have its turn.
	broker.Publish(t, message.ParkedExchange, handlers.OrdersQueue, parkedCopy("last", "t", "r", now))
	run("replay", "--queue", "orders", "--max", "2", "--dry-run").want(exitFailed, "message last: would be replayed", "2 messages would be replayed, 4 not")
	var actions int
	if err := db.QueryRowContext(t.Context(), `SELECT COUNT(*) FROM parked_actions WHERE actor = 'ops' AND reason = 'cured, ticket 12'`).Scan(&actions); err != nil || actions != 7 {
		t.Errorf("%d actions in the audit, %v, want 7", actions, err)
	}
}

// TestParkedReplayGoesNotRound: what is parked again by the worker is not taken a second time.
func TestParkedReplayGoesNotRound(t *testing.T) {
	t.Parallel()
	o, _, broker := lotOf(t)
	o.start("worker")
	o.start("relay").says("connected to the broker")
	var msgs []amqp091.Publishing
	for i := range 60 {
		msgs = append(msgs, amqp091.Publishing{MessageId: fmt.Sprint("bad-", i), Type: handlers.OrderCreateType, Body: []byte("{}"), DeliveryMode: 2})
	}
	broker.Publish(t, message.CommandsExchange, handlers.OrdersQueue, msgs...)
	all := func() error {
		if ready, _ := broker.Queue(t, "orders.parked"); ready != len(msgs) {
			return fmt.Errorf("%d are parked", ready)
		}
		return nil
	}
	eventually(t, "all are parked", all)
	for range 2 {
		var r replayed
		// Slow enough for the first to be back while it goes on.
		o.run("", append([]string{"parked", "replay", "--all", "--rate", "30", "--json"}, because...)...).want(exitOK).decode(&r)
		r.want(t, map[fate]int{fateReplayed: len(msgs)})
		eventually(t, "all are parked again", all)
	}
}

// TestParkedReplayInterrupted: whatever ends a replay, and however often, no message is lost.
func TestParkedReplayInterrupted(t *testing.T) {
	t.Parallel()
	o, _, broker := lotOf(t)
	const total = 120
	want := map[string]bool{}
	for i := range total {
		id := fmt.Sprint("m-", i)
		want[id] = true
		broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, parkedCopy(id, "t", "r", time.Now()))
	}
	args := append([]string{"parked", "replay", "--all", "--rate", "20"}, because...)
	sent := 0
	for _, end := range []struct {
		by   func(*background)
		code int
	}{
		{func(b *background) { b.stop(syscall.SIGKILL) }, -1},
		{func(*background) { broker.CloseConnections(t) }, exitFailed},
		{func(b *background) { b.stop(syscall.SIGINT) }, exitFailed},
	} {
		b := o.start("backstep", args...)
		eventually(t, "it has begun", func() error {
			if ready, _ := broker.Queue(t, "payment"); ready < sent+5 {
				return fmt.Errorf("%d of %d are sent", ready, total)
			}
			return nil
		})
		end.by(b)
		if code := b.wait(); code != end.code {
			t.Errorf("exit code %d, want %d:\n%s", code, end.code, b.text())
		}
		sent, _ = broker.Queue(t, "payment")
		if sent >= total {
			t.Fatalf("all %d were sent before it was interrupted", sent)
		}
	}
	eventually(t, "a run finishes it", func() error {
		o.run("", append([]string{"parked", "replay", "--all", "--rate", "1000"}, because...)...).want(exitOK)
		if ready, unacked := broker.Queue(t, "payment.parked"); ready+unacked > 0 {
			return fmt.Errorf("%d and %d are left", ready, unacked)
		}
		return nil
	})
	got := drained(t, broker, "payment")
	for _, id := range got {
		delete(want, id)
	}
	if len(want) > 0 || len(got) > total+3 {
		t.Errorf("%d lost (%v); %d came of %d", len(want), want, len(got), total)
	}
}
