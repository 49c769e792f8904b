package main

import (
	"bufio"
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/testenv"
)

// TestSubmitThroughLostConnections closes the connection while orders are in flight. Each must
// be in the queue, under the id that was printed.
func TestSubmitThroughLostConnections(t *testing.T) {
	const orders = 40_000
	broker := testenv.Vhost(t)
	o := newOperator(t, "BACKSTEP_AMQP_URL="+broker.URL)
	o.run("", "topology", "apply").want(exitOK)
	s := o.start("backstep", "submit", "--json", "--count", strconv.Itoa(orders))
	broker.CloseConnections(t)
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
