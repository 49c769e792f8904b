package e2e

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"backstep/internal/handlers"
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
