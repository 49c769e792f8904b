package saga

import (
	"testing"

	"go.opentelemetry.io/otel/trace"

	"backstep/internal/message"
)

// The headers of what is emitted are the caller's.
func TestEmitLeavesHeadersAlone(t *testing.T) {
	t.Parallel()
	ctx := trace.ContextWithSpanContext(t.Context(), trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{1}}))
	headers := message.Headers{"theirs": "x"}
	var c call
	c.emit(ctx, []message.Message{{Headers: headers}})
	equal(t, "theirs", headers, message.Headers{"theirs": "x"})
	equal(t, "headers", len(c.events[0].Headers), 2)
}
