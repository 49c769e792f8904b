package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"backstep/internal/handlers"
)

// TestOperatorSeesWhoConsumes: the management UI shows which process consumes what, with which
// prefetch, as the configuration of each has it. Nobody acks by being sent to (B52).
func TestOperatorSeesWhoConsumes(t *testing.T) {
	t.Parallel()
	w := newWheel(t)
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	one := w.start("worker", "BACKSTEP_QUEUES=orders", "BACKSTEP_LANES=2", "BACKSTEP_BATCH=10", "BACKSTEP_PREFETCH=30")
	w.awaitQueues()
	two := w.start("worker", "BACKSTEP_QUEUES=inventory, payment", "BACKSTEP_BATCH=10")
	all := w.start("worker", "BACKSTEP_QUEUES=shipping,replies", "BACKSTEP_BATCH=16")
	w.start("relay")
	name := func(p *proc, queues string) string {
		return fmt.Sprintf("backstep/worker %s@%s-%d", queues, host, p.cmd.Process.Pid)
	}
	expect := func(what string, prefetch ...int) {
		want := []string{
			fmt.Sprintf("inventory: %d %s", prefetch[0], name(two, "inventory,payment")),
			fmt.Sprintf("orders: %d %s", prefetch[1], name(one, "orders")),
			fmt.Sprintf("orders: %d %s", prefetch[1], name(one, "orders")),
			fmt.Sprintf("payment: %d %s", prefetch[2], name(two, "inventory,payment")),
			fmt.Sprintf("replies: %d %s", prefetch[3], name(all, "shipping,replies")),
			fmt.Sprintf("shipping: %d %s", prefetch[4], name(all, "shipping,replies")),
		}
		w.eventually(30*time.Second, what, func() error {
			if shown := w.consumers(host); !slices.Equal(shown, want) {
				return fmt.Errorf("%q, want %q", shown, want)
			}
			return nil
		})
	}
	expect("fresh consumers have one message at a time", 1, 1, 1, 1, 1)
	msgs, want := orders(40)
	w.submit(msgs...)
	w.rest(want.total(), 60*time.Second)
	expect("those that have done one have what the configuration says", 20, 30, 20, 1, 32)
	w.verify(want)
}

// consumers returns what the management UI shows of each consumer of our queues: the queue, the
// prefetch, and the name of the connection without its version.
func (w *wheel) consumers(host string) (shown []string) {
	w.t.Helper()
	var consumers []struct {
		Tag      string `json:"consumer_tag"`
		Acks     bool   `json:"ack_required"`
		Prefetch int    `json:"prefetch_count"`
		Queue    struct{ Name string }
		Channel  json.RawMessage `json:"channel_details"`
	}
	var connections []struct {
		Name string
		Own  string `json:"user_provided_name"`
	}
	w.broker.Manage(w.t, http.MethodGet, nil, &connections, "vhosts", w.broker.Vhost, "connections")
	w.broker.Manage(w.t, http.MethodGet, nil, &consumers, "consumers", w.broker.Vhost)
	own := map[string]string{}
	for _, c := range connections {
		own[c.Name] = c.Own[:max(0, strings.LastIndexByte(c.Own, ' '))]
	}
	for _, c := range consumers {
		if !slices.Contains(handlers.Queues, c.Queue.Name) {
			continue // the relay's doorbell
		}
		if !strings.HasPrefix(c.Tag, "backstep@"+host+"."+c.Queue.Name+"-") || !c.Acks {
			w.t.Errorf("consumer %q of queue %s, acks: %t", c.Tag, c.Queue.Name, c.Acks)
		}
		var channel struct {
			Connection string `json:"connection_name"`
		}
		_ = json.Unmarshal(c.Channel, &channel) // an empty list until the broker has gathered it
		shown = append(shown, fmt.Sprintf("%s: %d %s", c.Queue.Name, c.Prefetch, own[channel.Connection]))
	}
	slices.Sort(shown)
	return shown
}
