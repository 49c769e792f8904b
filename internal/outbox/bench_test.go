package outbox_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/bench"
	"backstep/internal/outbox"
)

// BenchmarkBacklog measures how long rows take from their commit to their consumer, a hundred
// a second, while a hundred thousand cannot go, at the head of all others.
//
//	go test -run '^$' -bench Backlog -benchtime 2000x ./internal/outbox
func BenchmarkBacklog(b *testing.B) {
	const n = 100_000
	for _, bb := range []struct {
		name       string
		rows, keys int
	}{
		{"nothing", 0, 0},
		{"blocked key", n, 1},
		{"full queue", n, n},
	} {
		b.Run("head="+bb.name, func(b *testing.B) {
			db, broker := database(b), newBroker(b)
			broker.queue(b, "q", amqp091.Table{"x-max-length": 1, "x-overflow": "reject-publish"})
			broker.queue(b, "free", nil)
			addBacklog(b, db, bb.rows, bb.keys, 0)
			exec(b, db, `ANALYZE TABLE outbox_events`)
			s := broker.consume(b, "free")
			r := start(b, db, broker, outbox.Config{PollMax: 250 * time.Millisecond})
			add(b, db, command("free", "first"))
			s.await(b, 1)
			eventually(b, "the backlog is walked over once", func() bool { return r.RowsRead() > bb.rows })

			before := r.RowsRead()
			waits := make([]time.Duration, b.N)
			var wg sync.WaitGroup
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			b.ResetTimer()
			for i := range b.N {
				<-tick.C
				wg.Go(func() {
					id := fmt.Sprintf("m%d", i)
					add(b, db, command("free", id))
					committed := time.Now()
					r.Wake(outbox.AllShards) // as the doorbell does
					waits[i] = s.when(b, id).Sub(committed)
				})
			}
			wg.Wait()
			b.ReportMetric(float64(bench.Quantile(waits, 0.5).Microseconds())/1000, "p50-ms")
			b.ReportMetric(float64(bench.Quantile(waits, 0.99).Microseconds())/1000, "p99-ms")
			b.ReportMetric(float64(bench.Quantile(waits, 1).Microseconds())/1000, "max-ms")
			b.ReportMetric(float64(r.RowsRead()-before)/float64(b.N), "read/row")
			b.Logf("doubts %d jumps %d", r.Doubts(), r.Jumps())
		})
	}
}

// when waits for a message and returns when it arrived.
func (s *sink) when(t testing.TB, id string) (at time.Time) {
	t.Helper()
	eventually(t, id+" arrives", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		var ok bool
		at, ok = s.arrived[id]
		return ok
	})
	return at
}
