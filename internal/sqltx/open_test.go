package sqltx_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

// Every statement is at READ COMMITTED, on every connection: what locks no gap deadlocks less.
func TestIsolation(t *testing.T) {
	db := open(t)
	level := func(q sqltx.Querier) (level string) {
		t.Helper()
		var name string
		if err := q.QueryRowContext(t.Context(), `
SHOW SESSION VARIABLES WHERE Variable_name IN ('tx_isolation', 'transaction_isolation')`).Scan(&name, &level); err != nil {
			t.Fatal(err)
		}
		return level
	}
	for range 3 {
		conn, err := db.Conn(t.Context()) // they are held: each is another one
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		if got := level(conn); got != "READ-COMMITTED" {
			t.Errorf("a connection is at %s", got)
		}
	}
}

const addSQL = `UPDATE counters SET n = n + 1 WHERE id = ?`

func TestSessionSettings(t *testing.T) {
	db := open(t)
	var zone, mode string
	var wait, lockWait int
	if err := db.QueryRowContext(t.Context(), `
SELECT @@session.time_zone, @@session.sql_mode, @@session.wait_timeout, @@session.innodb_lock_wait_timeout`).Scan(&zone, &mode, &wait, &lockWait); err != nil {
		t.Fatal(err)
	}
	if zone != "+00:00" || !strings.Contains(mode, "STRICT_ALL_TABLES") || wait != 45 || lockWait != 1 {
		t.Errorf("time zone %s, mode %s, wait_timeout %d, lock wait %d", zone, mode, wait, lockWait)
	}
}

// B19: what is larger than the server takes is refused as that. It does not cost the
// connection, and does not look as if it had been lost.
func TestLargerThanTheServerTakes(t *testing.T) {
	db := open(t)
	db.SetMaxOpenConns(1)
	var limit, before, after int
	if err := db.QueryRowContext(t.Context(), `SELECT @@max_allowed_packet, CONNECTION_ID()`).Scan(&limit, &before); err != nil {
		t.Fatal(err)
	}
	calls := 0
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		calls++
		_, err := tx.Exec(ctx, `SELECT LENGTH(?)`, make([]byte, limit+1))
		return err
	})
	if class := sqltx.Classify(err); calls != 1 || class != sqltx.Permanent && class != sqltx.Other {
		t.Errorf("%.200v, of class %v, after %d calls", err, class, calls)
	}
	if err := db.QueryRowContext(t.Context(), `SELECT CONNECTION_ID()`).Scan(&after); err != nil || after != before {
		t.Errorf("connection %d instead of %d, %v", after, before, err)
	}
}

func TestProbeAndServer(t *testing.T) {
	db := open(t)
	if err := sqltx.Probe(t.Context(), db); err != nil {
		t.Error(err)
	}
	if err := sqltx.CheckServer(t.Context(), db, sqltx.Config{}); err != nil {
		t.Error(err)
	}
	nobody, err := sqltx.Open("root@tcp(127.0.0.1:1)/x", sqltx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = nobody.Close() }()
	if err := sqltx.Probe(t.Context(), nobody); sqltx.Classify(err) != sqltx.Lost {
		t.Errorf("Probe of nobody gave %v, want a lost connection", err)
	}
}

func TestOpenRefuses(t *testing.T) {
	for _, dsn := range []string{"", "user:hunter2@nonsense", "user:hunter2@tcp(127.0.0.1:3306)/"} {
		_, err := sqltx.Open(dsn, sqltx.Config{})
		if err == nil || strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), "/database") {
			t.Errorf("Open(%q) gave %v, want an error that shows the form and no password", dsn, err)
		}
	}
	if got := sqltx.Redact("user:hunter2@tcp(h:1)/d"); got != "user@tcp(h:1)/d" {
		t.Errorf("Redact gave %q", got)
	}
}

// A migration may take as long as it takes; all else gives up on a server that does not answer.
func TestLongStatements(t *testing.T) {
	dsn := testenv.Database(t) + "&readTimeout=10s"
	const wait = `SELECT SLEEP(11)`
	for long, lost := range map[bool]bool{false: true, true: false} {
		t.Run(fmt.Sprint(long), func(t *testing.T) {
			t.Parallel()
			db, err := sqltx.Open(dsn, sqltx.Config{LongStatements: long})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = db.Close() }()
			if _, err := db.ExecContext(t.Context(), wait); (err != nil) != lost {
				t.Errorf("it gave %v", err)
			}
		})
	}
}
