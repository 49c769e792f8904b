package gateway_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"backstep/internal/testenv/gateway"
)

// What a person types is taken, or it is said what is wrong with it, and what went wrong before stays.
func TestFaultsThatAreTyped(t *testing.T) {
	t.Parallel()
	const before = `{"fault": "fail-before"}`
	for body, says := range map[string]string{
		`{"fault": "slow", "on": "charges", "times": 3, "delay_ms": 2000}`: "",
		`{"fault": "decline", "on": "refunds"}` + "\n":                     "",
		`{"fault": "none"}`: "",
		`{"fault": ""}`:     "",

		`fault=slow`:                           `it takes one like {\"fault\": \"slow\"`,
		``:                                     `it takes one like`,
		`["slow"]`:                             `it takes one like`,
		`{"fault": 1}`:                         `it takes one like`,
		`{"falt": "slow"}`:                     `unknown field \"falt\"`,
		`{}`:                                   `it names no fault; there are [slow fail-before fail-after cut-after decline], and none is the end of it`,
		`{"fault": null, "on": "charges"}`:     `it names no fault`,
		`{"fault": "broken"}`:                  `no fault \"broken\"; there are [slow fail-before fail-after cut-after decline], and none is the end of it`,
		`{"fault": "decline", "on": "orders"}`: `on charges, refunds or both, not on \"orders\"`,
		`{"fault": "decline", "times": -1}`:    `it cannot go wrong -1 times`,
		`{"fault": "slow"}`:                    `a slow one waits for 1 ms to 10m0s, not for 0s`,
		`{"fault": "slow", "delay_ms": -1}`:    `not for -1ms`,
		`{"fault": "slow", "delay_ms": 9223372036854775807}`: `a slow one waits for 1 ms to 10m0s`,
		`{"fault": "decline", "delay_ms": 5}`:                `delay_ms is for slow alone, not for \"decline\"`,
		`{"fault": "slow", "delay_ms": 5} {"fault": "none"}`: `there is more behind it`,
	} {
		var g gateway.Gateway
		if status, said := post(&g, "/faults", before); status != http.StatusNoContent {
			t.Fatalf("%s: %d %s", before, status, said)
		}
		want, charged := http.StatusBadRequest, http.StatusInternalServerError
		if says == "" {
			want, charged = http.StatusNoContent, http.StatusCreated
		}
		if status, said := post(&g, "/faults", body); status != want || !strings.Contains(said, says) {
			t.Errorf("%s: %d %s, want %d %s", body, status, said, want, says)
		}
		if strings.Contains(body, "2000") {
			continue // it takes as long
		}
		if status, said := post(&g, "/charges", `{"order": "o"}`); status != charged {
			t.Errorf("a charge after %s: %d %s, want %d", body, status, said, charged)
		}
	}
}

// Each kind that there is says what it does.
func TestKindsHaveAMeaning(t *testing.T) {
	t.Parallel()
	of := map[string]gateway.Kind{}
	for _, k := range append([]gateway.Kind{gateway.None}, gateway.Kinds...) {
		if other, ok := of[k.Meaning()]; ok {
			t.Errorf("%s and %s mean the same: %s", k, other, k.Meaning())
		}
		of[k.Meaning()] = k
	}
}

func post(g *gateway.Gateway, path, body string) (status int, said string) {
	r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
	r.Header.Set("Idempotency-Key", "k")
	w := httptest.NewRecorder()
	g.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}
