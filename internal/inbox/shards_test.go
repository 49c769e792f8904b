package inbox

import (
	"context"
	"testing"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// After a commit the relays are rung for the shards that it has added rows to, and no others.
func TestCommittedTellsTheShards(t *testing.T) {
	db, b := database(t), newBroker("q")
	keys := map[string]string{"one": "a", "two": "b"}
	h := &effects{OutcomeFunc: func(ctx context.Context, tx *sqltx.Tx, m *message.Message) message.Outcome {
		event := message.Message{
			Properties: message.Properties{Type: "event"}, Exchange: "e", RoutingKey: "k", OrderingKey: keys[m.MessageID],
		}
		if err := outbox.Add(ctx, tx, event); err != nil {
			t.Error(err)
		}
		return message.Outcome{}
	}}
	rung := make(chan uint16, 10)
	run(t, db, b, Config{Queue: "q", Handler: h, Committed: func(shards uint16) { rung <- shards }})
	for id, key := range keys {
		b.put(msg(id))
		if got, want := receive(t, "ring", rung), uint16(1)<<message.Shard(key); got != want {
			t.Errorf("rung for %016b, want %016b", got, want)
		}
	}
}
