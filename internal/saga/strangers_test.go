package saga

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// Sagas that are overdue and whose definition a worker does not know are told of, once in a while.
func TestStrangers(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("a"))
	w.upFor(24 * time.Hour)
	put(t, w.db, "long", "cruise", Running, 2*time.Hour)
	put(t, w.db, "longer", "cruise", Compensating, 3*time.Hour)
	put(t, w.db, "overdue", "cruise", Running, 30*time.Minute)
	put(t, w.db, "in time", "flight", Running, 30*time.Minute)
	put(t, w.db, "ended", "flight", Completed, 9*time.Hour)
	put(t, w.db, "ours", "trip", Running, 9*time.Hour)
	w.exec(`UPDATE saga_instances SET deadline_at = NOW(6) - INTERVAL 2 MINUTE WHERE id IN ('overdue', 'long')`)
	put(t, w.db, "edited", "trip", Running, 4*time.Hour)
	w.exec(`UPDATE saga_instances SET plan = 'b' WHERE id = 'edited'`)
	var log bytes.Buffer
	k := w.keeper(KeeperConfig{})
	k.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	lines := func() []string {
		w.scan(k)
		defer log.Reset()
		var out []string
		for line := range strings.Lines(log.String()) {
			if strings.Contains(line, "does not have their definition") {
				out = append(out, line)
			}
		}
		return out
	}
	first := lines()
	if len(first) != 2 {
		t.Fatalf("%d warnings, want one for cruise and one for trip: %s", len(first), first)
	}
	all := strings.Join(first, "")
	for _, part := range []string{
		"level=WARN", "saga_type=cruise saga_version=1", "sagas=3 oldest_saga_id=longer",
		"saga_type=trip saga_version=1 steps=b sagas=1 oldest_saga_id=edited",
	} {
		if !strings.Contains(all, part) {
			t.Errorf("the warnings do not have %q: %s", part, all)
		}
	}
	equal(t, "warnings at once", len(lines()), 0)
	k.warned = k.warned.Add(-warnPause)
	equal(t, "warnings a while later", len(lines()), 2)
}
