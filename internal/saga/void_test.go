package saga

import (
	"context"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// void asks of one command.
func (w *world) void(id string, m message.Message) bool {
	w.t.Helper()
	void, err := Void(w.t.Context(), w.db, map[string]string{m.MessageID: id})
	w.must(err)
	return void[m.MessageID]
}

// Nobody waits for a command that a deadline has moved its saga past: it may have been lost. One that the saga
// has passed without is missed.
func TestVoidAfterADeadline(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		part Part[trip]
		tell []StepOption
		want Status
	}{
		"of the step":        {nil, []StepOption{Deadline(time.Minute)}, Compensated},
		"of the saga":        {Within[trip](time.Minute), nil, Compensated},
		"that ends nothing":  {Within[trip](time.Minute), nil, ManualAction},
		"of what is a pivot": {Within[trip](time.Minute), []StepOption{Pivot()}, Compensated},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &script{}
			parts := append(s.hooks(), s.part("a"), s.part("b", tt.tell...))
			if tt.part != nil {
				parts = append(parts, tt.part)
			}
			w := newWorld(t, Define("trip", 1, parts...))
			id := w.start("x")
			first := w.command()
			w.done(first)
			lost := w.command()
			equal(t, "before", w.void(id, lost), false)
			if tt.want == ManualAction {
				w.exec(`UPDATE saga_instances SET deadline_at = NOW(6) - INTERVAL 1 SECOND`)
				w.must(sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
					return w.engine.endFailed(ctx, tx, id, sqltx.ErrLeftBehind, false)
				}))
			} else {
				w.pass(id, 2*time.Minute)
				w.run()
			}
			equal(t, "status", w.get(id).Status, tt.want)
			equal(t, "void", []bool{w.void(id, lost), w.void(id, first)}, []bool{true, false})
			equal(t, "noted", one(t, "actions", w.get(id).Actions).Action, "deadline")
		})
	}
}

// A call that is open at its deadline is awaited still.
func TestNotVoidAmidACall(t *testing.T) {
	t.Parallel()
	s, d := &script{}, &desk{}
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("pay", append(d.options(), Deadline(time.Minute))...))...))
	id := w.start("x")
	m := w.command()
	w.leave(m)
	w.pass(id, 2*time.Minute)
	equal(t, "void", w.void(id, m), false)
	equal(t, "actions", len(w.get(id).Actions), 0)
}
