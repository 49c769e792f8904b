package inbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/sqltx"
)

const addSQL = `UPDATE counters SET n = n + 1 WHERE id = ?`

// A real deadlock with another connection: the batch is run again as it is.
func TestDeadlock(t *testing.T) {
	t.Parallel()
	db := database(t)
	entered, gate := make(chan struct{}, 100), make(chan struct{})
	var waits atomic.Bool
	h := &effects{BatchFunc: func(ctx context.Context, tx *sqltx.Tx, ids []string) {
		if len(ids) == 1 {
			entered <- struct{}{}
			<-gate
			return
		}
		_, _ = tx.Exec(ctx, addSQL, "b")
		if !waits.Swap(true) {
			entered <- struct{}{}
			<-gate
		}
		_, _ = tx.Exec(ctx, addSQL, "a") // a handler may swallow what it likes
	}}
	b := newBroker("q", msg("opener"))
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 8})
	receive(t, "the opener", entered)
	msgs := newMsgs(5)
	b.put(msgs...)
	gate <- struct{}{}
	receive(t, "the batch has locked b", entered)
	// The other has written more, so that InnoDB chooses the lane's transaction as the victim.
	other, _ := hold(t, db, addSQL, "a")
	exec(t, other, `INSERT INTO effects (message_id) SELECT seq FROM (SELECT 1 AS seq UNION SELECT 2 UNION SELECT 3 UNION SELECT 4) v
		CROSS JOIN (SELECT 1 AS x UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION SELECT 5 UNION SELECT 6 UNION SELECT 7 UNION SELECT 8) w`)
	done := make(chan error, 1)
	go func() {
		_, err := other.ExecContext(t.Context(), addSQL, "b")
		if err == nil {
			err = other.Commit()
		}
		done <- err
	}()
	close(gate)
	if err := receive(t, "the other transaction", done); err != nil {
		t.Fatalf("the other transaction: %v", err)
	}
	eventually(t, "all are acked", b.settled(6))
	if l.stats.Conflicts.Load() == 0 {
		t.Error("there was no conflict: the test shows nothing")
	}
	for _, m := range msgs {
		equal(t, "effects", effectsOf(t, db, m.MessageID), 1)
	}
	equal(t, "a", number(t, db, `SELECT n FROM counters WHERE id = 'a'`), 2)
	equal(t, "b", number(t, db, `SELECT n FROM counters WHERE id = 'b'`), 2)
	equal(t, "batches", h.sizes(), []int{1, 5, 5})
	if s := l.stats.Snapshot(); s.Done != 6 || s.Retried+s.Parked+s.Duplicates != 0 {
		t.Errorf("stats %+v", s)
	}
}

// A lock that one message of a batch needs is held: the batch is split until that one is
// alone, its neighbours go on, and it is tried again until the lock is gone.
func TestLockWaitSplitsTheBatch(t *testing.T) {
	t.Parallel()
	db := database(t)
	_, release := hold(t, db, addSQL, "a")
	entered, gate := make(chan struct{}, 100), make(chan struct{})
	msgs := newMsgs(7)
	blocked := msgs[2].MessageID
	h := &effects{
		BatchFunc: func(_ context.Context, _ *sqltx.Tx, ids []string) {
			if ids[0] == "opener" {
				entered <- struct{}{}
				<-gate
			}
		},
		OutcomeFunc: func(ctx context.Context, tx *sqltx.Tx, m *message.Message) message.Outcome {
			if m.MessageID == blocked {
				if _, err := tx.Exec(ctx, addSQL, "a"); err != nil {
					return message.Outcome{Kind: message.Retry, Reason: err.Error()}
				}
			}
			return message.Outcome{}
		},
	}
	b := newBroker("q", msg("opener"))
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 8})
	receive(t, "the opener", entered)
	b.put(msgs...)
	close(gate)
	eventually(t, "its neighbours are acked", func() bool { return len(b.ackedIDs()) == 7 })
	if slices.Contains(b.ackedIDs(), blocked) || effectsOf(t, db, blocked) != 0 || recorded(t, db, "q", blocked) {
		t.Error("half of the blocked message is committed, or it is acked")
	}
	release()
	eventually(t, "all are acked", b.settled(8))
	for _, m := range msgs {
		equal(t, "effects", effectsOf(t, db, m.MessageID), 1)
	}
	equal(t, "a", number(t, db, `SELECT n FROM counters WHERE id = 'a'`), 1)
	if s := l.stats.Snapshot(); s.Done != 8 || s.Retried+s.Parked != 0 || s.Conflicts < 2 {
		t.Errorf("stats %+v", s)
	}
	// The lane grows again.
	before := len(h.sizes())
	b.put(newMsgs(16)...)
	eventually(t, "all are acked", b.settled(24))
	if sizes := h.sizes()[before:]; slices.Max(sizes) < 4 {
		t.Errorf("batches of %v, want large ones again", sizes)
	}
	equal(t, "faults", b.faults, []string(nil))
}

