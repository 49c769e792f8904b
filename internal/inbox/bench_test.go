package inbox

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"backstep/internal/message"
)

// BenchmarkLoneMessage has lanes of batch size 1 and of the default take one message each in
// turn, 20 a second, and reports the median from publish to COMMIT, in milliseconds: a message
// that comes alone must not wait for others. go test -run '^$' -bench Lone -benchtime 1000x
func BenchmarkLoneMessage(b *testing.B) {
	db := database(b)
	lanes := []*struct {
		batch     int
		publish   func(id string)
		committed chan time.Time
		took      []time.Duration
	}{{batch: 1}, {batch: 0}}
	for _, l := range lanes {
		broker, src := rabbit(b)
		l.committed = make(chan time.Time, 1)
		l.publish = func(id string) {
			p := publishings(1)
			p[0].MessageId = id
			broker.Publish(b, message.CommandsExchange, "q", p...)
		}
		run(b, db, src, Config{Queue: "q", Handler: &effects{}, Batch: l.batch, Committed: func(uint16) { l.committed <- time.Now() }})
	}
	pace := time.NewTicker(time.Second / 20)
	defer pace.Stop()
	for i := range b.N {
		for k := range lanes {
			l := lanes[(i+k)%len(lanes)]
			<-pace.C
			began := time.Now()
			l.publish(message.NewID())
			l.took = append(l.took, (<-l.committed).Sub(began))
		}
	}
	for _, l := range lanes {
		slices.Sort(l.took)
		b.ReportMetric(float64(l.took[len(l.took)/2].Microseconds())/1000, fmt.Sprintf("p50-ms/batch-%d", NewLane(nil, nil, Config{Batch: l.batch}, nil).cfg.Batch))
	}
	b.ReportMetric(0, "ns/op")
}
