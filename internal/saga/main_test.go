package saga

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"backstep/internal/message"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// trip is the input of the sagas in these tests.
type trip struct {
	Name string
	Keys []string
}

// booking is what their actions return.
type booking struct{ Ref string }

// script is what the steps of a saga do beyond writing a row each, and what they did.
type script struct {
	mu    sync.Mutex // guards below; not held while a function of plan runs
	plan  map[string]func(ctx context.Context, tx *sqltx.Tx) error
	calls []string // of steps and hooks, those undone again included
	infos []Info

	batched bool // its steps are BatchSteps
}

// bothForms runs a test with steps of either form: the contract is one.
func bothForms(t *testing.T, test func(t *testing.T, s *script)) {
	for name, batched := range map[string]bool{"Step": false, "BatchStep": true} {
		t.Run(name, func(t *testing.T) { test(t, &script{batched: batched}) })
	}
}

// on makes what happens in a step ("hotel") or a compensation ("undo hotel") or a hook
// ("completed") the given function's matter.
func (s *script) on(what string, f func(ctx context.Context, tx *sqltx.Tx) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.plan == nil {
		s.plan = map[string]func(context.Context, *sqltx.Tx) error{}
	}
	s.plan[what] = f
}

// fail makes it fail with err, as many times as there are errors; nil is a success.
func (s *script) fail(what string, errs ...error) {
	s.on(what, func(context.Context, *sqltx.Tx) error {
		if len(errs) == 0 {
			return nil
		}
		err := errs[0]
		errs = errs[1:]
		return err
	})
}

func (s *script) do(ctx context.Context, tx *sqltx.Tx, what, detail string) error {
	s.mu.Lock()
	s.calls = append(s.calls, strings.TrimSpace(what+" "+detail))
	s.infos = append(s.infos, InfoFrom(ctx))
	f := s.plan[what]
	s.mu.Unlock()
	if _, err := tx.Exec(ctx, `INSERT INTO effects (what) VALUES (?)`, []byte(strings.TrimSpace(what+" "+detail))); err != nil {
		return err
	}
	if f != nil {
		return f(ctx, tx)
	}
	return nil
}

func (s *script) called() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// part is a step named like its queue; without "!" it has a compensation.
func (s *script) part(name string, options ...StepOption) Part[trip] {
	name, final := strings.CutSuffix(name, "!")
	if s.batched {
		return s.batchPart(name, final, options...)
	}
	var undo func(ctx context.Context, tx *sqltx.Tx, in trip, done booking) error
	if !final {
		undo = func(ctx context.Context, tx *sqltx.Tx, _ trip, done booking) error {
			return s.do(ctx, tx, "undo "+name, done.Ref)
		}
	}
	return Step(name, Queue(name), func(ctx context.Context, tx *sqltx.Tx, in trip) (booking, error) {
		return booking{Ref: name + " of " + in.Name}, s.do(ctx, tx, name, "")
	}, undo, options...)
}

// batchPart is part as a BatchStep. What a call fails with for good is that call's alone; any
// other error is returned, so that the engine has to find out whose it is.
func (s *script) batchPart(name string, final bool, options ...StepOption) Part[trip] {
	type calls = []*Call[trip, booking]
	each := func(ctx context.Context, tx *sqltx.Tx, list calls, do func(ctx context.Context, c *Call[trip, booking]) error) error {
		for _, c := range list {
			sp := tx.Savepoint()
			err := do(c.call.ctx, c)
			if err == nil && tx.Err() == nil {
				sp.Release()
				continue
			}
			if !IsPermanent(err) || tx.Err() != nil {
				return err
			}
			if err := sp.Rollback(ctx); err != nil { // nothing may have been written for it
				return err
			}
			c.Fail(err)
		}
		return nil
	}
	var undo func(ctx context.Context, tx *sqltx.Tx, list calls) error
	if !final {
		undo = func(ctx context.Context, tx *sqltx.Tx, list calls) error {
			return each(ctx, tx, list, func(ctx context.Context, c *Call[trip, booking]) error {
				return s.do(ctx, tx, "undo "+name, c.Result.Ref)
			})
		}
	}
	return BatchStep(name, Queue(name), func(ctx context.Context, tx *sqltx.Tx, list calls) error {
		return each(ctx, tx, list, func(ctx context.Context, c *Call[trip, booking]) error {
			c.Result = booking{Ref: name + " of " + c.In.Name}
			return s.do(ctx, tx, name, "")
		})
	}, undo, options...)
}

