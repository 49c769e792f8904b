package e2e

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// A backlog that is many times older than what counts as lost is left alone while workers take from
// it, however slowly: nothing is sent again. What is lost among it still is, and nothing else.
func TestBacklogIsNotAmplified(t *testing.T) {
	t.Parallel()
	const backlog = 20_000
	def := saga.Define("slow", 1, saga.Step("slow", handlers.InventoryQueue,
		func(context.Context, *sqltx.Tx, int) (int, error) {
			time.Sleep(50 * time.Millisecond) // the worker is slow
			return 0, nil
		}, nil))
	w := newWheel(t)
	w.start("relay")
	w.awaitQueues()
	// It is given a copy of all that is sent to the workers.
	w.sink("copies")
	w.broker.Bind(t, message.CommandsExchange, "copies", handlers.InventoryQueue)
	w.beginMany(def, backlog)
	w.eventually(60*time.Second, "all commands are published", func() error {
		if n := w.count(`SELECT COUNT(*) FROM outbox_events WHERE status = 'PENDING'`); n > 0 {
			return fmt.Errorf("%d are not", n)
		}
		return nil
	})
	for range 2 {
		w.ownWorker(def, saga.KeeperConfig{RescueAfter: limit}, 4, handlers.InventoryQueue)
	}
	sent := func(want int, what string) {
		t.Helper()
		w.eventually(20*time.Second, what, func() error {
			again := w.count(`SELECT COUNT(*) FROM outbox_events WHERE generation > 0`)
			copies, _ := w.broker.Queue(t, "copies")
			if n := w.rescues(); n != want || again != want || copies != backlog+want {
				return fmt.Errorf("%d rescues of %d commands, %d messages for a backlog of %d", n, again, copies, backlog)
			}
			return nil
		})
	}
	time.Sleep(8 * limit) // that is how much older than the limit all of it becomes
	sent(0, "nothing is sent again")
	waits, done := w.count(`SELECT COUNT(*) FROM saga_instances WHERE status = 'RUNNING'`), w.count(`SELECT COUNT(*) FROM inbox_messages`)
	t.Logf("%d of %d commands wait after %s, %d have been worked off", waits, backlog, 8*limit, done)
	if waits < backlog*3/4 || done == 0 {
		t.Errorf("%d of %d wait: the test shows nothing", waits, backlog)
	}

	w.exec(`UPDATE saga_instances SET updated_at = NOW(6) - INTERVAL 1 MINUTE WHERE correlation_id = '` + strconv.Itoa(backlog-1) + `'`)
	w.exec(`UPDATE outbox_events SET published_at = NOW(6) - INTERVAL 1 MINUTE
             WHERE message_id = (SELECT command_id FROM saga_instances WHERE correlation_id = '` + strconv.Itoa(backlog-1) + `')`)
	sent(1, "only what is lost is sent again")
	w.broker.Purge(t, handlers.InventoryQueue)
}

// beginMany starts sagas of a definition whose input is their number.
func (w *wheel) beginMany(d *saga.Definition, n int) {
	w.t.Helper()
	all := make([]saga.Beginning, n)
	for i := range all {
		all[i] = saga.Beginning{Context: w.t.Context(), CorrelationID: strconv.Itoa(i), Input: i}
	}
	for some := range slices.Chunk(all, 1000) {
		err := sqltx.WithTx(w.t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error { return saga.StartAll(ctx, tx, d, some) })
		if err != nil {
			w.t.Fatal(err)
		}
	}
}
