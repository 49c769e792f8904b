package main

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/message"
)

// TestParkedExamples: what a worker really parks is what the examples of --help choose, and what
// advice is given by: a replay cannot help where the fault is in the message itself.
func TestParkedExamples(t *testing.T) {
	o, _, broker := lotOf(t)
	order := func(id, contentType, body string) amqp091.Publishing {
		return amqp091.Publishing{MessageId: id, Type: handlers.OrderCreateType, ContentType: contentType, DeliveryMode: 2, Body: []byte(body)}
	}
	ownFaults := []amqp091.Publishing{
		order("content-type", "text/plain", "{}"), order("no-json", "", "nonsense"), order("not-utf8", "", "\xff"), order("no-lines", "", "{}"),
		order("sum", "", `{"items":[{"sku":"a","quantity":1,"price_cents":1}],"total_cents":7}`), order("large", "", strings.Repeat("x", 300<<10)),
		order("long-name", "", `{"customer":"`+strings.Repeat("x", 300)+`","items":[{"sku":"a","quantity":1,"price_cents":1}],"total_cents":1}`),
		order("sku", "", `{"items":[{"sku":"","quantity":1,"price_cents":1}],"total_cents":1}`), order("huge", "", strings.Repeat("x", 5<<20)),
	}
	odd := order("odd", "", "{}")
	odd.Type = "odd"
	parkAll(t, o, broker, append(ownFaults, odd)...)
	var s shownParked
	for _, m := range ownFaults {
		o.run("", "parked", "show", m.MessageId, "--json").want(exitOK).decode(&s)
		if a := strings.Join(s.Advice, "\n"); !strings.Contains(a, "a replay cannot help") || !strings.Contains(a, "show "+m.MessageId+" --body | backstep submit -") || strings.Contains(a, "parked replay") {
			t.Errorf("%s is parked for %q, and advised is\n%s", m.MessageId, s.Reason, a)
		}
	}
	o.run("", "parked", "show", "odd", "--json").want(exitOK).decode(&s)
	if a := strings.Join(s.Advice, "\n"); s.Reason != unknown("odd") || !strings.Contains(a, "backstep parked replay odd --queue orders") {
		t.Errorf("odd is parked for %q, and advised is\n%s", s.Reason, a)
	}
	// As "Reject requeue false" of the management UI does it.
	broker.Publish(t, message.CommandsExchange, handlers.PaymentQueue, order("by-hand", "", "{}"))
	broker.Manage(t, http.MethodPost, map[string]any{"count": 1, "ackmode": "reject_requeue_false", "encoding": "auto"}, nil, "queues", broker.Vhost, handlers.PaymentQueue, "get")
	eventually(t, "it is dead-lettered", func() error {
		if ready, _ := broker.Queue(t, "payment.parked"); ready != 1 {
			return fmt.Errorf("%d are", ready)
		}
		return nil
	})
	o.run("", "parked", "show", "by-hand").want(exitOK, "rejected (a consumer did not want it back; why is not known here", "Send it to queue payment again:\n  backstep parked replay by-hand --queue payment")
	flag := regexp.MustCompile(`--because '([^']*)'`)
	for _, verb := range []string{"list", "replay", "drop"} {
		found := flag.FindAllStringSubmatch(o.run("", "parked", verb, "--help").want(exitOK).stdout, -1)
		if len(found) == 0 {
			t.Errorf("%s --help has no example of --because", verb)
		}
		for _, example := range found {
			o.run("", append([]string{"parked", "drop", "--dry-run", "--because", example[1]}, because...)...).want(exitOK)
		}
	}
	// The reason of one message is shown as it is, and those of many fit as they are shown.
	o.run("", "parked", "list").want(exitOK, unknown("odd"), `content_type "text/plain"`)
	o.run("", append([]string{"parked", "drop", "--dry-run", "--because", "body of N bytes; N is"}, because...)...).want(exitOK, "message large: would be dropped")
}