// order creates an order of two SKUs and returns its id and the command of its first step.
func order(t *testing.T, db *sql.DB) (id string, first message.Message) {
	t.Helper()
	if err := handlers.Seed(t.Context(), db, 2, 100); err != nil {
		t.Fatal(err)
	}
	body, err := json.Marshal(handlers.CreateOrder{
		Customer: "c", TotalCents: 500, PaymentToken: "tok", ShipTo: handlers.ShipTo{Country: "DE"},
		Items: []handlers.Item{{SKU: handlers.SKU(0), Quantity: 2, PriceCents: 100}, {SKU: handlers.SKU(1), Quantity: 3, PriceCents: 100}},
	})
	if err != nil {
		t.Fatal(err)
	}
	m := message.Message{Properties: message.Properties{MessageID: message.NewID(), Type: handlers.OrderCreateType}, Body: body}
	err = sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		handlers.NewOrderCreate(slog.Default()).HandleBatch(ctx, tx, []message.Message{m})
		return tx.Err()
	})
	if err != nil {
		t.Fatal(err)
	}
	var orderID []byte
	if err := db.QueryRowContext(t.Context(), `SELECT id FROM orders`).Scan(&orderID); err != nil {
		t.Fatal(err)
	}
	return string(orderID), commandTo(t, db, handlers.InventoryQueue)
}

// commandTo returns the command that is on its way to a queue.
func commandTo(t *testing.T, db *sql.DB, queue string) message.Message {
	t.Helper()
	r := one(t, "commands to "+queue, outboxRows(t, db, "routing_key = ?", []byte(queue)))
	return r.Message
}

// snapshot is what a step could leave behind.
func snapshot(t *testing.T, db *sql.DB) map[string]int {
	t.Helper()
	all := map[string]int{}
	for name, query := range map[string]string{
		"reserved":  `SELECT SUM(reserved) FROM inventory`,
		"shipped":   `SELECT SUM(shipped) FROM inventory`,
		"payments":  `SELECT COUNT(*) FROM payments`,
		"keys":      `SELECT COUNT(*) FROM payment_idempotency`,
		"inbox":     `SELECT COUNT(*) FROM inbox_messages`,
		"outbox":    `SELECT COUNT(*) FROM outbox_events`,
		"scheduled": `SELECT COUNT(*) FROM scheduled_messages`,
		"steps":     `SELECT COUNT(*) FROM saga_steps`,
		"at step":   `SELECT current_step FROM saga_instances`,
		"attempt":   `SELECT attempt FROM saga_instances`,
	} {
		all[name] = number(t, db, query)
	}
	return all
}

