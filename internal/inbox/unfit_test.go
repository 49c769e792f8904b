package inbox

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// uuidv7 returns an id that was made at t.
func uuidv7(t time.Time) string {
	ms := t.UnixMilli()
	return fmt.Sprintf("%08x-%04x-7000-8000-%012x", ms>>16, ms&0xffff, ms)
}

func TestUnfit(t *testing.T) {
	t.Parallel()
	const retention = 24 * time.Hour
	began := time.Now()
	old, ahead := time.Now().Add(-retention-time.Minute), time.Now().Add(14*time.Hour)
	with := func(id string, at time.Time, body int) message.Message {
		return message.Message{Properties: message.Properties{MessageID: id, Timestamp: at, Type: "test"}, Body: bytes.Repeat([]byte("b"), body)}
	}
	tests := []struct {
		name string
		m    message.Message
		want string // part of the reason; "": processed
	}{
		{"fits", with("a", time.Now(), 1000), ""},
		{"no timestamp", with("b", time.Time{}, 1), ""},
		{"almost too old", with("c", time.Now().Add(-retention+time.Minute), 1), ""},
		{"longest id", with(strings.Repeat("i", 255), time.Now(), 1), ""},
		{"an hour ahead", with("d", time.Now().Add(time.Hour), 1), ""},
		{"no id", with("", time.Now(), 1), "no message_id"},
		{"id too long", with(strings.Repeat("i", 256), time.Now(), 1), "message_id of 256 bytes"},
		{"body too large", with("e", time.Now(), 1001), "body of 1001 bytes; 1000 is the limit"},
		{"old by timestamp", with("f", old, 1), "longer ago than duplicates are known (24h0m0s)"},
		{"old by id", with(uuidv7(old), time.Now(), 1), "longer ago than duplicates are known"},
		{"young by id", with(uuidv7(time.Now()), old, 1), ""},
		// Its record would be swept while it is still young.
		{"of the future by timestamp", with("g", ahead, 1), "in the future"},
		{"of the future by id", with(uuidv7(ahead), time.Now(), 1), "in the future"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if !tt.m.Timestamp.IsZero() { // it has waited for its turn
				tt.m.Timestamp = tt.m.Timestamp.Add(time.Since(began))
			}
			h := &effects{}
			s := stage(t, Config{Handler: h, MaxBody: 1000, Retention: retention}, tt.m, msg("neighbour"))
			s.settles(2)
			equal(t, "effects of the neighbour", s.effects("neighbour"), 1)
			if tt.want == "" {
				if s.stats.Done.Load() != 2 || !s.recorded(tt.m.MessageID) {
					t.Errorf("not processed: %+v", s.stats.Snapshot())
				}
				return
			}
			equal(t, "parked", s.stats.Parked.Load(), int64(1))
			r, got := s.parked()
			if !strings.Contains(got, tt.want) {
				t.Errorf("parked because %q, want %q", got, tt.want)
			}
			equal(t, "body", r.Body, tt.m.Body)
			properties := r.Properties
			if kept := r.Headers.String(message.HeaderParkedProperties); kept != "" {
				var err error
				if properties, err = message.DecodeProperties([]byte(kept)); err != nil {
					t.Fatal(err)
				}
			}
			equal(t, "id", properties.MessageID, tt.m.MessageID)
			if len(h.calls()) > 1 || s.recorded(tt.m.MessageID) {
				t.Errorf("handler called with %v", h.calls())
			}
		})
	}
}

// A message that does not fit must not swallow one with the same id that does.
func TestUnfitIsNoFirstCopy(t *testing.T) {
	t.Parallel()
	h := &effects{}
	entered, gate := h.held()
	s := stage(t, Config{Handler: h, MaxBody: 1000}, msg("opener"))
	receive(t, "the opener", entered)
	large := msg("same")
	large.Body = make([]byte, 1001)
	s.b.put(large, msg("same"))
	close(gate)
	s.settles(3)
	equal(t, "effects", s.effects("same"), 1)
	s.parked()
}

// Bodies over 4 MiB are not for an INSERT: the broker dead-letters them whole. Whoever waits
// for them is told all the same.
func TestHugeBodyIsDeadLettered(t *testing.T) {
	t.Parallel()
	var told []string
	huge := msg("huge")
	huge.Body = make([]byte, 4<<20+1)
	s := stage(t, Config{Handler: &effects{}, Parked: func(_ context.Context, _ *sqltx.Tx, m *message.Message, reason string) error {
		told = append(told, m.MessageID+": "+reason)
		return nil
	}}, msg("before"), huge, msg("after"), huge)
	s.settles(4)
	s.b.look(func() {
		equal(t, "dead-lettered", s.b.dead, []string{"huge", "huge"})
		equal(t, "acked", s.b.acked, []string{"before", "after"})
	})
	equal(t, "outbox rows", outboxRows(t, s.db, "TRUE"), []row(nil))
	s.stop()
	if len(told) == 0 || !strings.Contains(told[0], "huge: body of 4194305 bytes") {
		t.Errorf("told %q", told)
	}
}
