package main

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/testenv"
)

// hold takes up to most messages of a queue in hand until let go, and waits for n.
func hold(t *testing.T, broker *testenv.Broker, queue string, most, n int) (letGo func()) {
	t.Helper()
	conn, err := amqp091.Dial(broker.URL)
	if err != nil {
		t.Fatal(err)
	}
	letGo = func() { _ = conn.Close() } // closed already, the second time
	t.Cleanup(letGo)
	ch, err := conn.Channel()
	if err == nil {
		err = ch.Qos(most, 0, false)
	}
	if err != nil {
		t.Fatal(err)
	}
	ds, err := ch.Consume(queue, "", false, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	for range n {
		select {
		case <-ds:
		case <-time.After(patience):
			t.Fatalf("%s has not %d messages", queue, n)
		}
	}
	return letGo
}

// TestParkedInHand: who does not see all messages, because others have some, says so.
func TestParkedInHand(t *testing.T) {
	t.Parallel()
	o, _, broker := lotOf(t)
	for i := range 5 {
		broker.Publish(t, message.ParkedExchange, handlers.OrdersQueue, parkedCopy(fmt.Sprint("m-", i), "t", "r", time.Now()))
	}
	letGo := hold(t, broker, "orders.parked", 2, 2)
	const says, again = "orders.parked has 1 consumer besides this one", "messages that others have in hand were not seen, and stay; run the same command again"
	var list parkedList
	o.run("", "parked", "list", "--queue", "orders", "--json").want(exitOK, says).decode(&list)
	if k := list.Queues[0]; !list.More || k.There != 3 || k.Seen != 3 || k.Others != 1 {
		t.Errorf("list says %+v", list)
	}
	for _, args := range [][]string{{"replay", "--all", "--dry-run"}, {"drop", "--all", "--dry-run"}, {"replay", "--queue", "orders"}, {"replay", "--because", "r"}} {
		o.run("", append(append([]string{"parked"}, args...), because...)...).want(exitFailed, says, again)
	}
	letGo()
	eventually(t, "they are back", func() error {
		if ready, _ := broker.Queue(t, "orders.parked"); ready != 2 {
			return fmt.Errorf("%d are", ready)
		}
		return nil
	})
	o.run("", append([]string{"parked", "replay", "--all"}, because...)...).want(exitOK, "2 messages replayed")
	if got := drained(t, broker, "orders"); len(got) != 5 {
		t.Errorf("orders has %q", got)
	}
}

// TestParkedMaxIsNoAlarm: a run that has done as many as it may blames nobody for the rest, and says
// nothing of queues that it has not looked at.
func TestParkedMaxIsNoAlarm(t *testing.T) {
	t.Parallel()
	o, _, broker := lotOf(t)
	for i := range 8 {
		broker.Publish(t, message.ParkedExchange, handlers.OrdersQueue, parkedCopy(fmt.Sprint("m-", i), "t", "r", time.Now()))
	}
	broker.Publish(t, message.ParkedExchange, handlers.InventoryQueue, parkedCopy("i", "t", "r", time.Now()))
	for _, args := range []string{"drop --all --max 2 --dry-run", "replay --all --max 2 --dry-run", "drop --queue orders --max 2", "replay --all --max 2"} {
		a := o.run("", append(append([]string{"parked"}, strings.Fields(args)...), because...)...).want(exitOK, "2 messages ")
		if want := "there are more than --max allows; the same command goes on with them\n"; a.stderr != want {
			t.Errorf("%s says %q, want %q", args, a.stderr, want)
		}
	}
	b := o.start("backstep", append([]string{"parked", "replay", "--all", "--rate", "1"}, because...)...)
	eventually(t, "it has begun", func() error {
		if ready, _ := broker.Queue(t, "orders"); ready < 3 {
			return fmt.Errorf("%d are sent", ready)
		}
		return nil
	})
	if code := b.stop(syscall.SIGINT); code != exitFailed || strings.Contains(b.text(), "somebody else") || strings.Contains(b.text(), "inventory.parked has") {
		t.Errorf("exit code %d: %s", code, b.text())
	}
}

// TestParkedNothingMatches: a filter that no message fits is not the same as nothing to do.
func TestParkedNothingMatches(t *testing.T) {
	t.Parallel()
	o, _, broker := lotOf(t)
	broker.Publish(t, message.ParkedExchange, handlers.OrdersQueue, parkedCopy("m", "t", "r", time.Now()))
	for _, verb := range []string{"replay", "drop"} {
		o.run("", append([]string{"parked", verb, "--because", "unknown type", "--type", "x", "--queue", "orders"}, because...)...).want(exitFailed,
			"no parked message matches --because 'unknown type' --type x --queue orders; backstep parked list shows reasons")
		o.run("", append([]string{"parked", verb, "--queue", "shipping"}, because...)...).want(exitOK, "0 messages")
	}
	parkedAre(t, o, "orders", 1)
}

// TestParkedTakenMeanwhile: a replay does not end well whose messages somebody else has taken in hand
// since it began.
func TestParkedTakenMeanwhile(t *testing.T) {
	t.Parallel()
	o, _, broker := lotOf(t)
	const total = 40
	for i := range total {
		broker.Publish(t, message.ParkedExchange, handlers.OrdersQueue, parkedCopy(fmt.Sprint("m-", i), "t", "r", time.Now()))
	}
	first := o.start("backstep", append([]string{"parked", "replay", "--all", "--rate", "1"}, because...)...)
	eventually(t, "it has begun", func() error {
		if ready, _ := broker.Queue(t, "orders"); ready < 2 {
			return fmt.Errorf("%d are sent", ready)
		}
		return nil
	})
	letGo := hold(t, broker, "orders.parked", total, total/2)
	o.run("", "parked", "list", "--queue", "orders").want(exitOK, "orders.parked has 2 consumers besides this one", "no such messages are parked")
	if code := first.wait(); code != exitFailed || !strings.Contains(first.text(), "orders.parked had 40 messages, and only ") || !strings.Contains(first.text(), "run the same command again") {
		t.Errorf("it exited with %d: %s", code, first.text())
	}
	letGo()
	eventually(t, "they are back", func() error {
		if ready, _ := broker.Queue(t, "orders.parked"); ready < total/2 {
			return fmt.Errorf("%d are", ready)
		}
		return nil
	})
	o.run("", append([]string{"parked", "replay", "--all", "--rate", "1000"}, because...)...).want(exitOK)
	if got := drained(t, broker, "orders"); len(got) != total {
		t.Errorf("orders has %d: %q", len(got), got)
	}
}
