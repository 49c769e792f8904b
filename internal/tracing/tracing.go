// Package tracing carries one saga's trace through tables and queues. The context of the
// span that created a message is stored with its row and travels in its headers, identical
// in every copy; publishing and processing are children of it. Names and attributes are
// those of the OpenTelemetry messaging conventions. Without a tracer provider nothing is
// recorded, and a trace context that came in from outside is still handed on.
package tracing

import (
	"context"
	"encoding/binary"
	"maps"
	"math/rand/v2"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"backstep/internal/message"
)

var propagator = propagation.TraceContext{}

func tracer(ctx context.Context) trace.Tracer {
	if ctx.Value(unrecordedKey{}) != nil {
		return noop.Tracer{}
	}
	return otel.Tracer("backstep")
}

type unrecordedKey struct{}

// Unrecorded returns a context for work that is going to be taken back: no span of ours is recorded
// in it. Those of others have a parent that is not sampled, which is a no to all samplers that ask.
func Unrecorded(ctx context.Context) context.Context {
	unsampled := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{1}})
	return context.WithValue(trace.ContextWithSpanContext(ctx, unsampled), unrecordedKey{}, true)
}

// Create opens the short span of a message being added to the outbox and writes its context
// into the headers. End it when the row is in the transaction.
func Create(ctx context.Context, m *message.Message) trace.Span {
	ctx, span := start(Extract(ctx, m.Headers), "create "+destination(m), "create", m, producer)
	propagator.Inject(ctx, carrier(m.Headers))
	return span
}

// Carry writes ctx's span into m's headers, so that the create span of a message that is
// added later, with others, is still the child of the step that caused it.
func Carry(ctx context.Context, m *message.Message) {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return
	}
	if m.Headers == nil {
		m.Headers = message.Headers{}
	}
	propagator.Inject(ctx, carrier(m.Headers))
}

// Publish opens the span of one publish, a child of the message's create span. It lasts until
// the broker has confirmed or refused the message: EndPublish ends it.
func Publish(ctx context.Context, m *message.Message) trace.Span {
	_, span := start(Extract(ctx, m.Headers), "publish "+destination(m), "send", m, client)
	return span
}

// EndPublish ends the span of a publish with what became of it.
func EndPublish(span trace.Span, res message.Result) {
	if span.IsRecording() {
		span.SetAttributes(attribute.String("backstep.result", res.Kind.String()))
	}
	if res.Kind != message.Confirmed {
		span.SetStatus(codes.Error, res.Reason)
	}
	span.End()
}

// Process opens the span of a consumer handling a delivery, a child of its create span. The
// message it returns is the delivery's, with that span as the parent of what is done for it.
func Process(ctx context.Context, d *message.Delivery) (message.Message, trace.Span) {
	ctx, span := start(Extract(ctx, d.Headers), "process "+d.Queue, "process", &d.Message, consumer)
	m := d.Message
	if span.IsRecording() {
		span.SetAttributes(attribute.Bool("messaging.rabbitmq.redelivered", d.Redelivered))
		m.Headers = maps.Clone(d.Headers) // the delivery's own stay as they came
		if m.Headers == nil {
			m.Headers = message.Headers{}
		}
		Carry(ctx, &m)
	}
	return m, span
}

// EndProcess ends the span of a delivery with its outcome.
func EndProcess(span trace.Span, o message.Outcome) {
	span.SetAttributes(attribute.String("backstep.outcome", o.Kind.String()))
	switch o.Kind {
	case message.Parked, message.Retry:
		span.SetStatus(codes.Error, o.Reason)
	}
	span.End()
}

// EndTry ends the span of a delivery whose transaction did not commit, or not for sure: what
// says which. It is tried again, which is a span of its own. err is nil if nothing went wrong.
func EndTry(span trace.Span, what string, err error) {
	span.SetAttributes(attribute.String("backstep.outcome", what))
	End(span, err)
}