func (s *script) hooks() []Part[trip] {
	return []Part[trip]{
		OnCompleted(func(ctx context.Context, tx *sqltx.Tx, in trip) error { return s.do(ctx, tx, "completed", "") }),
		OnCompensated(func(ctx context.Context, tx *sqltx.Tx, in trip, reason string) error {
			return s.do(ctx, tx, "compensated", "("+reason+")")
		}),
		OnManualAction(func(ctx context.Context, tx *sqltx.Tx, in trip, reason string) error {
			return s.do(ctx, tx, "manual action", "("+reason+")")
		}),
		OnResumed(func(ctx context.Context, tx *sqltx.Tx, in trip) error { return s.do(ctx, tx, "resumed", "") }),
	}
}

// define makes a definition of steps like "hotel" and the hooks.
func (s *script) define(steps ...string) *Definition {
	parts := s.hooks()
	for _, name := range steps {
		parts = append(parts, s.part(name, Retry(3, 1)))
	}
	return Define("trip", 1, parts...)
}

// world is a database and an engine of a test's own. What the engine adds to the outbox is
// handed to it again by the test.
type world struct {
	t      testing.TB
	db     *sql.DB
	engine *Engine
	def    *Definition
	taken  uint64 // id of the last outbox row that was looked at
}

func newWorld(t *testing.T, defs ...*Definition) *world {
	t.Helper()
	w := &world{t: t, db: openDatabase(t), engine: NewEngine(slog.New(slog.DiscardHandler), defs...)}
	if len(defs) > 0 {
		w.def = defs[0]
	}
	w.exec(`CREATE TABLE effects (n BIGINT AUTO_INCREMENT PRIMARY KEY, what VARBINARY(2000) NOT NULL)`)
	return w
}

func (w *world) exec(query string, args ...any) {
	w.t.Helper()
	if _, err := w.db.ExecContext(w.t.Context(), query, args...); err != nil {
		w.t.Fatalf("%s: %v", query, err)
	}
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) start(name string) (id string) {
	w.t.Helper()
	err := sqltx.WithTx(w.t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		id, _, err = Start(ctx, tx, w.def, name, trip{Name: name})
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return id
}

// try runs a batch in one transaction, as a lane does.
func (w *world) try(msgs ...message.Message) (out []message.Outcome, err error) {
	err = sqltx.Once(w.t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		out = w.engine.HandleBatch(ctx, tx, msgs)
		return tx.Err()
	})
	return out, err
}

