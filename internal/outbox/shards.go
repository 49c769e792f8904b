package outbox

import (
	"context"

	"backstep/internal/message"
)

type shardsKey struct{}

// NoteShards returns a context in which Add notes the shards it adds rows to, one bit each: when
// they have committed it is those that relays are to be rung for. shards belongs to ctx's
// transaction until then.
func NoteShards(ctx context.Context, shards *uint16) context.Context {
	return context.WithValue(ctx, shardsKey{}, shards)
}

func noteShards(ctx context.Context, msgs []message.Message) {
	shards, ok := ctx.Value(shardsKey{}).(*uint16)
	if !ok {
		return
	}
	for i := range msgs {
		if key := msgs[i].Key(); key != "" {
			*shards |= 1 << message.Shard(key)
		} else {
			*shards = AllShards // it gets an id, and by that its shard
		}
	}
}
