package sagatest

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"slices"
	"testing"

	"backstep/internal/message"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// World is the engine, the messages and the time of a test. It is for one goroutine, and the
// database is its own.
type World struct {
	t       testing.TB
	db      *sql.DB
	engine  *saga.Engine
	outline map[stepKey]saga.StepOutline

	taken        uint64            // id of the last outbox row that was looked at
	pending      []message.Message // published, and not delivered yet
	sent         []message.Message // commands of remote steps, in the order they were delivered
	events       []message.Message
	participants map[string]Participant
	refused      map[string]bool // commands that a participant has refused, by id; so it does with their copies

	doomed  map[string]error      // steps whose next action shall fail
	fail    func(saga.Info) error // whether a function that has succeeded shall have failed
	unheard func(saga.Info) error // whether nobody shall hear of a call that has succeeded
	ran     map[string]int        // functions that have succeeded, and were committed; by idempotency key
	running []string              // likewise, in the transaction that is open
	worked  bool                  // a function has succeeded in the last delivery to the engine
	parked  []string              // why messages were
}

// stepKey names a step of one version of a definition: in the next it may be another service's.
type stepKey struct {
	typ     string
	version int
	step    string
}

// New returns a world whose engine knows defs. db needs the schema of package migrations.
func New(t testing.TB, db *sql.DB, defs ...*saga.Definition) *World {
	t.Helper()
	w := &World{
		t: t, db: db, outline: map[stepKey]saga.StepOutline{}, participants: map[string]Participant{}, refused: map[string]bool{},
		ran: map[string]int{}, doomed: map[string]error{},
	}
	altered := make([]*saga.Definition, len(defs))
	for i, d := range defs {
		altered[i] = d.Altered(w.outcome, w.called)
		for _, s := range d.Outline() {
			w.outline[stepKey{d.Type, d.Version, s.Name}] = s
		}
	}
	w.engine = saga.NewEngine(slog.New(slog.DiscardHandler), altered...)
	return w
}

// outcome notes that a function has succeeded, unless it shall have failed.
func (w *World) outcome(info saga.Info) error {
	if err, ok := w.doomed[info.Step]; ok && info.Direction == saga.Execute {
		delete(w.doomed, info.Step)
		return err
	}
	if w.fail != nil {
		if err := w.fail(info); err != nil {
			return err
		}
	}
	w.running = append(w.running, info.IdempotencyKey())
	return nil
}

func (w *World) called(info saga.Info) error {
	if w.unheard != nil {
		return w.unheard(info)
	}
	return nil
}

// FailStep makes the next run of a local step's action fail with err, after it has done its work.
func (w *World) FailStep(step string, err error) { w.doomed[step] = err }

// Start begins a saga and returns its id.
func (w *World) Start(d *saga.Definition, correlationID string, input any) (id string) {
	w.t.Helper()
	w.tx("start a saga", func(ctx context.Context, tx *sqltx.Tx) (err error) {
		id, _, err = saga.Start(ctx, tx, d, correlationID, input)
		return err
	})
	return id
}

// Cancel asks for a saga to be cancelled, as a message of saga.CancelType does.
func (w *World) Cancel(id, reason string) {
	w.t.Helper()
	body := `{"reason":` + quoted(reason) + `}`
	w.engineGets(message.Message{
		Properties: message.Properties{MessageID: message.NewID(), Type: saga.CancelType},
		Headers:    message.Headers{message.HeaderSagaID: id}, Body: []byte(body), RoutingKey: saga.RepliesQueue,
	})
}

// Reverse has a completed saga undone, as backstep saga compensate does.
func (w *World) Reverse(id, reason string) {
	w.t.Helper()
	op := saga.Operation{Verb: saga.VerbCompensate}
	op.By.Actor, op.By.Reason = "sagatest", reason
	if _, err := w.engine.Operate(w.t.Context(), w.db, id, op); err != nil {
		w.t.Fatalf("sagatest: reverse saga %s: %v", id, err)
	}
}

// Saga returns what is known about a saga.
func (w *World) Saga(id string) saga.Detail {
	w.t.Helper()
	d, err := saga.Get(w.t.Context(), w.db, id)
	if err != nil {
		w.t.Fatalf("sagatest: %v", err)
	}
	return d
}

// Events returns the messages that were added so far and are for nobody here: events, and commands
// that belong to no saga.
func (w *World) Events() []message.Message {
	w.t.Helper()
	w.collect()
	return slices.Clone(w.events)
}

// DB returns the database.
func (w *World) DB() *sql.DB { return w.db }

// Exec runs a statement that must succeed.
func (w *World) Exec(query string, args ...any) {
	w.t.Helper()
	if _, err := w.db.ExecContext(w.t.Context(), query, args...); err != nil {
		w.t.Fatalf("sagatest: %s: %v", query, err)
	}
}

// Int reads one number; NULL is 0.
func (w *World) Int(query string, args ...any) int {
	w.t.Helper()
	var n sql.NullInt64
	err := w.db.QueryRowContext(w.t.Context(), query, args...).Scan(&n)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		w.t.Fatalf("sagatest: %s: %v", query, err)
	}
	return int(n.Int64)
}

// tx runs f in a transaction that must succeed.
func (w *World) tx(what string, f func(ctx context.Context, tx *sqltx.Tx) error) {
	w.t.Helper()
	if err := sqltx.WithTx(w.t.Context(), w.db, f); err != nil {
		w.t.Fatalf("sagatest: %s: %v", what, err)
	}
}
