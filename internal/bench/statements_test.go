package bench

import (
	"context"
	"database/sql"
	"fmt"
	"maps"
	"testing"

	"github.com/go-sql-driver/mysql"

	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

func TestKindOf(t *testing.T) {
	for _, tt := range []struct{ query, want string }{
		{"\nINSERT INTO orders (id, note)\nVALUES ('it''s from x', _binary'join y')", "INSERT orders"},
		{"INSERT INTO saga_steps (a) VALUES (1) ON DUPLICATE KEY UPDATE a = VALUES(a)", "INSERT saga_steps"},
		{"UPDATE inventory\n   SET available = 1", "UPDATE inventory"},
		{"UPDATE (SELECT 'a' AS id UNION ALL SELECT 'from b \\' into c') v\n STRAIGHT_JOIN saga_instances i ON i.id = v.id", "UPDATE saga_instances"},
		{"SELECT sku\n  FROM inventory\n ORDER BY sku\n   FOR UPDATE", "SELECT inventory FOR UPDATE"},
		{"\n (SELECT id\n  FROM outbox_events LIMIT 1) UNION ALL (SELECT id FROM others)", "SELECT outbox_events"},
		{"SELECT @@global.read_only", "SELECT"},
		{"/* hint */ x", "OTHER"},
		{"DELETE FROM inbox_messages WHERE 1", "DELETE inbox_messages"},
		{"START TRANSACTION", "START TRANSACTION"},
		{"SET TRANSACTION ISOLATION LEVEL READ COMMITTED", "SET TRANSACTION"},
		{"SET time_zone = '+00:00'", "SET"},
		{"SAVEPOINT s1", "SAVEPOINT"},
		{"ROLLBACK TO SAVEPOINT s1", "ROLLBACK TO"},
		{"COMMIT", "COMMIT"},
	} {
		if got := kindOf(tt.query); got != tt.want {
			t.Errorf("kindOf(%q) = %q, want %q", tt.query, got, tt.want)
		}
	}
}

// TestStatements holds the counts against the server's own, which are of this connection.
func TestStatements(t *testing.T) {
	cfg, err := mysql.ParseDSN(testenv.Database(t))
	if err != nil {
		t.Fatal(err)
	}
	s, err := CountStatements(cfg.Net, cfg.Addr)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()

	cfg.Net, cfg.Addr = "tcp", s.Addr()
	db, err := sqltx.Open(cfg.FormatDSN(), sqltx.Config{MaxOpen: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	if _, err := db.ExecContext(ctx, `CREATE TABLE notes (id INT PRIMARY KEY, note LONGBLOB)`); err != nil {
		t.Fatal(err)
	}
	before, asked := read(t, s), questions(t, db)
	err = sqltx.WithTx(ctx, db, func(ctx context.Context, tx *sqltx.Tx) error {
		for i := range 5 {
			sp := tx.Savepoint()
			if _, err := tx.Exec(ctx, `INSERT INTO notes (id, note) VALUES (?, ?)`, i, []byte(fmt.Sprintf("'%d' from \\ where", i))); err != nil {
				return err
			}
			sp.Release()
		}
		_, err := tx.Exec(ctx, `INSERT INTO notes (id, note) VALUES (?, ?)`, 6, make([]byte, 1<<20))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := db.PingContext(ctx); err != nil {
		t.Fatal(err)
	}
	after := read(t, s)
	want := map[string]int{"START TRANSACTION": 1, "SAVEPOINT": 5, "INSERT notes": 6, "COMMIT": 1, "PING": 1, "SHOW": 1}
	got, total := map[string]int{}, 0
	for what, n := range after {
		if n -= before[what]; n > 0 {
			got[what] = n
			total += n
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("counted %v, want %v", got, want)
	}
	// The server counts the question itself, as we have the one before, and no ping.
	if there := questions(t, db) - asked; there != total-1 {
		t.Errorf("counted %d statements, the server %d and a ping", total, there)
	}
}

func read(t *testing.T, s *Statements) map[string]int {
	t.Helper()
	counts, err := s.Counts()
	if err != nil {
		t.Fatal(err)
	}
	return counts
}

// questions asks the server how many statements the connection has sent.
func questions(t *testing.T, db *sql.DB) int {
	t.Helper()
	var name string
	var n int
	if err := db.QueryRowContext(t.Context(), `SHOW SESSION STATUS LIKE 'Questions'`).Scan(&name, &n); err != nil {
		t.Fatal(err)
	}
	return n
}
