package saga

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"backstep/internal/sqltx"
)

// fragile is an input that panics when it is read and says so.
type fragile struct{ Panics bool }

func (f *fragile) UnmarshalJSON(b []byte) error {
	if f.Panics = string(b) != `"whole"`; f.Panics {
		panic("broken")
	}
	return nil
}

func (fragile) MarshalJSON() ([]byte, error) { return []byte(`"whole"`), nil }

// A hook that panics is its own saga's trouble, in the keeper too: others at their deadlines end.
func TestPanicOfAHookAtADeadline(t *testing.T) {
	t.Parallel()
	for name, deadline := range map[string]func(s *script) *Definition{
		"of the step": func(s *script) *Definition {
			return Define("trip", 1, append(s.hooks(), s.part("a", Deadline(time.Minute)))...)
		},
		"of the saga": func(s *script) *Definition {
			return Define("trip", 1, append(s.hooks(), s.part("a"), Within[trip](time.Minute))...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := &script{}
			w := newWorld(t, deadline(s))
			bad, good := w.start("bad"), w.start("good")
			s.on("compensated", func(ctx context.Context, _ *sqltx.Tx) error {
				if InfoFrom(ctx).SagaID == bad {
					panic("hook")
				}
				return nil
			})
			w.exec(`UPDATE outbox_events SET status = 'PUBLISHED', published_at = created_at`)
			w.belated(bad)
			w.belated(good)
			w.exec(`UPDATE saga_instances SET saga_deadline_at = IF(saga_deadline_at IS NULL, NULL, deadline_at)`)
			w.upFor(time.Hour)
			w.consumes("a", "m", unknown, time.Hour)
			err := w.keeper(KeeperConfig{}).scanDeadlines(t.Context())
			if err == nil || !strings.Contains(err.Error(), "end saga "+bad) || !strings.Contains(err.Error(), "panic: hook") {
				t.Errorf("error %v, want one that says which saga's hook panicked", err)
			}
			equal(t, "statuses", []Status{w.get(bad).Status, w.get(good).Status}, []Status{Running, Compensated})
		})
	}
}

// Whatever panics in a keeper, it goes on.
func TestKeeperOutlivesAPanic(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		k := NewKeeper(NewEngine(slog.New(slog.DiscardHandler)), nil, KeeperConfig{Log: slog.New(slog.DiscardHandler)})
		rounds := 0
		k.every(ctx, time.Second, "a promise", func(context.Context) error {
			if rounds++; rounds == 3 {
				cancel()
				return nil
			}
			panic("it")
		})
		equal(t, "rounds", rounds, 3)
	})
}

// Where the engine is asked for something outside of a lane nobody else would catch it.
func TestPanicOfAHookByHand(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := newOperator(t, s)
	id := o.start("x")
	s.on("compensated", func(context.Context, *sqltx.Tx) error { panic("hook") })
	if _, err := o.operate(id, Operation{Verb: VerbCancel}); err == nil || !strings.Contains(err.Error(), "panic: hook") {
		t.Errorf("error %v, want one that says that the hook panicked", err)
	}
	equal(t, "status", o.get(id).Status, Running)
}

func TestPanicOfAStepThatIsRehearsed(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := newOperator(t, s)
	id := o.start("x")
	s.on("a", func(context.Context, *sqltx.Tx) error { panic("step") })
	o.exec(`UPDATE saga_instances SET status = 'MANUAL_ACTION'`)
	r, err := o.rehearse(id, Operation{Verb: VerbRetry})
	o.must(err)
	equal(t, "error", r.Run.Error, "panic: step")
}

// An input whose own code panics over it does not decode, wherever it is read.
func TestPanicOfAnInput(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Define("trip", 1, Within[fragile](time.Minute),
		Step("a", "a", func(context.Context, *sqltx.Tx, fragile) (booking, error) { return booking{}, nil }, nil),
		RemoteStep[fragile, fragile]("b", "b")))
	var id string
	w.must(sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		id, _, err = Start(ctx, tx, w.def, "x", fragile{})
		return err
	}))
	w.done(w.command())
	out := one(t, "outcomes", w.deliver(answer(w.command(), `{"status":"completed","result":{}}`)))
	equal(t, "reply whose result panics", out.Reason, `reply to step "b" has a result that does not decode: panic: broken`)

	w.exec(`UPDATE saga_instances SET payload = '{}'`)
	if _, err := w.engine.Operate(t.Context(), w.db, id, Operation{Verb: VerbRetry}); !wasRefused(err) {
		t.Errorf("by hand: %v, want that it is refused", err)
	}
	m := w.read(`SELECT id, message_id, ordering_key, exchange, routing_key, mandatory, properties, headers, payload
FROM outbox_events ORDER BY id DESC LIMIT 1`)[0]
	for what, end := range map[string]func(){
		"at its deadline": func() { w.overdue(id) },
		"its command is parked": func() {
			w.must(sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
				return w.engine.CommandParked(ctx, tx, &m, "no route")
			}))
		},
	} {
		w.exec(`UPDATE saga_instances SET status = 'RUNNING', command_id = ?, deadline_at = NOW(6)`, []byte(m.MessageID))
		end()
		equal(t, what, w.get(id).Status, ManualAction)
	}
	if _, _, err := startInput(w, errBroken{}); err == nil {
		t.Error("a saga was started with an input that no worker can read")
	}
}

// errBroken is an input that says what it cannot read.
type errBroken struct{}

func (errBroken) MarshalJSON() ([]byte, error) { return []byte(`{}`), nil }

func startInput(w *world, input any) (id string, started bool, err error) {
	err = sqltx.WithTx(w.t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		id, started, err = Start(ctx, tx, w.def, "y", input)
		return err
	})
	return id, started, err
}

// An input may be of an interface type, and nothing.
func TestNilInput(t *testing.T) {
	t.Parallel()
	called := 0
	undo := func(_ context.Context, _ *sqltx.Tx, in, _ any) error { called++; return nil }
	w := newWorld(t, Define("trip", 1,
		OnCompensated(func(_ context.Context, _ *sqltx.Tx, in any, _ string) error { called++; return nil }),
		Step("a", "a", func(_ context.Context, _ *sqltx.Tx, in any) (any, error) { called++; return nil, nil }, undo),
		Step("b", "b", func(_ context.Context, _ *sqltx.Tx, in any) (any, error) { return nil, Fail("no") }, nil)))
	id, _, err := startInput(w, nil)
	w.must(err)
	w.run()
	equal(t, "status", w.get(id).Status, Compensated)
	equal(t, "calls", called, 3)
}
