package e2e

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/url"

	"backstep/internal/message"
)

// manage calls the broker's management API at the path made of the segments, as the management
// UI does, and reads the answer into out.
func (w *wheel) manage(method string, body, out any, segments ...string) {
	w.t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		w.t.Fatal(err)
	}
	root, err := url.Parse(w.broker.ManagementURL)
	if err != nil {
		w.t.Fatal(err)
	}
	u := root.JoinPath("api")
	for _, s := range segments {
		u = u.JoinPath(url.PathEscape(s))
	}
	req, err := http.NewRequestWithContext(w.t.Context(), method, u.String(), bytes.NewReader(text))
	if err != nil {
		w.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	if resp.StatusCode >= http.StatusBadRequest {
		w.t.Fatalf("%s %s: %s: %.500s", method, u.Path, resp.Status, answer)
	}
	if out == nil {
		return
	}
	if err := json.Unmarshal(answer, out); err != nil {
		w.t.Fatalf("%s %s: %s: %.500s: %v", method, u.Path, resp.Status, answer, err)
	}
}

// typed is a message as the publish form and the get form of the management UI have it.
type typed struct {
	Payload    string         `json:"payload"`
	Bytes      int            `json:"payload_bytes,omitempty"`
	Encoding   string         `json:"payload_encoding"`
	RoutingKey string         `json:"routing_key"`
	Properties map[string]any `json:"properties"`
}

func (m *typed) headers() map[string]any {
	h, _ := m.Properties["headers"].(map[string]any)
	return h
}

// publishForm does what the management UI's publish form does.
func (w *wheel) publishForm(m typed) {
	w.t.Helper()
	var answer struct{ Routed bool }
	w.manage(http.MethodPost, m, &answer, "exchanges", w.broker.Vhost, message.CommandsExchange, "publish")
	if !answer.Routed {
		w.t.Fatalf("the publish form: the message %v went to no queue", m.Properties)
	}
}

// getForm does what the management UI's get form does: it shows what is in a queue, and leaves
// it there.
func (w *wheel) getForm(queue string, most int) (shown []typed) {
	w.t.Helper()
	w.manage(http.MethodPost, map[string]any{
		"count": most, "ackmode": "reject_requeue_true", "encoding": "auto", "truncate": 500_000,
	}, &shown, "queues", w.broker.Vhost, queue, "get")
	return shown
}

// limit sets how often the broker delivers a message of our queues whose consumers die.
func (w *wheel) limit(deliveries int) {
	w.t.Helper()
	w.manage(http.MethodPut, map[string]any{
		"pattern": ".*", "apply-to": "queues", "priority": 100, "definition": map[string]any{"delivery-limit": deliveries},
	}, nil, "policies", w.broker.Vhost, "limit")
}
