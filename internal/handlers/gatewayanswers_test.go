package handlers

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"backstep/internal/saga"
)

// answering is a gateway that gives one answer to all, and keeps the last request.
func answering(t *testing.T, status int, body string) (g *Gateway, last *http.Request, sent *gatewayRequest) {
	t.Helper()
	last, sent = &http.Request{}, &gatewayRequest{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		*last = *r
		_ = json.NewDecoder(r.Body).Decode(sent) // a question has no body
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body)) // who asks finds out
	}))
	t.Cleanup(server.Close)
	g, err := NewGateway(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.client.CloseIdleConnections)
	return g, last, sent
}

// Each answer is taken for what it says: that it was done, that it was not and never will be, or that
// nobody knows.
func TestAnswersOfTheGateway(t *testing.T) {
	const done, no, unknown = "done", "no", "unknown"
	for name, tt := range map[string]struct {
		status                int
		body                  string
		charge, asked, refund string
	}{
		"payment required": {402, `{"status":"declined"}`, no, unknown, no},
		"unprocessable":    {422, `{}`, no, unknown, no},
		"conflict":         {409, `{}`, unknown, unknown, unknown},
		"out of order":     {500, `no JSON`, unknown, unknown, unknown},
		"no JSON":          {200, `hello`, unknown, unknown, unknown},
		"charged":          {200, `{"id":"p1","status":"charged"}`, done, done, unknown},
		"declined":         {200, `{"id":"p1","status":"declined"}`, done, no, unknown},
		"refunded":         {200, `{"id":"r1","status":"refunded","charge_id":"p1"}`, done, no, done},
		"refunded what":    {200, `{"id":"r1","status":"refunded"}`, done, no, unknown},
		"long id":          {200, `{"id":"r1","status":"refunded","charge_id":"p123456789012345678901234567890123456"}`, done, no, unknown},
		"another status":   {200, `{"id":"r1","status":"pending","charge_id":"p1"}`, done, no, unknown},
	} {
		t.Run(name, func(t *testing.T) {
			g, last, sent := answering(t, tt.status, tt.body)
			is := func(what, want string, err error) {
				t.Helper()
				got := done
				if saga.IsPermanent(err) {
					got = no
				} else if err != nil {
					got = unknown
				}
				if got != want {
					t.Errorf("%s: %s (%v), want %s", what, got, err, want)
				}
			}
			o := Order{ID: "o"}
			o.TotalCents = 3
			info := saga.Info{SagaID: "s", Step: "charge-payment", Direction: saga.Execute}
			_, err := g.charge(t.Context(), info, o)
			is("charge", tt.charge, err)
			if key := last.Header.Get("Idempotency-Key"); key != "s:charge-payment:execute" || sent.Order != "o" || sent.AmountCents != 3 {
				t.Errorf("charged with the key %q: %+v", key, sent)
			}
			info.Called = true
			_, err = g.charge(t.Context(), info, o)
			is("charge, asked first", tt.asked, err)
			if last.Method != http.MethodGet || last.URL.Path != "/charges/s:charge-payment:execute" {
				t.Errorf("asked with %s %s", last.Method, last.URL)
			}
			info.Direction, info.Unknown = saga.Compensate, true
			_, err = g.refund(t.Context(), info, o, Payment{})
			is("refund", tt.refund, err)
			if key := last.Header.Get("Idempotency-Key"); key != "s:charge-payment:compensate" || sent.ChargeKey != "s:charge-payment:execute" || sent.AmountCents != 3 {
				t.Errorf("refunded with the key %q: %+v", key, sent)
			}
		})
	}
}

// A request whose connection is closed amid it is not repeated behind the engine's back.
func TestGatewayIsNotAskedTwiceByItself(t *testing.T) {
	var n atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if n.Add(1) == 2 { // on the connection that the first has left open
			if c, _, err := w.(http.Hijacker).Hijack(); err == nil {
				_ = c.Close() // that is the point
			}
			return
		}
		_, _ = w.Write([]byte(`{"id":"p1","status":"charged"}`)) // who asks finds out
	}))
	defer server.Close()
	g, err := NewGateway(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer g.client.CloseIdleConnections()
	info := saga.Info{SagaID: "s", Step: "charge-payment", Direction: saga.Execute}
	if _, err := g.charge(t.Context(), info, Order{ID: "o"}); err != nil {
		t.Fatal(err)
	}
	if _, err := g.charge(t.Context(), info, Order{ID: "o"}); err == nil || saga.IsPermanent(err) {
		t.Errorf("charged, or not: %v", err)
	}
	if got := n.Load(); got != 2 {
		t.Errorf("%d requests, want 2", got)
	}
}
