package saga

import (
	"context"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

const busy = `{"status":"failed","error":"busy"}`

// retries is a definition whose first step waits long for its second attempt.
func retries(s *script, remote bool) *Definition {
	slowly := []StepOption{Retry(3, time.Hour), RetryCap(time.Hour)}
	first := s.part("a!", slowly...)
	if remote {
		first = RemoteStep[trip, booking]("a", "a", append(slowly, NothingToUndo())...)
	}
	return Define("trip", 1, append(s.hooks(), Within[trip](time.Hour), first, s.part("b"))...)
}

// An attempt that waits for its time and is not awaited any more does not go out: where a step has
// nothing to undo, no barrier would tell its participant that nobody wants it.
func TestUnawaitedAttemptDoesNotGoOut(t *testing.T) {
	t.Parallel()
	cancel := func(w *world, id string, _ message.Message) { w.done(cancelling(id, ``)) }
	late := func(w *world, id string, _ message.Message) {
		w.exec(`UPDATE saga_instances SET saga_deadline_at = NOW(6) - INTERVAL 1 SECOND WHERE id = ?`, []byte(id))
		w.overdue(id)
	}
	answered := func(w *world, _ string, first message.Message) { w.done(answer(first, `{"status":"completed"}`)) }
	for _, remote := range []bool{true, false} {
		s := &script{}
		s.on("a", func(context.Context, *sqltx.Tx) error { return errPassing })
		w := newWorld(t, retries(s, remote))
		try := func() (id string, m message.Message) {
			id, m = w.start(message.NewID()), w.command()
			if remote {
				w.done(answer(m, busy))
			} else {
				w.done(m)
			}
			return id, m
		}
		for _, tt := range []struct {
			name   string
			remote bool // only
			then   func(w *world, id string, first message.Message)
			want   Status
		}{
			{"cancelled", false, cancel, Compensated},
			{"too late", false, late, Compensated},
			{"answered by an earlier one", true, answered, Running},
		} {
			if tt.remote && !remote {
				continue
			}
			id, m := try()
			other, _ := try()
			equal(t, "scheduled before", w.number(`SELECT COUNT(*) FROM scheduled_messages`), 2)
			tt.then(w, id, m)
			equal(t, tt.name+": status", w.get(id).Status, tt.want)
			equal(t, tt.name+": scheduled", w.scheduled().MessageID, w.get(other).CommandID)
		}
	}
}

// Nor does one that would have been scheduled by the same batch.
func TestUnawaitedAttemptOfTheSameBatch(t *testing.T) {
	t.Parallel()
	for name, remote := range map[string]bool{"remote": true, "local": false} {
		t.Run(name, func(t *testing.T) {
			s := &script{}
			s.fail("a", errPassing)
			w := newWorld(t, retries(s, remote))
			id := w.start("x")
			m := w.command()
			if remote {
				m = answer(m, busy)
			}
			w.done(cancelling(id, ``), m)
			equal(t, "status", w.get(id).Status, Compensated)
			equal(t, "scheduled", w.number(`SELECT COUNT(*) FROM scheduled_messages`), 0)
		})
	}
}

// It costs nothing where no attempt can wait: when the one that is awaited is at hand.
func TestNothingToUnschedule(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, retries(s, true))
	w.start("x")
	for _, reply := range []bool{true, false} {
		m := w.command()
		if reply {
			m = answer(m, `{"status":"completed"}`)
		}
		w.must(sqltx.Once(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
			w.engine.HandleBatch(ctx, tx, []message.Message{m})
			for _, wrote := range tx.Writes() {
				if strings.Contains(wrote.Table(), "scheduled") {
					t.Errorf("%s %s", wrote.Verb(), wrote.Table())
				}
			}
			return tx.Err()
		}))
	}
}
