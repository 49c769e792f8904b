package saga

import (
	"context"
	"slices"
	"testing"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace/noop"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// TestRehearsalHasNoSpans: what is taken back is not told as if it had happened, neither by the engine
// nor by the functions that it runs. It is not parallel: the tracer provider is the process's.
func TestRehearsalHasNoSpans(t *testing.T) {
	spans := tracetest.NewInMemoryExporter()
	t.Cleanup(func() { otel.SetTracerProvider(noop.NewTracerProvider()) })
	s := &script{}
	own := func(ctx context.Context, _ *sqltx.Tx) error {
		_, span := otel.Tracer("shop").Start(ctx, "own")
		span.End()
		if InfoFrom(ctx).Step == "b" {
			Emit(ctx, message.Message{Properties: message.Properties{MessageID: message.NewID(), Type: "booked"}, Exchange: message.EventsExchange, RoutingKey: "trip.booked"})
		}
		return nil
	}
	for _, what := range []string{"b", "undo a", "resumed"} {
		s.on(what, own)
	}
	o := newOperator(t, s)
	id := o.start("x")
	o.done(o.command())
	o.park(o.command(), "poison")
	o.exec(`UPDATE saga_instances SET trace_id = '0af7651916cd43dd8448eb211c80319c'`)
	// Whatever an operator's sampler is. One that asks no parent takes the functions' own spans for others'.
	for _, tt := range []struct {
		sampler trace.Sampler
		own     bool
	}{{trace.ParentBased(trace.AlwaysSample()), false}, {trace.AlwaysSample(), true}} {
		provider := trace.NewTracerProvider(trace.WithSyncer(spans), trace.WithSampler(tt.sampler))
		otel.SetTracerProvider(provider)
		ctx, callers := provider.Tracer("shop").Start(t.Context(), "caller's") // and whoever calls is traced
		for _, verb := range []Verb{VerbRetry, VerbCancel} {
			r, err := o.engine.Rehearse(ctx, o.db, id, Operation{Verb: verb, By: ops})
			if err != nil || r.Run == nil || r.Run.Error != "" {
				t.Fatalf("%+v, %v", r.Run, err)
			}
		}
		var names []string
		for _, span := range spans.GetSpans() {
			if !tt.own || span.Name != "own" {
				names = append(names, span.Name)
			}
		}
		equal(t, "spans of two rehearsals by "+tt.sampler.Description(), names, []string(nil))
		callers.End()
		spans.Reset()
	}
	if _, err := o.operate(id, Operation{Verb: VerbCancel}); err != nil {
		t.Fatal(err)
	}
	if got := spans.GetSpans(); !slices.ContainsFunc(got, func(s tracetest.SpanStub) bool { return s.Name == "create a" }) {
		t.Errorf("done in earnest it has %v; the test shows nothing", got)
	}
}
