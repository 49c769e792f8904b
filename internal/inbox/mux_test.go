package inbox

import (
	"context"
	"errors"
	"strings"
	"testing"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

func TestUnknownTypeIsParked(t *testing.T) {
	t.Parallel()
	h, sagas := &effects{}, &effects{}
	known, unknown, saga := msg("known"), msg("unknown"), msg("saga")
	unknown.Type = "no.such\xff"
	saga.Type, saga.Headers = "whatever", message.Headers{message.HeaderSagaID: []byte("s1")}
	entered, gate := h.held()
	s := stage(t, Config{Handler: &Mux{Types: map[string]Handler{"test": h, "test2": h}, Sagas: sagas}}, msg("opener"))
	receive(t, "the opener", entered)
	known2 := msg("known2")
	known2.Type = "test2"
	s.b.put(unknown, saga, known, known2)
	close(gate)
	s.settles(5)
	if r, why := s.parked(); r.MessageID != "unknown" || !strings.Contains(why, `unknown message type "no.such\xff"`) {
		t.Errorf("parked %q because %q", r.MessageID, why)
	}
	equal(t, "to the handler", h.calls(), [][]string{{"opener"}, {"known", "known2"}})
	equal(t, "to the sagas", sagas.calls(), [][]string{{"saga"}})
	// Without a handler for sagas their messages are unknown too.
	out := (&Mux{}).HandleBatch(t.Context(), nil, []message.Message{saga})
	equal(t, "outcome", out[0].Kind, message.Parked)
}

// In a transaction that has ended no other handler is called.
func TestMuxStopsWithItsTransaction(t *testing.T) {
	t.Parallel()
	db := database(t)
	fails, other := &effects{BatchFunc: func(_ context.Context, tx *sqltx.Tx, _ []string) { tx.Fail(errors.New("gone")) }}, &effects{}
	m1, m2 := msg("1"), msg("2")
	m2.Type = "other"
	err := sqltx.Once(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		(&Mux{Types: map[string]Handler{"test": fails, "other": other}}).HandleBatch(ctx, tx, []message.Message{m1, m2})
		return nil
	})
	if err == nil || len(other.calls()) > 0 {
		t.Errorf("error %v, the other handler was called %d times", err, len(other.calls()))
	}
}
