package outbox_test

import (
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
)

// A ring makes the relay look into the shards it names, and into no others.
func TestWake(t *testing.T) {
	t.Parallel()
	db, b := database(t), newBroker(t)
	b.queue(t, "q", nil)
	s := b.consume(t, "q")
	r := start(t, db, b, outbox.Config{PollMin: time.Hour, PollMax: time.Hour})
	eventually(t, "all shards are owned", func() bool { return r.Shards() == message.Shards })
	for i, id := range []string{"first", "second", "third"} { // its own first pass is over
		add(t, db, keyed(command("q", id), id))
		r.Wake(outbox.AllShards)
		s.await(t, i+1)
	}
	ring := func(key string) uint16 { return 1 << message.Shard(key) }
	if ring("a") == ring("b") {
		t.Fatal("these keys have one shard")
	}
	add(t, db, keyed(command("q", "for a"), "a"), keyed(command("q", "for b"), "b"))
	r.Wake(ring("b"))
	s.await(t, 4)
	eventually(t, "what was not rung for is pending", func() bool {
		return having(t, db, "PENDING") == 1 && having(t, db, "PUBLISHED") == 4
	})
	r.Wake(ring("a"))
	s.await(t, 5)
}
