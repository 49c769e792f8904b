package saga

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"backstep/internal/message"
)

// A worker that would refuse a command as too old after its back-off is told so.
func TestTakes(t *testing.T) {
	t.Parallel()
	e := NewEngine(nil, Define("t", 3, Step("a", "q", act, undo), Step("b", "q", act, undo, RetryCap(time.Hour), Retry(20, time.Second)),
		Step("never waits for long", "q", act, undo, RetryCap(100*time.Hour), Retry(3, time.Second)),
		RemoteStep[trip, booking]("another's", "far", RetryCap(100*time.Hour), Retry(100, time.Hour))))
	if err := e.Takes(2 * time.Hour); err != nil {
		t.Error(err)
	}
	if err := e.Takes(2*time.Hour - 1); err == nil || !strings.Contains(err.Error(), "step b of t version 3 may wait 1h0m0s") {
		t.Errorf("it gave %v", err)
	}
	for _, tt := range []struct {
		attempts  int
		unlimited bool
		want      time.Duration
	}{{1, false, 0}, {2, false, time.Second}, {5, false, 8 * time.Second}, {13, false, 2048 * time.Second}, {14, false, time.Hour}, {1000, false, time.Hour}, {1, true, time.Hour}} {
		equal(t, fmt.Sprintf("%d attempts", tt.attempts), retryPolicy{tt.attempts, time.Second, time.Hour}.longest(tt.unlimited), tt.want)
	}
}

// A command is as old as its attempt, and no older, however long its saga stood still: workers refuse old ones.
func TestAgeOfACommand(t *testing.T) {
	t.Parallel()
	for name, verb := range map[string]Verb{"retried": VerbRetry, "undone": VerbCancel, "left out": VerbSkip} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			o := newOperator(t, &s)
			id := o.start("x")
			o.done(o.command())
			m := o.command()
			m.MessageID = agoID(t, 31*24*time.Hour)
			o.exec(`UPDATE saga_instances SET command_id = ?, updated_at = NOW(6) - INTERVAL 31 DAY WHERE id = ?`, m.MessageID, []byte(id))
			o.park(m, "why")
			o.does(id, Operation{Verb: verb, Step: "b", Direction: Execute})
			if next := o.command(); time.Since(next.Time()) > time.Minute {
				t.Errorf("the next command was made at %s", next.Time())
			}
		})
	}
}

// agoID is an id that was made so long ago.
func agoID(t *testing.T, ago time.Duration) string {
	t.Helper()
	u := uuid.MustParse(message.NewID())
	ms := time.Now().Add(-ago).UnixMilli()
	for i := range 6 {
		u[i] = byte(ms >> (40 - 8*i))
	}
	return u.String()
}
