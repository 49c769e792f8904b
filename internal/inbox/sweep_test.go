package inbox

import (
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// recordsSQL makes 1000 records, processed so many hours ago.
const recordsSQL = `
INSERT INTO inbox_messages (consumer, message_id, processed_at)
WITH d AS (SELECT 0 n UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4
           UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9)
SELECT 'q', CONCAT(?, a.n, b.n, c.n), NOW(6) - INTERVAL ? HOUR
  FROM d a, d b, d c`

// B70: what a sweep has locked no lane waits for, nor does it wait for a lane whose transaction is
// open, while an old transaction keeps the server from clearing away what was deleted.
func TestSweepHoldsUpNoLane(t *testing.T) {
	t.Parallel()
	db := database(t)
	exec(t, db, recordsSQL, "old-", 49)
	old, err := db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer old.Rollback() //nolint:errcheck // it is open to the end of the test
	exec(t, old, `SELECT COUNT(*) FROM inbox_messages`)
	if n, err := Sweep(t.Context(), db, 24*time.Hour, 600); n != 600 || err != nil {
		t.Fatalf("swept %d, %v", n, err)
	}
	hold(t, db, `INSERT INTO inbox_messages (consumer, message_id) VALUES ('q', 'old-7')`) // between two that go

	open, err := db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		t.Fatal(err)
	}
	defer open.Rollback() //nolint:errcheck // it is open to the end of the test
	if n, err := sweep(t.Context(), sqltx.Join(open), 24*time.Hour, 500); n != 400 || err != nil {
		t.Fatalf("swept %d, %v; want 400", n, err)
	}
	h, b := &effects{}, newBroker("q")
	run(t, db, b, Config{Queue: "q", Handler: h, Batch: 50})
	msgs := newMsgs(200)
	for i := range msgs { // between those that go, before and behind them
		msgs[i].MessageID = fmt.Sprintf("old-%03d-%s", i*5, msgs[i].MessageID)
	}
	b.put(msgs...)
	eventually(t, "all are processed", b.settled(len(msgs)))
	if n := number(t, db, `SELECT COUNT(*) FROM effects`); n != len(msgs) {
		t.Errorf("%d effects of %d messages", n, len(msgs))
	}
	if err := open.Commit(); err != nil {
		t.Errorf("commit: %v", err)
	}
	if n := number(t, db, `SELECT COUNT(*) FROM inbox_messages`); n != len(msgs) {
		t.Errorf("%d records, want %d", n, len(msgs))
	}
}

// The sweep looks at the records it deletes and no others, however many or few there are.
func TestSweepUsesItsIndex(t *testing.T) {
	t.Parallel()
	db := database(t)
	check := func(what string) {
		t.Helper()
		for query, want := range map[string]string{
			strings.ReplaceAll(selectOldSQL, "?", "500"):                                                                 "ix_inbox_retention",
			fmt.Sprintf(deleteOldSQL, "SELECT 'q' AS consumer, 'old-123' AS message_id UNION ALL SELECT 'q', 'old-124'"): "PRIMARY",
		} {
			if keys := plannedKeys(t, db, query); !slices.Equal(keys, []string{want}) {
				t.Errorf("%s: the sweep uses %q, want %s", what, keys, want)
			}
		}
	}
	check("no records")
	exec(t, db, recordsSQL, "old-", 49)
	exec(t, db, `ANALYZE TABLE inbox_messages`)
	check("1000 records to be swept")
	for i := range 10 {
		exec(t, db, recordsSQL, fmt.Sprintf("new-%d-", i), 1)
	}
	exec(t, db, `ANALYZE TABLE inbox_messages`)
	check("and 10,000 that are not")
}

// plannedKeys returns the index of each table that a statement reads; "" is none. Lists of values
// are left out.
func plannedKeys(t *testing.T, db *sql.DB, query string) (keys []string) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), "EXPLAIN FORMAT=TRADITIONAL "+query)
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
		if line["table"] != "" && !strings.HasPrefix(line["table"], "<") {
			keys = append(keys, line["key"])
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return keys
}

// B69: Sweep never removes the record of a message that a lane would still process.
func TestSweepKeepsWhatALaneAccepts(t *testing.T) {
	t.Parallel()
	db := database(t)
	const retention = time.Hour
	l := NewLane(db, nil, Config{Queue: "q", Retention: retention}, &Stats{})
	// Processed at any time since they were made, made at any time a lane accepts; then the
	// clocks go on until the sweep takes the record.
	type made struct{ at, processed time.Duration } // before now
	var accepted []made
	var records []any
	for at := -20 * time.Hour; at <= 60*time.Hour; at += 5 * time.Hour / 6 {
		for processed := time.Duration(0); processed <= 60*time.Hour; processed += 5 * time.Hour / 4 {
			m := made{at, processed}
			d := func(now time.Duration) *message.Delivery { // as seen that long before now
				return &message.Delivery{Message: msg(uuidv7(time.Now().Add(now - m.at)))}
			}
			if l.unfit(d(m.processed)) != "" {
				continue // it was never processed
			}
			if l.unfit(d(0)) == "" {
				accepted = append(accepted, m)
			}
			records = append(records, fmt.Appendf(nil, "%d/%d", m.at, m.processed), int(m.processed.Seconds()))
		}
	}
	total := len(records) / 2
	exec(t, db, `INSERT INTO inbox_messages (consumer, message_id, processed_at) VALUES `+
		strings.Repeat(`('q', ?, NOW(6) - INTERVAL ? SECOND), `, total-1)+`('q', ?, NOW(6) - INTERVAL ? SECOND)`, records...)
	var swept int64
	for {
		n, err := Sweep(t.Context(), db, retention, 70)
		if err != nil {
			t.Fatal(err)
		}
		if n > 70 {
			t.Fatalf("swept %d at once, 70 is the limit", n)
		}
		if swept += n; n == 0 {
			break
		}
	}
	for _, m := range accepted {
		if !recorded(t, db, "q", fmt.Sprintf("%d/%d", m.at, m.processed)) {
			t.Errorf("made %s ago, processed %s ago: a lane accepts it and its record was swept", m.at, m.processed)
		}
	}
	if len(accepted) == 0 || swept == 0 || int(swept) == total {
		t.Errorf("%d accepted, %d of %d swept: the test shows nothing", len(accepted), swept, total)
	}
}
