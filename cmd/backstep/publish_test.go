package main

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/testenv"
)

// TestSubmitThroughLostConnections cuts the connection twice while orders are in flight. Each
// must be in the queue, under the id that was printed.
func TestSubmitThroughLostConnections(t *testing.T) {
	const orders = 20_000
	broker := testenv.Vhost(t)
	url, cuts := cutting(t, broker.URL, 2)
	o := newOperator(t, "BACKSTEP_AMQP_URL="+url)
	o.run("", "topology", "apply").want(exitOK)
	s := o.start("backstep", "submit", "--json", "--count", strconv.Itoa(orders))
	if code := s.wait(); code != exitOK {
		t.Fatalf("exit code %d", code)
	}
	lost := map[string]bool{}
	lines := bufio.NewScanner(strings.NewReader(s.text()))
	for lines.Scan() {
		var line order
		if json.Unmarshal(lines.Bytes(), &line) == nil && line.Confirmed {
			lost[line.MessageID] = true
		}
	}
	if n := cuts(); n != 2 {
		t.Fatalf("%d connections were cut, want 2", n)
	}
	if len(lost) != orders {
		t.Fatalf("%d of %d orders confirmed", len(lost), orders)
	}

	conn, err := amqp091.Dial(broker.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	deliveries, err := ch.Consume(handlers.OrdersQueue, "", true, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	limit, copies := time.After(patience), 0
	for len(lost) > 0 {
		select {
		case d := <-deliveries:
			if !lost[d.MessageId] {
				copies++
			}
			delete(lost, d.MessageId)
		case <-limit:
			t.Fatalf("%d confirmed orders are not in the queue", len(lost))
		}
	}
	t.Logf("%d copies", copies)
}

// cutting is a way to the broker that cuts the first connections on which more than 1 MiB goes
// to it; all orders together are several times that.
func cutting(t *testing.T, broker string, times int64) (through string, cuts func() int64) {
	t.Helper()
	u, err := url.Parse(broker)
	if err != nil {
		t.Fatal(err)
	}
	target := u.Host
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var done atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return // the test is over
			}
			server, err := net.Dial("tcp", target)
			if err != nil {
				_ = client.Close()
				continue
			}
			end := func() { _ = client.Close(); _ = server.Close() }
			wg.Go(func() { defer end(); _, _ = io.Copy(client, server) })
			wg.Go(func() {
				defer end()
				n, _ := io.CopyN(server, client, 1<<20)
				if n == 1<<20 && done.Load() < times {
					done.Add(1)
					return
				}
				_, _ = io.Copy(server, client)
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	u.Host = l.Addr().String()
	return u.String(), done.Load
}
