package inbox

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"backstep/internal/message"
)

// Parked is a message in <queue>.parked and what it was before, as far as the copy tells.
type Parked struct {
	Queue  string    // it was parked from
	ID     string    // it has in <queue>.parked; "" if it has none there either
	Reason string    // x-parked-reason; for a dead letter the broker's, in words
	At     time.Time // zero: it does not say
	From   string    // x-parked-from, which is Queue unless somebody moved it
	Death  *Death    // the broker parked it; nil: a lane did
	Fault  string    // why the original cannot be read, which then is the copy; "": it can

	// Original is the message as it was: properties, headers and body.
	Original message.Message
}

// Name returns what p is named by: its id in <queue>.parked, or if it has none what tells it
// from others.
func (p *Parked) Name() string {
	if p.ID != "" {
		return p.ID
	}
	return fmt.Sprintf("no-id:%x", sha256.Sum256(p.Original.Body))[:len("no-id:")+16]
}

// Death is what x-death says of the last time the broker dead-lettered a message.
type Death struct {
	Reason string    `json:"reason"` // rejected, delivery_limit, expired, maxlen
	Queue  string    `json:"queue"`
	Count  int       `json:"count"`
	At     time.Time `json:"at,omitzero"`
}

// counters are headers that the broker adds to what it delivers again.
var counters = []string{"x-delivery-count", "x-acquired-count"}

// Unpark reads d, which came from <queue>.parked. It undoes what parkedCopy does, and what the
// outbox adds to a message: of what a lane parked the original has the properties, headers and
// body that the lane got, save for the counters of the broker, and for its place in its trace:
// that is behind the parking.
func Unpark(d *message.Delivery, queue string) Parked {
	p := Parked{
		Queue: queue, ID: d.MessageID, Original: d.Message,
		Reason: d.Headers.String(message.HeaderParkedReason), From: d.Headers.String(message.HeaderParkedFrom),
	}
	p.At, _ = time.Parse(time.RFC3339Nano, d.Headers.String(message.HeaderParkedAt)) // zero if it does not say
	if p.Reason == "" {
		p.Death = lastDeath(d.Headers, queue)
	}
	if p.Death != nil {
		p.Reason, p.At, p.From = p.Death.words(len(d.Body)), p.Death.At, p.Death.Queue
	}
	if d.Unreadable != "" { // only the broker has its headers, and its reason with them
		p.Fault = d.Unreadable
		p.Reason = "dead-lettered by the broker: " + d.Unreadable
	} else if err := p.restore(d); err != nil {
		p.Original, p.Fault = d.Message, err.Error()
	}
	p.Original.Exchange, p.Original.RoutingKey = message.CommandsExchange, queue
	return p
}

func (p *Parked) restore(d *message.Delivery) error {
	m := &p.Original
	if kept := d.Headers.String(message.HeaderParkedProperties); kept != "" {
		properties, err := message.DecodeProperties([]byte(kept))
		if err != nil {
			return fmt.Errorf("header %s does not decode: %w", message.HeaderParkedProperties, err)
		}
		m.Properties = properties
	}
	if d.Headers[message.HeaderParkedEnvelope] == true {
		return openEnvelope(m)
	}
	m.Headers = maps.Clone(d.Headers)
	if added, ok := d.Headers[message.HeaderParkedAdded].([]any); ok {
		for _, name := range added {
			if name, ok := name.(string); ok {
				delete(m.Headers, name)
			}
		}
	}
	maps.DeleteFunc(m.Headers, func(name string, _ any) bool { return strings.HasPrefix(name, message.HeaderParkedPrefix) })
	for _, name := range counters {
		delete(m.Headers, name)
	}
	return nil
}

// openEnvelope takes a message out of the envelope.
func openEnvelope(m *message.Message) error {
	var e struct {
		Headers json.RawMessage `json:"headers"`
		Body    *[]byte         `json:"body"`
	}
	err := json.Unmarshal(m.Body, &e)
	if err == nil && (e.Headers == nil || e.Body == nil) {
		err = errors.New("it has no headers, or no body")
	}
	if err != nil {
		return fmt.Errorf("the envelope does not decode: %w", err)
	}
	headers, err := message.DecodeHeaders(e.Headers)
	if err != nil {
		return fmt.Errorf("the envelope does not decode: %w", err)
	}
	if named, ok := unpairs(headers); ok {
		headers = named
	}
	m.Headers, m.Body = headers, *e.Body
	return nil
}

