package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/inbox"
	"backstep/internal/message"
)

// TestParkedList: the messages are counted by what they have in common, and are then as before.
func TestParkedList(t *testing.T) {
	t.Parallel()
	o, _, broker := lotOf(t)
	o.run("", "parked", "list").want(exitOK, "no messages are parked")
	now := time.Now()
	var ids []string
	for i := range 40 {
		id := fmt.Sprintf("payment-%d", i)
		ids = append(ids, id)
		broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue,
			parkedCopy(id, "place-order.charge-payment", fmt.Sprintf(`step %d of "order %d": gateway away`, i, i), now.Add(-time.Duration(i)*time.Minute)))
	}
	odd := parkedCopy("\x1b[31mred", "odd", unknown("odd"), now.Add(-48*time.Hour))
	delete(odd.Headers, message.HeaderParkedAt)
	broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, odd)
	broker.Publish(t, message.ParkedExchange, handlers.OrdersQueue, parkedCopy("order-1", "order.create", "no lines", now))
	ids = append(ids, odd.MessageId)

	a := o.run("", "parked", "list").want(exitOK, `step N of "…": gateway away`, "40", "payment-0", unknown("odd"), "no lines", "order.create", "42 messages", `\x1b[31mred`)
	if strings.Contains(a.stdout, "\x1b") {
		t.Error("a message id steers the terminal")
	}
	for args, want := range map[string]int{
		"--queue payment":                       41,
		"--queue payment.parked,orders":         42,
		"--queue payment --because GATEWAY":     40,
		"--because gateway --because lines":     1,
		"--type order.create":                   1,
		"--since 9m30s":                         11, // and the order
		"--until 9m30s":                         30, // of the odd one nobody knows
		"--since 20m30s --until 9m30s":          11,
		"--since 2020-01-01T00:00:00Z":          41,
		"--id payment-3,order-1 --id payment-4": 3,
		"--queue shipping":                      0,
	} {
		var list parkedList
		o.run("", append([]string{"parked", "list", "--json"}, strings.Fields(args)...)...).want(exitOK).decode(&list)
		n := 0
		for _, g := range list.Groups {
			n += g.Count
		}
		if n != want || list.More {
			t.Errorf("list %s counts %d, want %d: %+v", args, n, want, list.Groups)
		}
	}
	var list parkedList
	o.run("", "parked", "list", "--json", "--queue", "payment").want(exitOK).decode(&list)
	if g := list.Groups[0]; g.Count != 40 || g.Queue != "payment" || g.Newest.Sub(g.Oldest) != 39*time.Minute || !slices.Equal(g.Types, []string{"place-order.charge-payment"}) ||
		g.Example != "payment-0" || g.Said != `step 0 of "order 0": gateway away` || list.Queues[0].There != 41 || list.Queues[0].Seen != 41 {
		t.Errorf("list %+v", list)
	}
	o.run("", "parked", "list", "--queue", "shipping").want(exitOK, "no such messages are parked")
	if a := o.run("", "parked", "list", "--because", "no such reason", "--json").want(exitOK, "no parked message matches --because 'no such reason'; backstep parked list shows"); a.stderr == "" {
		t.Error("that is not said on stderr")
	}
	o.run("", "parked", "list", "--because", `step N of "…": gateway`).want(exitOK, "40 messages")
	for _, args := range [][]string{{"list"}, {"show", "x"}, append([]string{"replay"}, because...), append([]string{"drop"}, because...)} {
		a := o.run("", append(append([]string{"parked"}, args...), "--queue", "nosuch")...).want(exitUsage, `--queue "nosuch" is no queue of Backstep; they are orders, inventory`)
		if strings.Count(a.stderr, "\n") != 1 {
			t.Errorf("%s says %s", args[0], a.stderr)
		}
	}
	o.run("", "parked", "list", "extra").want(exitUsage, "list takes no arguments", "--id chooses one")
	o.run("", "parked", "replay", "--queue", "payment", "--dry-run").want(exitOK, "41 messages would be replayed", "nothing was done")
	o.run("", "parked", "drop", "--all", "--dry-run").want(exitOK, "42 messages would be dropped", "nothing was done")
	if got := drained(t, broker, "payment.parked"); !slices.Equal(got, ids) {
		t.Errorf("after all this the queue has %q", got)
	}

	// A look at some says so.
	for _, id := range ids[:5] {
		broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, parkedCopy(id, "t", "r", now))
	}
	o.run("", "parked", "list", "--queue", "payment", "--max", "3", "--json").want(exitOK, "payment.parked has 5 messages; these were the first 3").decode(&list)
	if !list.More || list.Groups[0].Count != 3 {
		t.Errorf("list %+v", list)
	}
	parkedAre(t, o, "payment", 5)
}

