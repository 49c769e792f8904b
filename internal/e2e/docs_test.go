package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/saga"
)

// What docs/messages.md shows works as it stands there: the order typed into the management
// UI's publish form and piped to submit, and the row inserted by a program in another language.
func TestExamplesOfTheDocs(t *testing.T) {
	doc, err := os.ReadFile("../../docs/messages.md")
	if err != nil {
		t.Fatal(err)
	}
	w := newWheel(t)
	w.start("relay")
	w.start("worker")
	w.awaitQueues()
	w.publishForm(typed{
		Payload: example(t, string(doc), "json"), Encoding: "string", RoutingKey: handlers.OrdersQueue,
		Properties: map[string]any{"message_id": "anything new", "type": handlers.OrderCreateType},
	})
	w.pipe(example(t, string(doc), "json"))
	if _, err := w.db.ExecContext(t.Context(), example(t, string(doc), "sql")); err != nil {
		t.Fatal(err)
	}
	w.rest(3, 60*time.Second)
	w.verify(expectation{confirmed: 3})

	// The order's saga is named in both ways. It comes too late: what is looked at is that it arrives.
	var id, order string
	if err := w.db.QueryRowContext(t.Context(), `SELECT id, correlation_id FROM saga_instances LIMIT 1`).Scan(&id, &order); err != nil {
		t.Fatal(err)
	}
	_, wishes, _ := strings.Cut(string(doc), "\n## saga.cancel\n")
	byID := example(t, wishes, "json")
	_, rest, _ := strings.Cut(wishes, byID)
	byName := strings.Replace(example(t, rest, "json"), "0194f1a4-5c00-7000-8000-000000000001", order, 1)
	w.publishForm(typed{Payload: byID, Encoding: "string", RoutingKey: handlers.PaymentQueue, Properties: map[string]any{
		"message_id": "wish 1", "type": saga.CancelType, "headers": map[string]any{"x-saga-id": id},
	}})
	w.publishForm(typed{Payload: byName, Encoding: "string", RoutingKey: handlers.OrdersQueue, Properties: map[string]any{
		"message_id": "wish 2", "type": saga.CancelType,
	}})
	w.eventually(60*time.Second, "both wishes are known", func() error {
		if n := w.count(`SELECT COUNT(*) FROM saga_actions WHERE saga_id = ? AND action = 'cancel refused'`, []byte(id)); n != 2 {
			return fmt.Errorf("%d are", n)
		}
		return nil
	})
}

// example returns the first block of a language in a document.
func example(t *testing.T, doc, language string) string {
	t.Helper()
	_, rest, ok := strings.Cut(doc, "\n```"+language+"\n")
	block, _, end := strings.Cut(rest, "\n```\n")
	if !ok || !end {
		t.Fatalf("the document has no %s block", language)
	}
	return block
}

// pipe does what jq -c . order.json | backstep submit - does.
func (w *wheel) pipe(order string) {
	w.t.Helper()
	var line bytes.Buffer
	if err := json.Compact(&line, []byte(order)); err != nil {
		w.t.Fatal(err)
	}
	cmd := exec.CommandContext(w.t.Context(), filepath.Join(binaries, "backstep"), "submit", "-")
	cmd.Env = append(os.Environ(), "BACKSTEP_MYSQL_DSN="+w.dsn, "BACKSTEP_AMQP_URL="+w.broker.URL)
	cmd.Stdin = &line
	if out, err := cmd.CombinedOutput(); err != nil {
		w.t.Fatalf("submit: %v\n%s", err, out)
	}
}