// B78: error 1205 undoes one statement. Whatever a step waits for in vain, nothing of it is
// visible, no attempt is spent, and it succeeds once the lock is gone.
func TestLockWaitLeavesNothingHalfDone(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name  string
		queue string
		lock  string
		arg   func(orderID string, m message.Message) []any
		gives map[string]int // what the step adds once the lock is gone
	}{
		{"SKU B", handlers.InventoryQueue, `SELECT * FROM inventory WHERE sku = ? FOR UPDATE`,
			func(string, message.Message) []any { return []any{[]byte(handlers.SKU(1))} },
			map[string]int{"reserved": 5, "inbox": 1, "outbox": 2, "steps": 1, "at step": 1}},
		{"inbox row", handlers.InventoryQueue, `INSERT INTO inbox_messages (consumer, message_id) VALUES ('inventory', ?)`,
			func(_ string, m message.Message) []any { return []any{[]byte(m.MessageID)} },
			map[string]int{"reserved": 5, "inbox": 1, "outbox": 2, "steps": 1, "at step": 1}},
		{"saga row", handlers.InventoryQueue, `SELECT * FROM saga_instances WHERE correlation_id = ? FOR UPDATE`,
			func(id string, _ message.Message) []any { return []any{[]byte(id)} },
			map[string]int{"reserved": 5, "inbox": 1, "outbox": 2, "steps": 1, "at step": 1}},
		{"outbox index", handlers.InventoryQueue, `SELECT COUNT(*) FROM outbox_events WHERE id > 0 FOR UPDATE`, // and the gap after
			func(string, message.Message) []any { return nil },
			map[string]int{"reserved": 5, "inbox": 1, "outbox": 2, "steps": 1, "at step": 1}},
		{"payments row", handlers.PaymentQueue, `INSERT INTO payments (id, order_id, amount_cents, status) VALUES ('x', ?, 1, 'CHARGED')`,
			func(id string, _ message.Message) []any { return []any{[]byte(id)} },
			map[string]int{"payments": 1, "keys": 1, "inbox": 1, "outbox": 2, "steps": 1, "at step": 1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			db := database(t)
			engine := handlers.NewEngine(slog.New(slog.DiscardHandler))
			id, m := order(t, db)
			if tt.queue == handlers.PaymentQueue {
				b := newBroker(handlers.InventoryQueue, m)
				l := run(t, db, b, Config{Queue: handlers.InventoryQueue, Handler: engine})
				eventually(t, "the first step is done", b.settled(1))
				l.stop()
				m = commandTo(t, db, tt.queue)
			}
			_, release := hold(t, db, tt.lock, tt.arg(id, m)...)
			before := snapshot(t, db)
			b := newBroker(tt.queue, m)
			l := run(t, db, b, Config{Queue: tt.queue, Handler: engine, Parked: engine.CommandParked})
			eventually(t, "it waited in vain, twice", func() bool { return l.stats.Conflicts.Load() >= 2 })
			equal(t, "while the lock is held", snapshot(t, db), before)
			equal(t, "acked", b.ackedIDs(), []string(nil))
			release()
			eventually(t, "it is acked", b.settled(1))
			for name, n := range tt.gives {
				before[name] += n
			}
			equal(t, "after the lock is gone", snapshot(t, db), before)
		})
	}
}

// A saga's step that fails for a passing reason: the failed attempt is recorded with the
// scheduled next one, and a copy of it does nothing.
func TestFailedStepIsRecorded(t *testing.T) {
	t.Parallel()
	db := database(t)
	engine := handlers.NewEngine(slog.New(slog.DiscardHandler))
	_, m := order(t, db)
	exec(t, db, `CREATE TRIGGER refuse BEFORE UPDATE ON inventory FOR EACH ROW SIGNAL SQLSTATE '45000'`)
	b := newBroker(handlers.InventoryQueue, m, m)
	l := run(t, db, b, Config{Queue: handlers.InventoryQueue, Handler: engine, Parked: engine.CommandParked})
	eventually(t, "both are acked", b.settled(2))
	r := one(t, "scheduled rows", scheduledRows(t, db))
	if !recorded(t, db, handlers.InventoryQueue, m.MessageID) || recorded(t, db, handlers.InventoryQueue, r.MessageID) {
		t.Error("want the failed attempt recorded, and not the next")
	}
	if r.MessageID == m.MessageID || r.RequestID() != m.MessageID || r.Attempt() != 2 || r.due > time.Second {
		t.Errorf("next attempt: %+v", r)
	}
	exec(t, db, `DROP TRIGGER refuse`)
	b.put(r.Message, r.Message, m)
	eventually(t, "all are acked", b.settled(5))
	equal(t, "reserved", number(t, db, `SELECT SUM(reserved) FROM inventory`), 5)
	if s := l.stats.Snapshot(); s.Done != 2 || s.Duplicates != 3 || s.Parked+s.Retried != 0 {
		t.Errorf("stats %+v", s)
	}
}
