package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// fillSQL inserts 50,000 rows.
const fillSQL = `
INSERT INTO outbox_events (message_id, ordering_key, exchange, routing_key, properties, headers, payload, status, published_at)
WITH d AS (SELECT 0 n UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4
           UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9)
SELECT UUID(), UUID(), 'backstep.commands', 'q', '{}', '{}', '{}', ?, NOW(6)
  FROM d a, d b, d c, d e, (SELECT 0 UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4) f`

// plan returns the lines of a query's EXPLAIN, each as the columns' names and values. (MySQL 9
// draws a tree if it is not told to make a table.)
func plan(t *testing.T, db *sql.DB, query string, args ...any) (lines []map[string]string) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), "EXPLAIN FORMAT=TRADITIONAL "+query, args...)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	columns, err := rows.Columns()
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		values, into := make([]sql.NullString, len(columns)), make([]any, len(columns))
		for i := range values {
			into[i] = &values[i]
		}
		if err := rows.Scan(into...); err != nil {
			t.Fatal(err)
		}
		line := map[string]string{}
		for i, c := range columns {
			line[c] = values[i].String
		}
		lines = append(lines, line)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return lines
}

// B14, B34: one index serves the relay's read exactly, whatever is in the table.
func TestReadUsesItsIndex(t *testing.T) {
	t.Parallel()
	db := database(t)
	first, later := map[int]uint64{}, map[int]uint64{}
	for s := range message.Shards {
		first[s], later[s] = 0, uint64(1000*s)
	}
	check := func(what string) {
		t.Helper()
		for _, q := range []struct {
			after map[int]uint64
			last  uint64
			limit int
			known []uint64
		}{
			{first, math.MaxUint64, 62, nil}, {later, 40_000, 62, nil}, {map[int]uint64{5: 17}, 40_000, 1000, nil},
			{first, math.MaxUint64, 62, []uint64{3, 4, 17, 19_000}}, {map[int]uint64{5: 17}, 40_000, 1000, []uint64{20}},
		} {
			query, args := outbox.ReadQuery(q.after, q.last, q.limit, q.known...)
			parts := 0
			for _, line := range plan(t, db, query, args...) {
				switch {
				case line["key"] == "ix_outbox_relay" && (line["type"] == "range" || line["type"] == "ref"):
					parts++
				case strings.Contains(line["Extra"], "optimized away"), line["table"] == "": // MAX(id)
				default:
					t.Errorf("%s: %v", what, line)
				}
				if strings.Contains(line["Extra"], "filesort") || strings.Contains(line["Extra"], "temporary") {
					t.Errorf("%s: %v", what, line)
				}
			}
			if parts != len(q.after) {
				t.Errorf("%s: %d parts of %d use the index", what, parts, len(q.after))
			}
		}
	}
	check("no rows")
	add(t, db, command("q", "one"))
	check("one row")
	exec(t, db, fillSQL, "PENDING")
	check("50,000 pending")
	exec(t, db, `ANALYZE TABLE outbox_events`)
	check("50,000 pending, analyzed")
	exec(t, db, `UPDATE outbox_events SET status = 'PUBLISHED'`)
	check("50,000 published")
	exec(t, db, `ANALYZE TABLE outbox_events`)
	check("50,000 published, analyzed")

	query, args := outbox.ReadQuery(first, math.MaxUint64, 62)
	looks := looksAt(t, db, func(conn *sql.Conn) {
		rows, err := conn.QueryContext(t.Context(), query, args...)
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		n := 0
		for rows.Next() {
			n++
		}
		if n != 1 { // the highest id
			t.Errorf("%d rows", n)
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
	})
	if looks > 100 {
		t.Errorf("reading nothing from among 50,000 published rows looks at %d", looks)
	}
}

// looksAt returns how many index entries and rows something looks at, as the server counts.
func looksAt(t *testing.T, db *sql.DB, do func(*sql.Conn)) int {
	t.Helper()
	conn, err := db.Conn(t.Context()) // one connection, so that the counters are ours
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	looks := func() (n int) {
		t.Helper()
		if err := conn.QueryRowContext(t.Context(), `SELECT SUM(VARIABLE_VALUE) FROM `+statusTable(t, db)+`
 WHERE VARIABLE_NAME LIKE 'Handler_read%'`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	looks()
	idle := -looks() + looks() // what asking costs
	before := looks()
	do(conn)
	return looks() - before - idle
}

// statusTable is where the server keeps a session's counters.
func statusTable(t *testing.T, db *sql.DB) string {
	t.Helper()
	if strings.Contains(text(t, db, `SELECT VERSION()`), "MariaDB") {
		return "information_schema.SESSION_STATUS"
	}
	return "performance_schema.session_status"
}

// B16: ids are given when rows are inserted, and seen when they commit. Those that commit out
// of order are published within a poll; those that are rolled back hold up nothing.
func TestRowsThatCommitLateAreNotSkipped(t *testing.T) {
	t.Parallel()
	const writers, rounds, pollMax = 10, 10, 100 * time.Millisecond
	db, f := database(t), &fake{}
	var mu sync.Mutex // guards the two
	committed, sent := map[string]time.Time{}, map[string]time.Time{}
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		mu.Lock()
		sent[m.MessageID] = time.Now()
		mu.Unlock()
		c.answer(tag, message.Confirmed, "")
		return nil
	}
	start(t, db, f, outbox.Config{PollMax: pollMax})
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range rounds {
				early := fmt.Sprintf("early-%d-%d", w, i)
				err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
					if err := outbox.Add(ctx, tx, command("q", early)); err != nil {
						return err
					}
					late := fmt.Sprintf("late-%d-%d", w, i)
					add(t, db, command("q", late))
					eventually(t, late+" is published", func() bool { return f.times(late) > 0 })
					if i%2 == 0 {
						return context.Canceled // rolled back
					}
					return nil
				})
				mu.Lock()
				if err == nil {
					committed[early] = time.Now()
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	published(t, db, writers*rounds*3/2)
	mu.Lock()
	defer mu.Unlock()
	for id, at := range committed {
		// A poll, and what a busy machine needs to make it.
		if took := sent[id].Sub(at); took > pollMax+2*time.Second {
			t.Errorf("%s was published %s after it committed", id, took)
		}
	}
	if len(sent) != writers*rounds*3/2 || len(f.all()) != len(sent) {
		t.Errorf("%d messages in %d publishes, want %d", len(sent), len(f.all()), writers*rounds*3/2)
	}
}

// What the relay has in memory is not read again, however often it looks before the broker has
// answered; what is added meanwhile is.
func TestRowsInFlightAreNotReadAgain(t *testing.T) {
	t.Parallel()
	db := database(t)
	const n = 50
	var mu sync.Mutex
	var answers []func()
	f := &fake{PublishFunc: func(c *fakeChannel, tag uint64, _ *message.Message) error {
		mu.Lock()
		defer mu.Unlock()
		answers = append(answers, func() { c.answer(tag, message.Confirmed, "") })
		return nil
	}}
	add(t, db, commands("q", names("early", n))...)
	r := start(t, db, f, outbox.Config{})
	eventually(t, "the first rows are in flight", func() bool { return len(f.all()) == n })
	for i := range n {
		add(t, db, command("q", fmt.Sprintf("late-%d", i)))
		r.Wake(outbox.AllShards)
		eventually(t, "the new row is in flight", func() bool { return len(f.all()) == n+i+1 })
	}
	if got := r.RowsRead(); got != 2*n {
		t.Errorf("%d rows were read, %d are there", got, 2*n)
	}
	mu.Lock()
	defer mu.Unlock()
	for _, answer := range answers {
		answer()
	}
	published(t, db, 2*n)
}
