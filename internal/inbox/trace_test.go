package inbox

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/go-sql-driver/mysql"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace/noop"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// TestSpansOfTries: each try is a span, and one that was rolled back does not look like one
// that was not. It is not parallel: the tracer provider is the process's.
func TestSpansOfTries(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	otel.SetTracerProvider(trace.NewTracerProvider(trace.WithSpanProcessor(spans)))
	t.Cleanup(func() { otel.SetTracerProvider(noop.NewTracerProvider()) })
	db := database(t)
	conflict, broken, fine, known, fresh := msg("conflict"), msg("broken"), msg("fine"), msg("known"), msg("fresh")
	tries := map[string]int{}
	h := &effects{OutcomeFunc: func(_ context.Context, tx *sqltx.Tx, m *message.Message) message.Outcome {
		tries[m.MessageID]++ // one lane is one goroutine
		switch {
		case m.MessageID == "conflict" && tries[m.MessageID] == 1:
			tx.Fail(&mysql.MySQLError{Number: 1213, Message: "Deadlock found"})
		case m.MessageID == "broken" && tries[m.MessageID] == 1:
			panic("boom")
		}
		return message.Outcome{}
	}}
	exec(t, db, `INSERT INTO inbox_messages (consumer, message_id) VALUES ('q', 'known')`)
	b := newBroker("q")
	run(t, db, b, Config{Queue: "q", Handler: h, Batch: 8})
	for i, m := range []message.Message{conflict, broken, fine} {
		b.put(m)
		eventually(t, "it is acked", b.settled(i+1))
	}
	b.put(known, fresh)
	eventually(t, "all are acked", b.settled(5))

	got := map[string][]string{}
	for _, span := range spans.Ended() {
		var id, outcome string
		for _, a := range span.Attributes() {
			switch a.Key {
			case "messaging.message.id":
				id = a.Value.AsString()
			case "backstep.outcome":
				outcome = a.Value.AsString()
			}
		}
		if span.Name() == "process q" {
			got[id] = append(got[id], fmt.Sprintf("%s: %s %s", outcome, span.Status().Code, span.Status().Description))
		}
	}
	done := "done: Unset "
	for id, want := range map[string][]string{
		"conflict": {"rolled back: Error Error 1213: Deadlock found", done},
		"broken":   {"rolled back: Error panic in handler: boom", "retry: Error panic in handler: boom"}, // the second only counts the attempt
		"fine":     {done},
		"known":    {"rolled back to leave out duplicates: Unset "},
	} {
		if !slices.Equal(got[id], want) {
			t.Errorf("spans of %s: %q, want %q", id, got[id], want)
		}
	}
	if n := len(got["fresh"]); got["fresh"][n-1] != done {
		t.Errorf("spans of fresh: %q, want the last to be %q", got["fresh"], done)
	}
}
