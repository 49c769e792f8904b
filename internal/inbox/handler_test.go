package inbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// A panic harms no neighbour: they are processed once, and for the culprit a failed attempt
// is counted.
func TestPanic(t *testing.T) {
	t.Parallel()
	msgs := newMsgs(9)
	culprit := msgs[4].MessageID
	h := &effects{OutcomeFunc: func(_ context.Context, _ *sqltx.Tx, m *message.Message) message.Outcome {
		if m.RequestID() == culprit {
			panic("boom")
		}
		return message.Outcome{}
	}}
	s := stage(t, Config{Handler: h, Batch: 8, MaxAttempts: 2, RetryBase: time.Hour, RetryMax: time.Hour}, msgs...)
	s.settles(9)
	for _, m := range msgs {
		want := 1
		if m.MessageID == culprit {
			want = 0
		}
		if n := s.effects(m.MessageID); n != want {
			t.Errorf("%d effects of %s, want %d", n, m.MessageID, want)
		}
	}
	r := s.scheduled()
	if r.RequestID() != culprit || r.Attempt() != 2 || r.reason != "panic in handler: boom" {
		t.Errorf("next attempt of %q: attempt %d because %q", r.RequestID(), r.Attempt(), r.reason)
	}
	s.b.put(r.Message)
	s.settles(10)
	if _, got := s.parked(); got != "failed 2 times: panic in handler: boom" {
		t.Errorf("parked because %q", got)
	}
	if n := s.stats.Snapshot(); n.Done != 8 || n.Retried != 1 || n.Parked != 1 || n.Duplicates != 0 {
		t.Errorf("stats %+v", n)
	}
}

// A handler that fails on every try, even when it need only count the attempt, has its
// message parked by the lane.
func TestHandlerThatAlwaysFails(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(tx *sqltx.Tx){
		"panic":           func(*sqltx.Tx) { panic("boom") },
		"the transaction": func(tx *sqltx.Tx) { tx.Fail(errors.New("boom")) },
		"a statement": func(tx *sqltx.Tx) {
			_, err := tx.Exec(t.Context(), `INSERT INTO no_such_table VALUES (1)`)
			tx.Fail(fmt.Errorf("boom: %w", err))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			msgs := newMsgs(6)
			culprit := msgs[2].MessageID
			var told []string
			h := &effects{BatchFunc: func(_ context.Context, tx *sqltx.Tx, ids []string) {
				if slices.Contains(ids, culprit) {
					fail(tx)
				}
			}}
			s := stage(t, Config{Handler: h, Parked: func(_ context.Context, _ *sqltx.Tx, m *message.Message, reason string) error {
				told = append(told, m.MessageID)
				return nil
			}}, msgs...)
			s.settles(6)
			s.stop()
			if r, reason := s.parked(); r.MessageID != culprit || !strings.Contains(reason, "boom") || strings.Contains(reason, "goroutine") {
				t.Errorf("parked %s because %q", r.MessageID, reason)
			}
			equal(t, "told", told, []string{culprit})
			s.totals(5, 5)
		})
	}
}

// If a message cannot even be parked because of what is in it, the broker dead-letters it,
// and its neighbours go on.
func TestCannotBeParked(t *testing.T) {
	t.Parallel()
	msgs := newMsgs(6)
	culprit := msgs[2].MessageID
	h := &effects{OutcomeFunc: func(_ context.Context, _ *sqltx.Tx, m *message.Message) message.Outcome {
		if m.MessageID == culprit {
			return message.Park("no")
		}
		return message.Outcome{}
	}}
	s := stage(t, Config{Handler: h, MaxAttempts: 1,
		Parked: func(context.Context, *sqltx.Tx, *message.Message, string) error { panic("boom") }}, msgs...)
	s.settles(6)
	s.b.look(func() {
		equal(t, "dead-lettered", s.b.dead, []string{culprit})
		equal(t, "acked", len(s.b.acked), 5)
	})
	s.totals(5, 5)
}

// A handler that gives the wrong number of outcomes is as good as one that panics.
func TestWrongNumberOfOutcomes(t *testing.T) {
	t.Parallel()
	s := stage(t, Config{Handler: noOutcomes{}}, msg("m"))
	s.settles(1)
	if _, got := s.parked(); !strings.Contains(got, "0 outcomes for 1 messages") {
		t.Errorf("parked because %q", got)
	}
}

type noOutcomes struct{}

func (noOutcomes) HandleBatch(context.Context, *sqltx.Tx, []message.Message) []message.Outcome {
	return nil
}