// deliver is try that must not fail.
func (w *world) deliver(msgs ...message.Message) []message.Outcome {
	w.t.Helper()
	out, err := w.try(msgs...)
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// done delivers messages each of which must be Done.
func (w *world) done(msgs ...message.Message) {
	w.t.Helper()
	for i, o := range w.deliver(msgs...) {
		if o.Kind != message.Done {
			w.t.Fatalf("message %d is %s: %s", i, o.Kind, o.Reason)
		}
	}
}

// outbox returns the messages that were added since it was last called.
func (w *world) outbox() []message.Message {
	w.t.Helper()
	return w.read(`SELECT id, message_id, ordering_key, exchange, routing_key, mandatory, properties, headers, payload
FROM outbox_events WHERE id > ? ORDER BY id`, w.taken)
}

func (w *world) read(query string, args ...any) (out []message.Message) {
	w.t.Helper()
	rows, err := w.db.QueryContext(w.t.Context(), query, args...)
	if err != nil {
		w.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var m message.Message
		var id, key, exchange, routingKey, properties, headers []byte
		if err := rows.Scan(&w.taken, &id, &key, &exchange, &routingKey, &m.Mandatory, &properties, &headers, &m.Body); err != nil {
			w.t.Fatal(err)
		}
		if m.Properties, err = message.DecodeProperties(properties); err != nil {
			w.t.Fatal(err)
		}
		if m.Headers, err = message.DecodeHeaders(headers); err != nil {
			w.t.Fatal(err)
		}
		m.MessageID, m.OrderingKey, m.Exchange, m.RoutingKey = string(id), string(key), string(exchange), string(routingKey)
		out = append(out, m)
	}
	if err := rows.Err(); err != nil {
		w.t.Fatal(err)
	}
	return out
}

// commands returns the commands that were added since the outbox was last looked at.
func (w *world) commands() []message.Message {
	w.t.Helper()
	return slices.DeleteFunc(w.outbox(), func(m message.Message) bool { return m.Exchange != message.CommandsExchange })
}

// command returns the one command that was added.
func (w *world) command() message.Message {
	w.t.Helper()
	return one(w.t, "commands", w.commands())
}

// scheduled returns the one message that waits for its time, and makes it wait no longer.
func (w *world) scheduled() message.Message {
	w.t.Helper()
	taken := w.taken
	msgs := w.read(`SELECT id, message_id, ordering_key, exchange, routing_key, mandatory, properties, headers, payload
FROM scheduled_messages ORDER BY id`)
	w.taken = taken
	w.exec(`DELETE FROM scheduled_messages`)
	return one(w.t, "scheduled messages", msgs)
}

// run delivers commands one after the other until there are none.
func (w *world) run() {
	w.t.Helper()
	for {
		msgs := w.commands()
		if len(msgs) == 0 {
			return
		}
		for _, m := range msgs {
			w.done(m)
		}
	}
}

// effects are the rows that steps and hooks wrote and that were committed.
func (w *world) effects() (out []string) {
	w.t.Helper()
	rows, err := w.db.QueryContext(w.t.Context(), `SELECT what FROM effects ORDER BY n`)
	if err != nil {
		w.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var what []byte
		if err := rows.Scan(&what); err != nil {
			w.t.Fatal(err)
		}
		out = append(out, string(what))
	}
	if err := rows.Err(); err != nil {
		w.t.Fatal(err)
	}
	return out
}

func (w *world) get(id string) Detail {
	w.t.Helper()
	d, err := Get(w.t.Context(), w.db, id)
	if err != nil {
		w.t.Fatal(err)
	}
	d.Unchanged, d.UntilDue = 0, 0 // they change while we look
	return d
}

// noted compares a saga with what it was before: something was noted among its actions, and that is all.
func (w *world) noted(id string, before Detail) {
	w.t.Helper()
	after := w.get(id)
	equal(w.t, "actions", len(after.Actions), len(before.Actions)+1)
	after.Actions = before.Actions
	equal(w.t, "saga", after, before)
}

func (w *world) number(query string, args ...any) (n int) {
	w.t.Helper()
	if err := w.db.QueryRowContext(w.t.Context(), query, args...).Scan(&n); err != nil {
		w.t.Fatalf("%s: %v", query, err)
	}
	return n
}

// steps returns "name STATUS" of the steps that have a row.
func (d *Detail) steps() (out []string) {
	for _, s := range d.Steps {
		out = append(out, s.Name+" "+string(s.Status))
	}
	return out
}

func one[T any](t testing.TB, what string, list []T) T {
	t.Helper()
	if len(list) != 1 {
		t.Fatalf("%d %s, want 1: %+v", len(list), what, list)
	}
	return list[0]
}

func equal(t testing.TB, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: %#v, want %#v", what, got, want)
	}
}

// errPassing is an error that may not be there the next time.
var errPassing = fmt.Errorf("wrapped: %w", errors.New("try again"))
