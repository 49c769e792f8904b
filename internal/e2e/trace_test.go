package e2e

import (
	"compress/gzip"
	"encoding/hex"
	"errors"
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

// env makes a process send its spans, by the standard variables.
func (s *spans) env() []string {
	return []string{
		"OTEL_EXPORTER_OTLP_ENDPOINT=" + s.url, "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf", "OTEL_BSP_SCHEDULE_DELAY=200",
	}
}

// has demands a span, named by its path. s.mu is held.
func (s *spans) has(t *testing.T, trace, want string) {
	t.Helper()
	var paths []string
	for _, span := range s.got[trace] {
		paths = append(paths, path(s.got[trace], span))
	}
	slices.Sort(paths)
	if !slices.Contains(paths, want) {
		t.Errorf("trace %s has no span\n  %s\nbut\n  %s", trace, want, strings.Join(paths, "\n  "))
	}
}

// value returns a text attribute of a span.
func value(span *otlp.Span, key string) string {
	for _, a := range span.Attributes {
		if a.Key == key {
			return a.Value.GetStringValue()
		}
	}
	return ""
}

// A step in a trace, and the way of an order to its last step.
const (
	round   = "process %s > step %s > create %s > "
	forward = "process orders > create inventory > process inventory > step reserve-stock > create payment > " +
		"process payment > step charge-payment > create shipping > "
)

// One saga is one trace, across relays and workers: create has the children publish and
// process, process has the step, and the step has the next create.
func TestOneSagaIsOneTrace(t *testing.T) {
	w := newWheel(t)
	s := newSpans(t)
	procs := append(w.together("relay", 2, s.env()...), w.together("worker", 2, s.env()...)...)
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
	back := forward + fmt.Sprintf(round, "shipping", "create-shipment", "payment") + fmt.Sprintf(round, "payment", "charge-payment", "inventory")
	for _, tt := range []struct{ trace, last, publish string }{
		{confirmed, forward + "process shipping > step create-shipment", forward + "publish shipping"},
		{compensated, back + "process inventory > step reserve-stock", back + "publish inventory"},
	} {
		s.has(t, tt.trace, tt.last)
		s.has(t, tt.trace, tt.publish)
		for _, span := range s.got[tt.trace] {
			if strings.HasPrefix(span.Name, "publish ") && value(span, "backstep.result") != "confirmed" {
				t.Errorf("span %s has result %q, want confirmed", span.Name, value(span, "backstep.result"))
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

// A retry is part of the trace: the attempt that failed, with its error, is the parent of the
// next one, which has waited in scheduled_messages.
func TestRetriedSagaIsOneTrace(t *testing.T) {
	w := newWheel(t)
	s := newSpans(t)
	if _, err := w.db.ExecContext(t.Context(), `
CREATE TRIGGER no_labels BEFORE INSERT ON shipments
   FOR EACH ROW SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'out of labels'`); err != nil {
		t.Fatal(err)
	}
	procs := []*proc{w.start("relay", s.env()...), w.start("worker", s.env()...)}
	w.awaitQueues()
	const trace = "0af7651916cd43dd8448eb211c80319c"
	msg := request(t, nil)
	msg.Headers = amqp091.Table{"traceparent": "00-" + trace + "-b7ad6b7169203331-01"}
	w.submit(msg)
	w.eventually(60*time.Second, "the shipment is tried again", func() error {
		if w.count(`SELECT COUNT(*) FROM saga_instances WHERE current_step = 2 AND attempt > 1`) == 0 {
			return errors.New("it is not")
		}
		return nil
	})
	if _, err := w.db.ExecContext(t.Context(), `DROP TRIGGER no_labels`); err != nil {
		t.Fatal(err)
	}
	w.rest(1, 60*time.Second)
	w.verify(expectation{confirmed: 1})
	stopAll(procs...)

	s.mu.Lock()
	defer s.mu.Unlock()
	attempts := w.count(`SELECT attempts FROM saga_steps WHERE step_order = 2`)
	retries := strings.Repeat(fmt.Sprintf(round, "shipping", "create-shipment", "shipping"), attempts-1)
	s.has(t, trace, forward+retries+"process shipping > step create-shipment")
	s.has(t, trace, forward+retries+"publish shipping")
	failed := 0
	for _, span := range s.got[trace] {
		if span.Name == "step create-shipment" && strings.Contains(span.Status.GetMessage(), "out of labels") {
			failed++
		}
	}
	if failed != attempts-1 {
		t.Errorf("%d step spans say why they failed, want %d", failed, attempts-1)
	}
	if len(s.got) != 1 {
		t.Errorf("%d traces for 1 saga", len(s.got))
	}
}