// unknown is the reason for which a worker parks a message of a type that it does not know.
func unknown(typ string) string {
	m := message.Message{Properties: message.Properties{Type: typ}}
	return (&inbox.Mux{}).HandleBatch(context.Background(), nil, []message.Message{m})[0].Reason
}

// TestParkedListMissingQueue: a queue that is missing hides no other.
func TestParkedListMissingQueue(t *testing.T) {
	t.Parallel()
	o, _, broker := lotOf(t)
	broker.Publish(t, message.ParkedExchange, handlers.ShippingQueue, parkedCopy("s", "t", "r", time.Now()))
	broker.DeleteQueue(t, "inventory.parked")
	o.run("", "parked", "list").want(exitFailed, "1 message;", "shipping", `queue "inventory.parked"`, "backstep topology apply")
	o.run("", "parked", "list", "--queue", "inventory").want(exitFailed, `queue "inventory.parked"`)
	o.run("", "parked", "show", "s").want(exitOK, "shipping.parked")
	o.run("", append([]string{"parked", "replay", "--all"}, because...)...).want(exitFailed, "1 message replayed", `queue "inventory.parked"`)
}

func TestAlike(t *testing.T) {
	for reason, want := range map[string]string{
		"no message_id": "no message_id",
		"body of 300000 bytes; 262144 is the limit":                                "body of N bytes; N is the limit",
		`unknown type "a \" b"`:                                                    `unknown type "…"`,
		"saga 0194f1a4-5c00-7000-8000-000000000001: command parked":                "saga …: command parked",
		"made at 2026-11-29T12:00:00Z, longer ago than duplicates are known (24h)": "made at …, longer ago than duplicates are known (Nh)",
	} {
		if got := alike(reason); got != want {
			t.Errorf("alike(%q) = %q, want %q", reason, got, want)
		}
	}
	g := parkedGroups{}
	for i := range 3 * maxGroups {
		// Letters: numbers do not count.
		g.add(&inbox.Parked{Reason: strings.Repeat("x", i%100) + strings.Repeat("y", i/100)})
	}
	total := 0
	for _, x := range g.list() {
		total += x.Count
	}
	if n := len(g.list()); n > maxGroups+1 || total != 3*maxGroups {
		t.Errorf("%d groups of %d messages", n, total)
	}
}

// TestParkedMany: a list of many takes no memory for each body. The messages are 100 MB.
func TestParkedMany(t *testing.T) {
	t.Parallel()
	o, _, broker := lotOf(t)
	const total, size = 10_000, 10_000
	m := parkedCopy("m", "t", "r 17", time.Now())
	m.Body = make([]byte, size)
	for range 10 {
		broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, slices.Repeat([]amqp091.Publishing{m}, total/10)...)
	}
	for range 2 {
		b := o.start("backstep", "parked", "list")
		most := b.peak()
		if code := b.wait(); code != exitOK || !strings.Contains(b.text(), "10000 messages") || !strings.Contains(b.text(), "r N") {
			t.Errorf("exit code %d:\n%s", code, b.text())
		}
		t.Logf("it took %d MiB and %s of processor time", most>>10, b.cmd.ProcessState.UserTime()+b.cmd.ProcessState.SystemTime())
		if most == 0 || !raceEnabled && most > 96<<10 { // the race detector multiplies it
			t.Errorf("it took %d KiB, want less than %d", most, 96<<10)
		}
	}
	if ready, _ := broker.Queue(t, "payment.parked"); ready != total {
		t.Errorf("%d are left", ready)
	}
}

// peak watches the program to its end and returns the most memory it had, in KiB. What the
// kernel tells of a process that has ended includes what its parent had when it began.
func (b *background) peak() (most int) {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", b.cmd.Process.Pid))
		if err == nil { // else it has ended
			if _, rest, ok := strings.Cut(string(status), "VmHWM:"); ok {
				if n, err := strconv.Atoi(strings.Fields(rest)[0]); err == nil {
					most = max(most, n)
				}
			}
		}
		select {
		case <-b.done:
			return most
		case <-tick.C:
		}
	}
}