// unpairs undoes pairs. ok is false if that has not been done: it is only done to names that
// are not UTF-8, and who has such a table without them meant it.
func unpairs(h message.Headers) (named message.Headers, ok bool) {
	v, err := unpair(h)
	if err != nil {
		return nil, false
	}
	named, ok = v.(message.Headers)
	if _, err := message.EncodeHeaders(named); err == nil {
		return nil, false
	}
	return named, ok
}

var errNotPairs = errors.New("not a table of pairs")

func unpair(v any) (any, error) {
	switch v := v.(type) {
	case message.Headers:
		list, ok := v["$pairs"].([]any)
		if !ok || len(v) != 1 {
			return nil, errNotPairs
		}
		h := make(message.Headers, len(list))
		for _, p := range list {
			pair, ok := p.([]any)
			if !ok || len(pair) != 2 {
				return nil, errNotPairs
			}
			name, ok := pair[0].(string)
			if !ok {
				return nil, errNotPairs
			}
			value, err := unpair(pair[1])
			if err != nil {
				return nil, err
			}
			h[name] = value
		}
		return h, nil
	case []any:
		list := make([]any, len(v))
		for i := range v {
			value, err := unpair(v[i])
			if err != nil {
				return nil, err
			}
			list[i] = value
		}
		return list, nil
	}
	return v, nil
}

// lastDeath returns what x-death says about the queue, or about any if it says nothing of that
// one: the latest comes first. nil if the broker dead-lettered nothing.
func lastDeath(h message.Headers, queue string) *Death {
	list, _ := h["x-death"].([]any)
	var last *Death
	for _, v := range list {
		entry, ok := v.(message.Headers)
		if !ok {
			continue
		}
		d := Death{Reason: entry.String("reason"), Queue: entry.String("queue")}
		d.Count, _ = entry.Int("count") // 0 if it does not say
		d.At, _ = entry["time"].(time.Time)
		if d.Queue == queue {
			return &d
		}
		if last == nil {
			last = &d
		}
	}
	return last
}

// words says why the broker dead-lettered a message with a body of so many bytes. Who rejects says no
// reason: it may have been somebody in the management UI.
func (d *Death) words(bytes int) string {
	why := map[string]string{
		"rejected":       "a consumer did not want it back; why is not known here, and if it was a worker its log says so",
		"delivery_limit": "it was delivered again and again, and each time its worker died or lost the connection",
		"expired":        "its expiration passed before a worker took it",
		"maxlen":         "the queue was full",
	}[d.Reason]
	switch {
	case why == "":
		return "dead-lettered by the broker: " + d.Reason
	case d.Reason == "rejected" && bytes > maxParkedBody:
		why = "its body has more than 4 MiB, which no worker takes"
	}
	return fmt.Sprintf("dead-lettered by the broker: %s (%s)", d.Reason, why)
}

// Replay returns the message to publish so that the queue it was parked from gets it again,
// and what of it the broker would not carry there, in words.
func (p *Parked) Replay() (m message.Message, without []string) {
	m = p.Original
	m.Mandatory, m.DeliveryMode = true, 2
	m.Headers = maps.Clone(m.Headers)
	delete(m.Headers, message.HeaderDeferredSince) // it may be deferred anew
	delete(m.Headers, message.HeaderDeferredFor)
	delete(m.Headers, message.HeaderUnhandledFor)
	if m.UserID != "" {
		without = append(without, fmt.Sprintf("user_id %q, which the broker takes from that user alone", m.UserID))
		m.UserID = ""
	}
	for _, name := range routing {
		if _, ok := m.Headers[name]; ok {
			without = append(without, "header "+name+", which would send it to other queues too")
			delete(m.Headers, name)
		}
	}
	return m, without
}
