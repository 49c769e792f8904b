package inbox

import (
	"context"
	"mime"
	"strings"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Mux is a Handler that hands each message to the one it is for: saga commands and replies,
// known by their x-saga-id header, to Sagas; others by their type. What is for nobody is
// parked, and so is what says that it is no JSON: a body of another format may decode by chance.
type Mux struct {
	Types map[string]Handler // comparable, as pointers are
	Sagas Handler
}

// HandleBatch calls every handler involved once, with its messages in their order.
func (x *Mux) HandleBatch(ctx context.Context, tx *sqltx.Tx, msgs []message.Message) []message.Outcome {
	out := make([]message.Outcome, len(msgs))
	var order []Handler
	index := map[Handler][]int{}
	for i := range msgs {
		h := x.handler(&msgs[i])
		if t := msgs[i].ContentType; !isJSON(t) {
			out[i] = message.Park("content_type %q; bodies are application/json", t)
			continue
		}
		if h == nil {
			out[i] = message.Park("unknown message type %q", msgs[i].Type)
			continue
		}
		if index[h] == nil {
			order = append(order, h)
		}
		index[h] = append(index[h], i)
	}
	for _, h := range order {
		part := make([]message.Message, len(index[h]))
		for k, i := range index[h] {
			part[k] = msgs[i]
		}
		for k, o := range h.HandleBatch(ctx, tx, part) {
			out[index[h][k]] = o
		}
		if tx.Err() != nil {
			break // the lane runs the batch again
		}
	}
	return out
}

func (x *Mux) handler(m *message.Message) Handler {
	if h, ok := x.Types[m.Type]; ok {
		return h
	}
	if m.Headers.String(message.HeaderSagaID) != "" {
		return x.Sagas
	}
	return nil
}

// isJSON reports whether a content type is that of JSON, or none: who types a message by hand
// leaves it out.
func isJSON(contentType string) bool {
	if contentType == "" {
		return true
	}
	t, _, err := mime.ParseMediaType(contentType)
	return err == nil && (t == "application/json" || strings.HasPrefix(t, "application/") && strings.HasSuffix(t, "+json"))
}