// Step opens the span of one saga step or compensation.
func Step(ctx context.Context, sagaID, step, direction string, attempt int) (context.Context, trace.Span) {
	return tracer(ctx).Start(ctx, "step "+step, trace.WithAttributes(
		attribute.String("saga.id", sagaID), attribute.String("saga.step", step),
		attribute.String("saga.direction", direction), attribute.Int("saga.attempt", attempt)))
}

// Call opens the span of a saga step calling a system that is not ours.
func Call(ctx context.Context, sagaID, step, direction string, attempt int) (context.Context, trace.Span) {
	return tracer(ctx).Start(ctx, "call "+step, client, trace.WithAttributes(
		attribute.String("saga.id", sagaID), attribute.String("saga.step", step),
		attribute.String("saga.direction", direction), attribute.Int("saga.attempt", attempt)))
}

// End ends span, with err as its status if there is one.
func End(span trace.Span, err error) {
	if err != nil {
		span.RecordError(err)
		span.SetStatus(codes.Error, err.Error())
	}
	span.End()
}

// Extract returns ctx with the trace context of the headers, if they have one.
func Extract(ctx context.Context, h message.Headers) context.Context {
	return propagator.Extract(ctx, carrier(h))
}

// TraceID returns the trace id of ctx in hexadecimal, or "".
func TraceID(ctx context.Context) string {
	if sc := trace.SpanContextFromContext(ctx); sc.HasTraceID() {
		return sc.TraceID().String()
	}
	return ""
}

func destination(m *message.Message) string {
	if m.Exchange == message.CommandsExchange || m.Exchange == message.ParkedExchange {
		return m.RoutingKey
	}
	return m.Exchange + ":" + m.RoutingKey
}

var (
	producer = trace.WithSpanKind(trace.SpanKindProducer)
	client   = trace.WithSpanKind(trace.SpanKindClient)
	consumer = trace.WithSpanKind(trace.SpanKindConsumer)
)

// start opens a span about a message. Its attributes cost more than all else when nothing is
// recorded, so they come second: no sampler that OTEL_TRACES_SAMPLER can name looks at them.
func start(ctx context.Context, name, operation string, m *message.Message, kind trace.SpanStartOption) (context.Context, trace.Span) {
	ctx, span := tracer(ctx).Start(ctx, name, kind)
	if span.IsRecording() {
		span.SetAttributes(attributes(operation, m)...)
	}
	return ctx, span
}

func attributes(operation string, m *message.Message) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.String("messaging.system", "rabbitmq"),
		attribute.String("messaging.operation.type", operation),
		attribute.String("messaging.destination.name", m.Exchange+":"+m.RoutingKey),
		attribute.String("messaging.rabbitmq.destination.routing_key", m.RoutingKey),
		attribute.String("messaging.message.id", m.MessageID),
		attribute.String("messaging.message.conversation_id", m.CorrelationID),
	}
}

// carrier lets the propagator read headers, whether the client sent text or bytes.
type carrier message.Headers

func (c carrier) Get(key string) string { return message.Headers(c).String(key) }

func (c carrier) Set(key, value string) { c[key] = value }

func (c carrier) Keys() []string {
	keys := make([]string, 0, len(c))
	for k := range c {
		keys = append(keys, k)
	}
	return keys
}

// Rejoin returns a context that belongs to the trace with this id, for work on something of which
// only that is known. Without one, or if nothing is to be recorded, it returns ctx.
func Rejoin(ctx context.Context, traceID string) context.Context {
	id, err := trace.TraceIDFromHex(traceID)
	if err != nil || ctx.Value(unrecordedKey{}) != nil {
		return ctx
	}
	span := trace.NewSpanContext(trace.SpanContextConfig{TraceID: id, SpanID: newSpanID(), TraceFlags: trace.FlagsSampled, Remote: true})
	return trace.ContextWithRemoteSpanContext(ctx, span)
}

// newSpanID makes the id of a span that nobody has recorded: what belongs to it is shown at the
// top of its trace.
func newSpanID() (id trace.SpanID) {
	binary.BigEndian.PutUint64(id[:], rand.Uint64()|1) // not 0, which is no id
	return id
}
