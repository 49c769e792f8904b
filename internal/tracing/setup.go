package tracing

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.40.0"
)

// Setup makes the process export its spans as the standard OTEL_ variables say. Without an
// endpoint, or another exporter in OTEL_TRACES_EXPORTER, nothing is recorded or exported:
// the exporter's own default would fill the log with failures to reach localhost. stop sends
// what is left; call it last.
func Setup(ctx context.Context, service, version string) (stop func(context.Context) error, err error) {
	if !wanted() {
		return func(context.Context) error { return nil }, nil
	}
	exporter, err := autoexport.NewSpanExporter(ctx)
	if err != nil {
		return nil, fmt.Errorf("traces: %w; see OTEL_TRACES_EXPORTER and OTEL_EXPORTER_OTLP_ENDPOINT", err)
	}
	// OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override ours.
	res, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithHost(), resource.WithAttributes(
		semconv.ServiceName(service), semconv.ServiceVersion(version)), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("traces: resource: %w", err)
	}
	provider := trace.NewTracerProvider(trace.WithBatcher(exporter), trace.WithResource(res))
	otel.SetTracerProvider(provider)
	// Its own handler says it in plain text, as if nothing were wrong.
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		slog.Warn("traces not sent; see OTEL_EXPORTER_OTLP_ENDPOINT", "error", err)
	}))
	return provider.Shutdown, nil
}

func wanted() bool {
	if os.Getenv("OTEL_SDK_DISABLED") == "true" {
		return false
	}
	if e := os.Getenv("OTEL_TRACES_EXPORTER"); e != "" {
		return e != "none"
	}
	return os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}
