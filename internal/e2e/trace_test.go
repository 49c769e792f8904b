package e2e

import (
	"compress/gzip"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"backstep/internal/handlers"
)

// spans is an OTLP endpoint that keeps what it gets, by trace id.
type spans struct {
	mu  sync.Mutex // guards the map, which the HTTP server's goroutines write to
	got map[string]map[string]*otlp.Span
	url string
}

func newSpans(t *testing.T) *spans {
	t.Helper()
	s := &spans{got: map[string]map[string]*otlp.Span{}}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := r.Body
		if r.Header.Get("Content-Encoding") == "gzip" {
			zr, err := gzip.NewReader(body)
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			body = zr
		}
		b, err := io.ReadAll(body)
		var req collector.ExportTraceServiceRequest
		if err == nil {
			err = proto.Unmarshal(b, &req)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, rs := range req.ResourceSpans {
			for _, ss := range rs.ScopeSpans {
				for _, span := range ss.Spans {
					trace := hex.EncodeToString(span.TraceId)
					if s.got[trace] == nil {
						s.got[trace] = map[string]*otlp.Span{}
					}
					s.got[trace][hex.EncodeToString(span.SpanId)] = span
				}
			}
		}
	}))
	t.Cleanup(srv.Close)
	s.url = srv.URL
	return s
}

// path returns the names of a span's ancestors and its own, as far as the trace has them.
func path(trace map[string]*otlp.Span, span *otlp.Span) string {
	names := []string{span.Name}
	for {
		parent, ok := trace[hex.EncodeToString(span.ParentSpanId)]
		if !ok {
			break
		}
		names = append(names, parent.Name)
		span = parent
	}
	slices.Reverse(names)
	return strings.Join(names, " > ")
}

// One saga is one trace, across relays and workers: create has the children publish and
// process, process has the step, and the step has the next create.
func TestOneSagaIsOneTrace(t *testing.T) {
	w := newWheel(t)
	s := newSpans(t)
	env := []string{
		"OTEL_EXPORTER_OTLP_ENDPOINT=" + s.url, "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf", "OTEL_BSP_SCHEDULE_DELAY=200",
	}
	procs := append(w.together("relay", 2, env...), w.together("worker", 2, env...)...)
	w.awaitQueues()
	confirmed := "0af7651916cd43dd8448eb211c80319c"
	compensated := "1bf7651916cd43dd8448eb211c80319c"
	for trace, change := range map[string]func(*handlers.CreateOrder){
		confirmed:   nil,
		compensated: func(o *handlers.CreateOrder) { o.ShipTo.Country = "ZZ" },
	} {
		msg := request(t, change)
		msg.Headers = amqp091.Table{"traceparent": "00-" + trace + "-b7ad6b7169203331-01"}
		w.submit(msg)
	}
	w.rest(2, 30*time.Second)
	w.verify(expectation{confirmed: 1, refused: 1})
	stopAll(procs...) // sends the spans that are left

	s.mu.Lock()
	defer s.mu.Unlock()
	const round = "process %s > step %s > create %s > "
	forward := "process orders > create inventory > " + fmt.Sprintf(round, "inventory", "reserve-stock", "payment") +
		fmt.Sprintf(round, "payment", "charge-payment", "shipping")
	back := forward + fmt.Sprintf(round, "shipping", "create-shipment", "payment") + fmt.Sprintf(round, "payment", "charge-payment", "inventory")
	for _, tt := range []struct{ trace, last, publish string }{
		{confirmed, forward + "process shipping > step create-shipment", forward + "publish shipping"},
		{compensated, back + "process inventory > step reserve-stock", back + "publish inventory"},
	} {
		var paths []string
		for _, span := range s.got[tt.trace] {
			paths = append(paths, path(s.got[tt.trace], span))
		}
		slices.Sort(paths)
		for _, want := range []string{tt.last, tt.publish} {
			if !slices.Contains(paths, want) {
				t.Errorf("trace %s has no span\n  %s\nbut\n  %s", tt.trace, want, strings.Join(paths, "\n  "))
			}
		}
	}
	if len(s.got) != 2 {
		t.Errorf("%d traces for 2 sagas", len(s.got))
	}
	if n := w.count(`SELECT COUNT(*) FROM saga_instances WHERE trace_id IN (?, ?)`, []byte(confirmed), []byte(compensated)); n != 2 {
		t.Errorf("%d sagas know their trace id, want 2", n)
	}
}
