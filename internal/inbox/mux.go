package inbox

import (
	"context"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Mux is a Handler that hands each message to the handler of its type. A message of another
// type is parked.
type Mux map[string]Handler

// HandleBatch calls every handler involved once, with its messages in their order.
func (x Mux) HandleBatch(ctx context.Context, tx *sqltx.Tx, msgs []message.Message) []message.Outcome {
	out := make([]message.Outcome, len(msgs))
	var order []Handler
	index := map[Handler][]int{}
	for i := range msgs {
		h, ok := x[msgs[i].Type]
		if !ok {
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
			break
		}
	}
	return out
}
