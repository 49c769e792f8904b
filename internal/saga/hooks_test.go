package saga

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// What a hook refuses does not half commit.
func TestHookFails(t *testing.T) {
	t.Parallel()
	for _, hook := range []string{"completed", "compensated"} {
		t.Run(hook, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, s.define("a"))
			if hook == "compensated" {
				s.fail("a", Fail("no"), Fail("no"))
			}
			s.fail(hook, errors.New("hook says no"))
			id := w.start("x")
			m := w.command()
			if _, err := w.try(m); err == nil || !strings.Contains(err.Error(), "hook says no") || !strings.Contains(err.Error(), id) {
				t.Errorf("the batch gave %v", err)
			}
			d := w.get(id)
			if d.Status != Running || d.CommandID != m.MessageID || len(d.Steps) != 0 || len(w.effects()) != 0 {
				t.Errorf("half committed: %+v, effects %q", d, w.effects())
			}
			w.done(m) // the hook says yes now
			if got := w.get(id).Status; got == Running {
				t.Errorf("status %s", got)
			}
		})
	}
}

// The hook of the last resort cannot keep a saga from being stopped: it would be stuck.
func TestManualActionHookFails(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]func(context.Context, *sqltx.Tx) error{
		"error": func(context.Context, *sqltx.Tx) error { return errors.New("boom") },
		"panic": func(context.Context, *sqltx.Tx) error { panic("boom") },
		"no message": func(ctx context.Context, _ *sqltx.Tx) error {
			Emit(ctx, message.Message{Properties: message.Properties{Type: "boom"}, Exchange: "e", RoutingKey: strings.Repeat("k", 300)})
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, s.define("a", "b"))
			s.on("manual action", f)
			parked, undone := w.start("x"), w.start("y")
			msgs := w.commands()
			w.park(msgs[0], "why")
			d := w.get(parked)
			if d.Status != ManualAction || !strings.Contains(d.LastError, "command parked: why") || !strings.Contains(d.LastError, "boom") {
				t.Errorf("parked: %+v", d.Summary)
			}
			w.done(msgs[1])
			s.fail("b", Fail("no"))
			s.fail("undo a", Fail("cannot undo"))
			w.done(w.command())
			w.done(w.command())
			d = w.get(undone)
			if d.Status != ManualAction || !strings.Contains(d.LastError, "cannot undo") || !strings.Contains(d.LastError, "boom") {
				t.Errorf("compensation failed: %+v", d.Summary)
			}
			equal(t, "effects", w.effects(), []string{"a"}) // not the hook's
			// In an ended transaction it is not the hook's fault.
			s.on("manual action", func(ctx context.Context, tx *sqltx.Tx) error { tx.Fail(errors.New("gone")); return tx.Err() })
			id := w.start("z")
			if err := w.tryPark(w.command(), "why"); err == nil {
				t.Error("parked in a transaction that has ended")
			}
			equal(t, "status", w.get(id).Status, Running)
		})
	}
}

// Whatever text a step gives as its error, the transaction takes it.
func TestAnyErrorCanBeStored(t *testing.T) {
	t.Parallel()
	huge := strings.Repeat("é", 100_000)
	for name, text := range map[string]string{"huge": huge, "not UTF-8": "\xff\xfe", "4 bytes": "😀", "empty": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, s.define("a", "b"))
			s.fail("a", errors.New(text)) // retried, so it is stored with the scheduled message too
			s.fail("b", Fail("%s", text))
			s.fail("undo a", Fail("%s", text))
			// What hooks are given they may want to store in a column like ours.
			s.on("manual action", func(context.Context, *sqltx.Tx) error { return nil })
			w.exec(`ALTER TABLE effects MODIFY what LONGBLOB NOT NULL`)
			id := w.start("x")
			w.done(w.command())
			w.done(w.scheduled())
			w.done(w.command())
			w.done(w.command())
			d := w.get(id)
			equal(t, "status", d.Status, ManualAction)
			if name == "4 bytes" && d.LastError != "compensation of step a failed at attempt 1: 😀" {
				t.Errorf("reason %q", d.LastError)
			}
			for _, what := range w.effects() {
				if len(what) > 5000 {
					t.Errorf("a hook was given %d bytes", len(what))
				}
			}
		})
	}
}

// Inputs and results of any shape come back as they were.
func TestValues(t *testing.T) {
	t.Parallel()
	type nested struct {
		Text  string
		Bytes []byte
		Map   map[string]any
		Ptr   *int
		At    time.Time
		Big   int64
	}
	want := nested{
		Text: "書籍 😀 \u0000 <&> \\ '\"", Bytes: []byte{0, 255}, Map: map[string]any{"😀": []any{"x", true, nil}},
		At: time.Date(2026, 11, 29, 12, 0, 0, 123456789, time.UTC), Big: 1<<62 + 1,
	}
	var got []nested
	keep := func(v nested) { got = append(got, v) }
	var empties int
	def := Define("values", 1,
		Step("full", "q", func(_ context.Context, _ *sqltx.Tx, in nested) (nested, error) { keep(in); return in, nil },
			func(_ context.Context, _ *sqltx.Tx, in, done nested) error { keep(in); keep(done); return nil }),
		Step("empty", "q", func(context.Context, *sqltx.Tx, nested) (struct{}, error) { return struct{}{}, nil },
			func(_ context.Context, _ *sqltx.Tx, _ nested, _ struct{}) error { empties++; return nil }),
		Step("nothing", "q", func(context.Context, *sqltx.Tx, nested) (any, error) { return nil, nil },
			func(_ context.Context, _ *sqltx.Tx, _ nested, done any) error {
				if done == nil {
					empties++
				}
				return nil
			}),
		Step("large", "q", func(context.Context, *sqltx.Tx, nested) (string, error) { return strings.Repeat("😀", 1<<18), nil },
			func(_ context.Context, _ *sqltx.Tx, _ nested, done string) error {
				if len(done) == 1<<20 {
					empties++
				}
				return nil
			}),
		Step("fails", "q", func(context.Context, *sqltx.Tx, nested) (int, error) { return 0, Fail("no") }, nil),
	)
	w := newWorld(t, def)
	var id string
	err := sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		id, _, err = Start(ctx, tx, def, "\x00any \xff bytes ", want)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	w.run()
	d := w.get(id)
	equal(t, "status", d.Status, Compensated)
	equal(t, "correlation id", d.CorrelationID, "\x00any \xff bytes ")
	equal(t, "values", got, []nested{want, want, want})
	equal(t, "empty, nothing, large", empties, 3)

	nothing := Define("nothing", 1, Step("a", "q", func(context.Context, *sqltx.Tx, struct{}) (struct{}, error) { return struct{}{}, nil }, nil))
	w = newWorld(t, nothing)
	err = sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		id, _, err = Start(ctx, tx, nothing, "x", struct{}{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	w.run()
	equal(t, "status", w.get(id).Status, Completed)
}
