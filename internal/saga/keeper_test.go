package saga

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// keeper is one that is not running: a test calls what it does every second.
func (w *world) keeper(cfg KeeperConfig) *Keeper {
	w.t.Helper()
	cfg.Log = slog.New(slog.DiscardHandler)
	return NewKeeper(w.engine, w.db, cfg)
}

// us is a duration for SQL.
func us(d time.Duration) int64 { return d.Microseconds() }

// consumes writes down a live consumer of a queue that has been given what was published so long
// ago, and been idle for so long. Negative: not known, not idle.
func (w *world) consumes(queue, id string, latest, idle time.Duration) {
	w.t.Helper()
	ago := func(d time.Duration) any {
		if d < 0 {
			return nil
		}
		return us(d)
	}
	w.exec(`INSERT INTO saga_consumers VALUES (?, ?, NOW(6) - INTERVAL ? MICROSECOND, NOW(6) - INTERVAL ? MICROSECOND, NOW(6))
            ON DUPLICATE KEY UPDATE latest_at = VALUES(latest_at), idle_since = VALUES(idle_since), beat_at = VALUES(beat_at)`,
		[]byte(queue), []byte(id), ago(latest), ago(idle))
}

// upFor makes the pulse one that has been beaten for so long.
func (w *world) upFor(d time.Duration) {
	w.t.Helper()
	w.exec(`INSERT INTO saga_pulse VALUES (1, NOW(6), NOW(6) - INTERVAL ? MICROSECOND, 0)
            ON DUPLICATE KEY UPDATE beat_at = VALUES(beat_at), up_since = VALUES(up_since), downtime_us = 0`, us(d))
}

// alive makes all that was written down fresh: a test may take longer than anybody is believed.
func (w *world) alive() {
	w.t.Helper()
	w.exec(`UPDATE saga_pulse SET beat_at = NOW(6)`)
	w.exec(`UPDATE saga_consumers SET beat_at = NOW(6)`)
}

// rescue looks for lost commands.
func (w *world) rescue(k *Keeper) {
	w.t.Helper()
	w.alive()
	w.must(k.rescue(w.t.Context()))
}

// scan looks at deadlines.
func (w *world) scan(k *Keeper) {
	w.t.Helper()
	w.alive()
	w.must(k.scanDeadlines(w.t.Context()))
}

const unknown = -1 // time of what a consumer has been given, or is idle

func (w *world) pulse() pulse {
	w.t.Helper()
	p, err := readPulse(w.t.Context(), w.db)
	w.must(err)
	return p
}

