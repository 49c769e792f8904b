package client_test

import (
	"database/sql"
	"errors"
	"testing"

	"backstep/client"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
	"backstep/migrations"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func open(t *testing.T) *sql.DB {
	t.Helper()
	pool, err := sqltx.Open(testenv.Database(t), sqltx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pool.Close() })
	if _, err := migrations.Up(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.ExecContext(t.Context(), `CREATE TABLE carts (id INT PRIMARY KEY, state VARCHAR(16) NOT NULL)`); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.ExecContext(t.Context(), `INSERT INTO carts VALUES (17, 'open')`); err != nil {
		t.Fatal(err)
	}
	return pool
}

func rows(t *testing.T, pool *sql.DB) (n int) {
	t.Helper()
	err := pool.QueryRowContext(t.Context(), `SELECT COUNT(*) FROM outbox_events WHERE routing_key = 'orders' AND status = 'PENDING'`).Scan(&n)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestSubmitIsPartOfTheTransaction(t *testing.T) {
	pool := open(t)
	command := client.Command{Queue: "orders", Type: "order.create", Body: []byte(`{}`), Headers: map[string]any{"n": 1}}
	for _, commit := range []bool{false, true} {
		tx, err := pool.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Submit(t.Context(), tx, command); err != nil {
			t.Fatal(err)
		}
		want := 0
		end := tx.Rollback
		if commit {
			want, end = 1, tx.Commit
		}
		if err := end(); err != nil {
			t.Fatal(err)
		}
		if got := rows(t, pool); got != want {
			t.Errorf("committed %t: %d rows, want %d", commit, got, want)
		}
	}
}

func TestSubmitRefuses(t *testing.T) {
	pool := open(t)
	tx, err := pool.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	long := make([]byte, 256)
	for name, c := range map[string]client.Command{
		"no queue":       {Type: "order.create"},
		"no type":        {Queue: "orders"},
		"an id too long": {Queue: "orders", Type: "order.create", ID: string(long)},
		"a bad header":   {Queue: "orders", Type: "order.create", Headers: map[string]any{"x": struct{}{}}},
	} {
		if _, err := client.Submit(t.Context(), tx, c); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%s: error %v, want ErrInvalid", name, err)
		}
	}
}
