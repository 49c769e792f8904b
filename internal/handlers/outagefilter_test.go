package handlers

import (
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"backstep/internal/saga"
)

// The filter that the document gives for an outage of the gateway does not choose what it has refused.
func TestFilterOfGatewayOutage(t *testing.T) {
	t.Parallel()
	const filter = "payment gateway:"
	doc, err := os.ReadFile("../../docs/operations.md")
	if err != nil || !strings.Contains(string(doc), "--error '"+filter+"'") {
		t.Fatalf("docs/operations.md has no filter %q: %v", filter, err)
	}
	for name, tt := range map[string]struct {
		status int
		body   string
		outage bool
	}{
		"no server":   {0, "", true},
		"unavailable": {http.StatusServiceUnavailable, "not now", true},
		"no JSON":     {http.StatusOK, "<html>", true},
		"refused":     {http.StatusUnprocessableEntity, `{"error":"too old"}`, false},
		"voided":      {http.StatusOK, `{"status":"voided"}`, false},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(tt.status)
			_, _ = w.Write([]byte(tt.body)) // the client would say so
		}))
		g, err := NewGateway(server.URL)
		if err != nil {
			t.Fatal(err)
		}
		if tt.status == 0 {
			server.Close()
		}
		_, err = g.refund(t.Context(), saga.Info{SagaID: "s", Step: "charge-payment", Direction: saga.Compensate}, Order{ID: "o"}, Payment{ID: "p", Gateway: true})
		if err == nil || strings.Contains(err.Error(), filter) != tt.outage {
			t.Errorf("%s: %v, chosen: want %t", name, err, tt.outage)
		}
		g.client.CloseIdleConnections()
		server.Close()
	}
}
