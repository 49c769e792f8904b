package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

// history adds rows that were published so long ago.
func history(t testing.TB, db *sql.DB, n int, ago time.Duration) {
	t.Helper()
	if err := outbox.AddHistory(t.Context(), db, command("q", ""), n, func(int) {}); err != nil {
		t.Fatal(err)
	}
	exec(t, db, `UPDATE outbox_events SET published_at = NOW(6) - INTERVAL ? SECOND WHERE status = 'PUBLISHED'`, int(ago.Seconds()))
}

// Of three relays one sweeps, a batch at a time, until nothing is left that is past its
// retention; when it stops another does. A sweep that fails holds up no other.
func TestOneRelaySweeps(t *testing.T) {
	t.Parallel()
	const n = 4*outbox.SweepBatch + 1
	db, f := database(t), &fake{}
	history(t, db, n, 25*time.Hour)
	add(t, db, commands("q", names("m", 10))...)
	var running, calls, failures atomic.Int64
	var mu sync.Mutex // guards by
	by := map[int]bool{}
	type sweeper struct {
		*relay
		stop func()
	}
	var all []sweeper
	for i := range 3 {
		r := start(t, db, f, outbox.Config{})
		ctx, stop := context.WithCancel(context.Background())
		var done sync.WaitGroup
		done.Go(func() {
			_ = r.RunSweeps(ctx, func(context.Context, int) (int64, error) {
				failures.Add(1)
				return 0, fmt.Errorf("a sweep that fails")
			}, func(ctx context.Context, limit int) (int64, error) {
				if running.Add(1) > 1 {
					t.Error("two relays sweep at a time")
				}
				defer running.Add(-1)
				calls.Add(1)
				mu.Lock()
				by[i] = true
				mu.Unlock()
				n, err := outbox.Sweep(ctx, db, 24*time.Hour, limit)
				if n > int64(limit) {
					t.Errorf("%d rows in one batch, %d are allowed", n, limit)
				}
				return n, err
			})
		})
		all = append(all, sweeper{r, sync.OnceFunc(func() { stop(); done.Wait() })})
		t.Cleanup(all[i].stop)
	}
	published := func() int { return having(t, db, "PUBLISHED") }
	eventually(t, "history is swept, and nothing else", func() bool { return published() == 10 })
	if calls := calls.Load(); calls < n/outbox.SweepBatch {
		t.Errorf("%d batches for %d rows", calls, n)
	}
	if failures.Load() == 0 {
		t.Error("the sweep that fails was not called")
	}

	for _, s := range all {
		if s.Leads() {
			s.stop()
			s.relay.stop()
			break
		}
	}
	history(t, db, 1, 25*time.Hour) // and of the others
	eventually(t, "another sweeps", func() bool { return published() == 0 })
	mu.Lock()
	defer mu.Unlock()
	if len(by) < 2 {
		t.Errorf("relays %v swept, want another too when the first had stopped", by)
	}
}

// What a sweep has locked nobody else waits for, nor does it wait for them, while an old
// transaction keeps the server from clearing away what was deleted. Writers add, due messages are
// promoted, relays mark.
func TestSweepHoldsUpNobody(t *testing.T) {
	for name, cfg := range map[string]outbox.Config{"mark": {}, "delete": {DeletePublished: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const n = 2000
			db, f := database(t), &fake{}
			begin := func(level sql.IsolationLevel) *sql.Tx {
				t.Helper()
				tx, err := db.BeginTx(t.Context(), &sql.TxOptions{Isolation: level})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = tx.Rollback() }) // they are open to the end of the test
				return tx
			}
			history(t, db, n, 25*time.Hour)
			old := begin(sql.LevelRepeatableRead)
			var seen int
			if err := old.QueryRowContext(t.Context(), `SELECT COUNT(*) FROM outbox_events`).Scan(&seen); err != nil {
				t.Fatal(err)
			}
			const left = outbox.SweepBatch - 100 // so that the last batch looks beyond the last row
			if swept, err := outbox.Sweep(t.Context(), db, 24*time.Hour, n-left); swept != n-left || err != nil {
				t.Fatalf("swept %d, %v", swept, err)
			}
			add(t, db, commands("q", names("a", n))...)
			exec(t, db, `ANALYZE TABLE outbox_events`) // by what it believes the server chooses its indexes
			exec(t, begin(sql.LevelReadCommitted), insertForeignSQL, "open", "{}", "{}", "{}")

			sweep := begin(sql.LevelReadCommitted)
			swept, err := outbox.SweepIn(t.Context(), sqltx.Join(sweep), 24*time.Hour, outbox.SweepBatch)
			if err != nil || swept != left {
				t.Fatalf("swept %d, %v, want %d", swept, err, left)
			}
			var later []outbox.Delayed
			for _, id := range names("s", n) {
				later = append(later, after(0, command("q", id)))
			}
			schedule(t, db, later...)
			start(t, db, f, cfg)
			add(t, db, commands("q", names("b", n))...)
			eventually(t, "all is published and marked", func() bool {
				return having(t, db, "PENDING") == 0 && number(t, db, `SELECT COUNT(*) FROM scheduled_messages`) == 0 && len(f.all()) >= 3*n
			})
			if err := old.QueryRowContext(t.Context(), `SELECT COUNT(*) FROM outbox_events`).Scan(&seen); seen != n {
				t.Errorf("the old transaction sees %d rows, %v; it is not open any more", seen, err)
			}
		})
	}
}

