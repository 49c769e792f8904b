package e2e

import (
	"database/sql"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"backstep/internal/sqltx"
	"backstep/internal/testenv"
	"backstep/migrations"
)

// A migration is killed at a statement, before the server got it and after it was done. The
// next one finishes the work, and the schema is as if nothing had happened.
func TestMigrationKilled(t *testing.T) {
	whole := openDSN(t, testenv.Database(t))
	if _, err := migrations.Up(t.Context(), whole, nil); err != nil {
		t.Fatal(err)
	}
	want := schema(t, whole)
	for name, tt := range map[string]struct {
		statement string
		fate      fate
	}{
		"first table, done":         {"CREATE TABLE IF NOT EXISTS outbox_events", doneButNotAnswered},
		"saga table, not arrived":   {"CREATE TABLE IF NOT EXISTS saga_steps", lostOnTheWay},
		"last table, done":          {"CREATE TABLE IF NOT EXISTS shipments", doneButNotAnswered},
		"version of the last, done": {"INSERT INTO goose_db_version", doneButNotAnswered},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := &wheel{t: t, dsn: testenv.Database(t), broker: testenv.Vhost(t)}
			w.db = openDSN(t, w.dsn)
			var mu sync.Mutex // guards victim: its first statement may come before we have it
			var victim *proc
			kill := func(statement string) fate {
				if !strings.Contains(statement, tt.statement) {
					return answered
				}
				mu.Lock()
				defer mu.Unlock()
				victim.signal(syscall.SIGKILL)
				return tt.fate
			}
			dsn := w.proxied(kill)
			mu.Lock()
			victim = w.startArgs("backstep", []string{"migrate", "up"}, "BACKSTEP_MYSQL_DSN="+dsn)
			mu.Unlock()
			victim.killed(60 * time.Second)
			again := w.startArgs("backstep", []string{"migrate", "up"})
			select {
			case <-again.done: // it waits for the lock of the one that was killed
			case <-time.After(120 * time.Second):
				t.Fatalf("migrate up did not end:\n%s", again.text())
			}
			if again.err != nil {
				t.Fatalf("migrate up: %v\n%s", again.err, again.text())
			}
			if got := schema(t, w.db); got != want {
				t.Errorf("schema after a killed migration:\n%s\nwant\n%s", got, want)
			}
			if err := migrations.Check(t.Context(), w.db); err != nil {
				t.Error(err)
			}
		})
	}
}

func openDSN(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := sqltx.Open(dsn, sqltx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// schema returns how every table would be created.
func schema(t *testing.T, db *sql.DB) string {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), `SHOW TABLES`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var tables []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(name, "goose") { // goose's own hold counters
			tables = append(tables, name)
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, table := range tables {
		var name, create string
		if err := db.QueryRowContext(t.Context(), "SHOW CREATE TABLE "+table).Scan(&name, &create); err != nil {
			t.Fatal(err)
		}
		all.WriteString(create + "\n")
	}
	return all.String()
}
