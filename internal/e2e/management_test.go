package e2e

import (
	"net/http"

	"backstep/internal/message"
)

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
	w.broker.Manage(w.t, http.MethodPost, m, &answer, "exchanges", w.broker.Vhost, message.CommandsExchange, "publish")
	if !answer.Routed {
		w.t.Fatalf("the publish form: the message %v went to no queue", m.Properties)
	}
}

// getForm does what the management UI's get form does: it shows what is in a queue, and leaves
// it there.
func (w *wheel) getForm(queue string, most int) (shown []typed) {
	w.t.Helper()
	w.broker.Manage(w.t, http.MethodPost, map[string]any{
		"count": most, "ackmode": "reject_requeue_true", "encoding": "auto", "truncate": 500_000,
	}, &shown, "queues", w.broker.Vhost, queue, "get")
	return shown
}

// limit sets how often the broker delivers a message of our queues whose consumers die.
func (w *wheel) limit(deliveries int) {
	w.t.Helper()
	w.broker.Manage(w.t, http.MethodPut, map[string]any{
		"pattern": ".*", "apply-to": "queues", "priority": 100, "definition": map[string]any{"delivery-limit": deliveries},
	}, nil, "policies", w.broker.Vhost, "limit")
}