// Of many workers one beats, a gap counts once and whole, and a clock that is set back takes
// nothing away.
func TestPulse(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	ready := true
	k := w.keeper(KeeperConfig{Ready: func() bool { return ready }})
	must := w.must

	ready = false
	must(k.beatOnce(ctx))
	if p := w.pulse(); !p.beat.IsZero() {
		t.Errorf("without a session with the broker there is a beat: %+v", p)
	}
	ready = true
	must(k.beatOnce(ctx))
	first := w.pulse()
	if !first.fresh() || first.downtime != 0 || first.now.Sub(first.up) > 10*time.Second {
		t.Errorf("the first beat: %+v", first)
	}
	k.beaten.Store(false)
	w.exec(`UPDATE saga_pulse SET beat_at = NOW(6)`)
	must(k.beatOnce(ctx))
	if k.beaten.Load() {
		t.Error("it beats although somebody has just done")
	}
	back := func(by time.Duration) {
		t.Helper()
		w.exec(`UPDATE saga_pulse SET beat_at = NOW(6) - INTERVAL ? MICROSECOND`, us(by))
	}
	back(5 * time.Second)
	must(k.beatOnce(ctx))
	if p := w.pulse(); p.downtime != 0 || !p.up.Equal(first.up) || !k.beaten.Load() {
		t.Errorf("after a gap of 5 s: %+v, up since %s before", p, first.up)
	}

	w.exec(`UPDATE saga_pulse SET up_since = NOW(6) - INTERVAL 1 DAY`)
	back(time.Hour)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := w.keeper(KeeperConfig{}).beatOnce(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	p := w.pulse()
	if off := p.downtime - time.Hour; off < 0 || off > 10*time.Second || p.now.Sub(p.up) > 10*time.Second {
		t.Errorf("after an hour: %+v", p)
	}
	ready = false // an outage is not over before the broker is back
	back(time.Minute)
	must(k.beatOnce(ctx))
	if now := w.pulse(); now.downtime != p.downtime || now.fresh() {
		t.Errorf("while the broker is away: %+v", now)
	}
	ready = true
	w.exec(`UPDATE saga_pulse SET up_since = NOW(6) - INTERVAL 1 DAY`)
	back(-time.Hour) // the server's clock was set back
	must(k.beatOnce(ctx))
	if now := w.pulse(); now.downtime != p.downtime || !now.fresh() || now.now.Sub(now.up) > 10*time.Second {
		t.Errorf("after the clock was set back: %+v", now)
	}
}

// What a process says of its queues is written down when it changes, and every few seconds.
func TestConsumersAreWrittenDown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var busy Standing
	idle := Standing{Subscribed: true, Idle: time.Hour}
	began := time.Now()
	k := w.keeper(KeeperConfig{Consumer: "me", Queues: map[string]func() Standing{
		"busy":  func() Standing { return busy },
		"quiet": func() Standing { idle.Idle = time.Hour + time.Since(began); return idle },
		"gone":  func() Standing { return Standing{} },
	}})
	tell := func() {
		t.Helper()
		w.must(k.tell(t.Context()))
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	busy = Standing{Subscribed: true, Latest: at}
	tell()
	all, err := consumers(t.Context(), w.db)
	w.must(err)
	if len(all) != 2 || len(all["busy"]) != 1 || len(all["quiet"]) != 1 {
		t.Fatalf("consumers: %+v", all)
	}
	if c := all["busy"][0]; c.id != "me" || !c.latest.Equal(at) || !c.idle.IsZero() {
		t.Errorf("busy: %+v", c)
	}
	if c := all["quiet"][0]; !c.latest.IsZero() || time.Since(c.idle) < time.Hour || time.Since(c.idle) > 2*time.Hour {
		t.Errorf("quiet: %+v", c)
	}
	beats := func() (n int) {
		return w.number(`SELECT COUNT(*) FROM saga_consumers WHERE beat_at > NOW(6) - INTERVAL 1 MINUTE`)
	}
	w.exec(`UPDATE saga_consumers SET beat_at = NOW(6) - INTERVAL 1 HOUR`)
	tell()
	if n := beats(); n != 0 {
		t.Errorf("%d are written although nothing has changed", n)
	}
	busy.Latest = time.Now().Add(time.Hour) // whoever published that has another clock
	tell()
	if n := beats(); n != 1 {
		t.Errorf("%d are written, want the one that has changed", n)
	}
	if n := w.number(`SELECT COUNT(*) FROM saga_consumers WHERE latest_at > NOW(6)`); n != 0 {
		t.Error("what is latest was published in the future")
	}
	for queue, told := range k.told {
		told.at = told.at.Add(-2 * tellAgain)
		k.told[queue] = told
	}
	tell()
	if n := beats(); n != 2 {
		t.Errorf("%d are written after a while, want both", n)
	}

	// One that was not heard of for long is swept, one that ends takes back what it said.
	w.consumes("busy", "other", 0, 0)
	w.consumes("busy", "dead", 0, 0)
	w.exec(`UPDATE saga_consumers SET beat_at = NOW(6) - INTERVAL 2 HOUR WHERE consumer = 'dead'`)
	w.must(k.rescue(t.Context()))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w.must(k.Run(ctx))
	if n := w.number(`SELECT COUNT(*) FROM saga_consumers`); n != 1 {
		t.Errorf("%d consumers are left, want the other one", n)
	}
}

// A timestamp from nowhere, which any client can put on a message, does not stop the pulse.
func TestPulseWithTimestampsFromNowhere(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for name, at := range map[string]time.Time{
		"far ahead":             time.Date(20_000, 1, 1, 0, 0, 0, 0, time.UTC),
		"the last there is":     time.Unix(1<<62, 0),
		"before all times":      time.Unix(-1<<40, 0),
		"of the year 0":         time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC),
		"1970, as of no clock":  time.Unix(0, 0),
		"the end of the column": time.Date(9999, 12, 31, 23, 59, 59, 999_999_999, time.UTC),
	} {
		t.Run(name, func(t *testing.T) {
			w.exec(`DELETE FROM saga_pulse`)
			k := w.keeper(KeeperConfig{Queues: map[string]func() Standing{"a": func() Standing { return Standing{Subscribed: true, Latest: at} }}})
			if err := k.beatOnce(t.Context()); err != nil || w.pulse().beat.IsZero() {
				t.Errorf("no beat: %v", err)
			}
		})
	}
}

// Each query of the keeper reads what it must, in the order in which it needs it.
func TestKeeperUsesIndexes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i := range 50 {
		put(t, w.db, fmt.Sprintf("id-%03d", i), "trip", Running, time.Duration(i)*time.Minute)
	}
	w.exec(`UPDATE saga_instances SET command_id = id, deadline_at = updated_at, again_at = updated_at, awaited_since = updated_at`)
	now := time.Now().UTC()
	for _, tt := range []struct {
		query string
		args  []any
		key   string
	}{
		{selectOpenSQL, []any{"RUNNING", beginning, now, beginning, []byte(""), openPage}, "ix_saga_status"},
		{selectAtDeadlineSQL, []any{now, beginning, now, beginning, []byte(""), duePage}, "ix_saga_deadline"},
		{selectUnansweredSQL, []any{now, beginning, now, beginning, []byte(""), duePage}, "ix_saga_again"},
	} {
		rows, err := w.db.QueryContext(t.Context(), "EXPLAIN FORMAT=TRADITIONAL "+tt.query, tt.args...)
		w.must(err)
		if plan := readPlan(t, rows); plan["key"] != tt.key || slices.Contains([]string{"ALL", "index"}, plan["type"]) {
			t.Errorf("plan of %s: %v", tt.query, plan)
		} else if extra := plan["Extra"]; strings.Contains(extra, "filesort") {
			t.Errorf("%s: %s", tt.query, extra)
		}
	}
}
