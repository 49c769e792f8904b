package inbox

import (
	"context"
	"database/sql"
	"fmt"
	"testing"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// scene is a lane that runs between a broker with the queue "q" and a database of its own.
type scene struct {
	*lane
	t  testing.TB
	db *sql.DB
	b  *broker
}

// stage runs the lane of a scene. In the end it must have done nothing that a broker finds fault with.
func stage(t testing.TB, cfg Config, msgs ...message.Message) *scene {
	t.Helper()
	cfg.Queue = "q"
	s := &scene{t: t, db: database(t), b: newBroker(cfg.Queue, msgs...)}
	t.Cleanup(func() { equal(t, "faults", s.b.faults, []string(nil)) }) // after the lane has stopped
	s.lane = run(t, s.db, s.b, cfg)
	return s
}

// settles waits until n messages are acked or dead-lettered.
func (s *scene) settles(n int) {
	s.t.Helper()
	eventually(s.t, fmt.Sprintf("%d are settled", n), s.b.settled(n))
}

// parked returns the only copy that was parked, and why.
func (s *scene) parked() (r row, reason string) {
	s.t.Helper()
	r = one(s.t, "outbox rows", outboxRows(s.t, s.db, "TRUE"))
	return r, r.Headers.String(message.HeaderParkedReason)
}

// scheduled returns the only message that waits for its time.
func (s *scene) scheduled() row {
	s.t.Helper()
	return one(s.t, "scheduled rows", scheduledRows(s.t, s.db))
}

func (s *scene) recorded(id string) bool {
	s.t.Helper()
	return recorded(s.t, s.db, s.b.queue, id)
}

func (s *scene) effects(id string) int {
	s.t.Helper()
	return effectsOf(s.t, s.db, id)
}

// totals demands so many effects and records in all.
func (s *scene) totals(effects, records int) {
	s.t.Helper()
	equal(s.t, "effects", number(s.t, s.db, `SELECT COUNT(*) FROM effects`), effects)
	equal(s.t, "records", number(s.t, s.db, `SELECT COUNT(*) FROM inbox_messages`), records)
}

// always is a handler that decides the same about every message.
func always(o message.Outcome) *effects {
	return &effects{OutcomeFunc: func(context.Context, *sqltx.Tx, *message.Message) message.Outcome { return o }}
}

// held makes a handler say that it has entered a batch, and stay in it until the gate is closed.
func (h *effects) held() (entered, gate chan struct{}) {
	entered, gate = make(chan struct{}, 100), make(chan struct{})
	h.BatchFunc = func(context.Context, *sqltx.Tx, []string) { entered <- struct{}{}; <-gate }
	return entered, gate
}