// What relay, schedule, sweeper and operators ask all the time looks at as much beside 20,000
// rows that were published an hour ago, and as many messages that are due in a year, as beside none.
func TestHistoryIsNotLookedAt(t *testing.T) {
	t.Parallel()
	db := database(t)
	all := map[int]uint64{}
	for s := range message.Shards {
		all[s] = 0
	}
	read, readArgs := outbox.ReadQuery(all, 1<<40, 62)
	looks := func() map[string]int {
		exec(t, db, `ANALYZE TABLE outbox_events, scheduled_messages`)
		found := map[string]int{}
		for _, q := range []struct {
			query string
			args  []any
		}{
			{read, readArgs}, {outbox.ScheduleQueries[0], nil}, {outbox.ScheduleQueries[1], []any{500}},
			{outbox.SelectOldSQL, []any{24 * 3600, 500}},
		} {
			found[strings.TrimSpace(q.query)] = looksAt(t, db, func(conn *sql.Conn) {
				rows, err := conn.QueryContext(t.Context(), q.query, q.args...)
				if err != nil {
					t.Fatal(err)
				}
				defer rows.Close()
				for rows.Next() { //nolint:revive // what they are does not matter
				}
				if err := rows.Err(); err != nil {
					t.Fatal(err)
				}
			})
		}
		return found
	}
	add(t, db, commands("q", names("m", 50))...)
	schedule(t, db, after(0, command("q", "due")))
	before := looks()
	history(t, db, 20_000, time.Hour)
	if err := outbox.AddFarFuture(t.Context(), db, command("q", ""), 20_000, func(int) {}); err != nil {
		t.Fatal(err)
	}
	for query, n := range looks() {
		// One more each where a range ends at an entry instead of the index's end.
		if n > before[query]+message.Shards+1 {
			t.Errorf("it looks at %d instead of %d: %s", n, before[query], query)
		}
	}
}

// A relay that has nothing to do asks the database little: two reads every eighth of a second at
// most, four statements for its leases a fifth of their TTL, and a look at the schedule.
func TestIdleRelayAsksLittle(t *testing.T) {
	t.Parallel()
	const during = 4 * time.Second
	c, db := counted(t, testenv.Database(t))
	r := start(t, db, &fake{}, outbox.Config{PollMax: 250 * time.Millisecond})
	eventually(t, "it has all shards", func() bool { return r.Shards() == message.Shards })
	sent := func() (n int, counts map[string]int) {
		counts, err := c.Counts()
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range counts {
			n += k
		}
		return n, counts
	}
	began := time.Now()
	// It falls asleep in steps: 5 ms, 10 ms, …
	pause(t, time.Second)
	before, _ := sent()
	pause(t, during)
	after, counts := sent()
	most := int(30 * time.Since(began).Seconds())
	if n := after - before; n > most || n < int(during.Seconds()) {
		t.Errorf("%d statements in %s, want no more than %d: %v", n, during, most, counts)
	}
	if counts["SELECT scheduled_messages"] == 0 || counts["SELECT outbox_events"] == 0 {
		t.Errorf("it does not look: %v", counts)
	}
}

// pause lets so much time pass.
func pause(t testing.TB, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
		t.Fatal("the test is over")
	}
}
