package inbox

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
)

// B61: a lane needs one connection at a time, duplicates and conflicts included. So a pool that has
// one for each lane, or fewer, makes nobody wait for ever, nor does somebody who keeps one for long.
func TestSmallPools(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		connections, lanes int
		keep               time.Duration // how long somebody else keeps one
	}{{4, 4, 0}, {1, 1, 0}, {1, 4, 0}, {2, 2, 3 * time.Second}} {
		t.Run(fmt.Sprintf("%d connections, %d lanes", tt.connections, tt.lanes), func(t *testing.T) {
			t.Parallel()
			db := database(t)
			db.SetMaxOpenConns(tt.connections)
			h := &effects{}
			msgs := newMsgs(200)
			var kept sync.WaitGroup
			if tt.keep > 0 {
				kept.Go(func() {
					if _, err := db.ExecContext(t.Context(), `SELECT SLEEP(?)`, tt.keep.Seconds()); err != nil {
						t.Error(err)
					}
				})
			}
			var brokers []*broker
			for some := range slices.Chunk(msgs, len(msgs)/tt.lanes) {
				b := newBroker("q", append(some[:len(some):len(some)], some[0])...)
				run(t, db, b, Config{Queue: "q", Handler: h, Batch: 8})
				brokers = append(brokers, b)
			}
			for _, b := range brokers {
				eventually(t, "all are acked", b.settled(len(msgs)/tt.lanes+1))
			}
			equal(t, "effects", number(t, db, `SELECT COUNT(*) FROM effects`), len(msgs))
			kept.Wait()
		})
	}
}
