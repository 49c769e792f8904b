package sqltx_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(testenv.M{M: m}) }

func TestClassify(t *testing.T) {
	tests := []struct {
		name string
		err  error
		want sqltx.Class
	}{
		{"nil", nil, sqltx.None},
		{"wrapped deadlock", fmt.Errorf("record: %w", &mysql.MySQLError{Number: 1213}), sqltx.Conflict},
		{"lock wait", &mysql.MySQLError{Number: 1205}, sqltx.Conflict},
		{"record changed", &mysql.MySQLError{Number: 1020}, sqltx.Conflict},
		{"duplicate key", &mysql.MySQLError{Number: 1062}, sqltx.Duplicate},
		{"read-only server", &mysql.MySQLError{Number: 1290}, sqltx.ReadOnly},
		{"too many connections", &mysql.MySQLError{Number: 1040}, sqltx.Lost},
		{"shutdown", &mysql.MySQLError{Number: 1053}, sqltx.Lost},
		{"connection lost", mysql.ErrInvalidConn, sqltx.Lost},
		{"bad connection", driver.ErrBadConn, sqltx.Lost},
		{"end of file", fmt.Errorf("read: %w", io.ErrUnexpectedEOF), sqltx.Lost},
		{"unknown outcome", fmt.Errorf("%w: %w", sqltx.ErrOutcomeUnknown, mysql.ErrInvalidConn), sqltx.Lost},
		{"check violated, MySQL", &mysql.MySQLError{Number: 3819}, sqltx.Permanent},
		{"check violated, MariaDB", &mysql.MySQLError{Number: 4025}, sqltx.Permanent},
		{"packet too large, the server says", &mysql.MySQLError{Number: 1153}, sqltx.Permanent},
		{"packet too large, the driver says", mysql.ErrPktTooLarge, sqltx.Permanent},
		{"our own context", context.Canceled, sqltx.Canceled},
		{"not a database error", errors.New("x"), sqltx.Other},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := sqltx.Classify(tt.err); got != tt.want {
				t.Errorf("Classify(%v) = %s, want %s", tt.err, got, tt.want)
			}
		})
	}
}

// open returns a pool on a fresh database with one table of counters a and b.
func open(t *testing.T) *sql.DB {
	t.Helper()
	db, err := sqltx.Open(testenv.Database(t), sqltx.Config{LockWaitTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	for _, q := range []string{
		`CREATE TABLE counters (id VARBINARY(8) PRIMARY KEY, n INT NOT NULL) ENGINE = InnoDB`,
		`INSERT INTO counters VALUES ('a', 0), ('b', 0)`,
	} {
		if _, err := db.ExecContext(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	return db
}

func counters(t *testing.T, db *sql.DB) (a, b int) {
	t.Helper()
	err := db.QueryRowContext(t.Context(), `
SELECT (SELECT n FROM counters WHERE id = 'a'), (SELECT n FROM counters WHERE id = 'b')`).Scan(&a, &b)
	if err != nil {
		t.Fatal(err)
	}
	return a, b
}

// Under READ COMMITTED a second read in one transaction sees what others have committed.
func TestReadCommitted(t *testing.T) {
	db := open(t)
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		var before, after int
		if err := tx.QueryRow(ctx, `SELECT n FROM counters WHERE id = 'a'`, nil, &before); err != nil {
			return err
		}
		if _, err := db.ExecContext(ctx, addSQL, "a"); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, `SELECT n FROM counters WHERE id = 'a'`, nil, &after); err != nil {
			return err
		}
		if after != before+1 {
			t.Errorf("read %d, then %d after another committed: not READ COMMITTED", before, after)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestDeadlockIsRunAgain(t *testing.T) {
	db := open(t)
	// Each has its first row before either asks for its second: one is chosen as the victim.
	arrived, both := make(chan struct{}, 2), make(chan struct{})
	go func() { <-arrived; <-arrived; close(both) }()
	errs, calls := make(chan error, 2), make(chan int, 2)
	for _, order := range [][2]string{{"a", "b"}, {"b", "a"}} {
		go func() {
			n := 0
			errs <- sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
				n++
				if _, err := tx.Exec(ctx, addSQL, order[0]); err != nil {
					return err
				}
				if n == 1 {
					arrived <- struct{}{}
				}
				<-both
				_, err := tx.Exec(ctx, addSQL, order[1])
				return err
			})
			calls <- n
		}()
	}
	for range 2 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if n := <-calls + <-calls; n < 3 {
		t.Errorf("the functions were called %d times in all: there was no deadlock", n)
	}
	if a, b := counters(t, db); a != 2 || b != 2 {
		t.Errorf("a = %d, b = %d, want 2 and 2", a, b)
	}
}

// B78: 1205 undoes one statement and leaves the transaction open. Code that carries on must
// not be able to commit the half that is there.
func TestLockWaitCannotCommitHalf(t *testing.T) {
	db := open(t)
	holder, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Rollback() //nolint:errcheck // committed or not, the test is over
	if _, err := holder.ExecContext(t.Context(), addSQL, "b"); err != nil {
		t.Fatal(err)
	}
	err = sqltx.Once(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		if _, err := tx.Exec(ctx, addSQL, "a"); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, addSQL, "b"); sqltx.Classify(err) != sqltx.Conflict {
			t.Errorf("waiting for a lock gave %v, want a conflict", err)
		}
		if _, err := tx.Exec(ctx, addSQL, "a"); !errors.Is(err, sqltx.ErrEnded) {
			t.Errorf("a statement after 1205 gave %v, want ErrEnded", err)
		}
		return nil // swallows the error
	})
	if sqltx.Classify(err) != sqltx.Conflict {
		t.Errorf("Once gave %v, want the conflict that was swallowed", err)
	}
	if a, _ := counters(t, db); a != 0 {
		t.Errorf("a = %d: half of the transaction was committed", a)
	}
}

// After 1213 the server has rolled back; a statement sent all the same would commit alone.
func TestNothingRunsAfterDeadlock(t *testing.T) {
	db := open(t)
	// The server's own 1213, without a second transaction to arrange.
	if _, err := db.ExecContext(t.Context(), `CREATE PROCEDURE deadlock() SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213`); err != nil {
		t.Fatal(err)
	}
	err := sqltx.Once(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		_, err := tx.Exec(ctx, `CALL deadlock()`)
		if sqltx.Classify(err) != sqltx.Conflict {
			t.Errorf("the procedure gave %v, want 1213", err)
		}
		_, err = tx.Exec(ctx, addSQL, "a")
		return err
	})
	if !errors.Is(err, sqltx.ErrEnded) {
		t.Errorf("a statement after 1213 gave %v, want ErrEnded", err)
	}
	if a, _ := counters(t, db); a != 0 {
		t.Errorf("a = %d: a statement committed by itself", a)
	}
}

func TestSavepoint(t *testing.T) {
	db := open(t)
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		idle := tx.Savepoint()
		if err := idle.Rollback(ctx); err != nil { // nothing was written: no statement
			return err
		}
		kept := tx.Savepoint()
		if _, err := tx.Exec(ctx, addSQL, "a"); err != nil {
			return err
		}
		kept.Release()
		undone := tx.Savepoint()
		if _, err := tx.Exec(ctx, addSQL, "b"); err != nil {
			return err
		}
		return undone.Rollback(ctx)
	})
	if err != nil {
		t.Fatal(err)
	}
	if a, b := counters(t, db); a != 1 || b != 0 {
		t.Errorf("a = %d, b = %d, want 1 and 0", a, b)
	}
}

func TestSavepointsNest(t *testing.T) {
	db := open(t)
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		outer := tx.Savepoint()
		if _, err := tx.Exec(ctx, addSQL, "a"); err != nil {
			return err
		}
		inner := tx.Savepoint()
		if _, err := tx.Exec(ctx, addSQL, "b"); err != nil {
			return err
		}
		inner.Release()
		forgotten := tx.Savepoint()
		_ = forgotten
		return outer.Rollback(ctx) // all of it, not only what follows the inner one
	})
	if err != nil {
		t.Fatal(err)
	}
	if a, b := counters(t, db); a != 0 || b != 0 {
		t.Errorf("a = %d, b = %d, want 0 and 0", a, b)
	}
}

// A rollback that fails leaves nobody knows what; it must not be committed.
func TestFailedRollbackEndsTheTransaction(t *testing.T) {
	db := open(t)
	err := sqltx.Once(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		s := tx.Savepoint()
		if _, err := tx.Exec(ctx, addSQL, "a"); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "RELEASE SAVEPOINT s1"); err != nil { // so that the server does not know it
			return err
		}
		if err := s.Rollback(ctx); err == nil {
			t.Error("the rollback did not fail")
		}
		return nil
	})
	if err == nil {
		t.Error("the transaction was committed")
	}
	if a, _ := counters(t, db); a != 0 {
		t.Errorf("a = %d, want 0", a)
	}
}

func TestWritesAreRecorded(t *testing.T) {
	db := open(t)
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		for _, q := range []string{
			"\nINSERT INTO counters (id, n) VALUES ('c', 1), ('d', 2)", "UPDATE counters SET n = 9", "DELETE FROM `counters` WHERE id = 'c'",
			"\nUPDATE (SELECT 'd' AS id) v STRAIGHT_JOIN counters c ON c.id = v.id SET c.n = 3",
			"DELETE c FROM (SELECT 'd' AS id) v STRAIGHT_JOIN counters AS c ON c.id = v.id",
		} {
			if _, err := tx.Exec(ctx, q); err != nil {
				return err
			}
		}
		want := []struct {
			verb string
			n    int64
		}{{"INSERT", 2}, {"UPDATE", 4}, {"DELETE", 1}, {"UPDATE", 1}, {"DELETE", 1}}
		for i, w := range tx.Writes() {
			if w.Verb() != want[i].verb || w.Table() != "counters" || w.Affected != want[i].n {
				t.Errorf("write %d is %s %s of %d rows, want %s counters of %d", i, w.Verb(), w.Table(), w.Affected, want[i].verb, want[i].n)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestErrorAndPanicRollBack(t *testing.T) {
	db := open(t)
	boom := errors.New("boom")
	if err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		if _, err := tx.Exec(ctx, addSQL, "a"); err != nil {
			return err
		}
		return boom
	}); !errors.Is(err, boom) {
		t.Errorf("WithTx gave %v, want the function's error", err)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		_ = sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
			if _, err := tx.Exec(ctx, addSQL, "a"); err != nil {
				return err
			}
			panic("boom")
		})
	}()
	if a, _ := counters(t, db); a != 0 {
		t.Errorf("a = %d, want 0", a)
	}
	if n := db.Stats().InUse; n != 0 {
		t.Errorf("%d connections were not handed back", n)
	}
}

func TestKilledConnection(t *testing.T) {
	db := open(t)
	err := sqltx.Once(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		var id int64
		if err := tx.QueryRow(ctx, `SELECT CONNECTION_ID()`, nil, &id); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, addSQL, "a"); err != nil {
			return err
		}
		if _, err := db.ExecContext(ctx, fmt.Sprintf("KILL %d", id)); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, addSQL, "b")
		return err
	})
	if sqltx.Classify(err) != sqltx.Lost || errors.Is(err, sqltx.ErrOutcomeUnknown) {
		t.Errorf("a statement on a killed connection gave %v, want a lost connection and a known outcome", err)
	}
	err = sqltx.Once(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		var id int64
		if err := tx.QueryRow(ctx, `SELECT CONNECTION_ID()`, nil, &id); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, addSQL, "a"); err != nil {
			return err
		}
		_, err := db.ExecContext(ctx, fmt.Sprintf("KILL %d", id))
		return err
	})
	if !errors.Is(err, sqltx.ErrOutcomeUnknown) {
		t.Errorf("COMMIT on a killed connection gave %v, want ErrOutcomeUnknown", err)
	}
	if a, b := counters(t, db); a != 0 || b != 0 {
		t.Errorf("a = %d, b = %d, want 0 and 0", a, b)
	}
}

// Nor does a transaction wait for a server that does not answer when its caller does not either.
func TestBeginEndsWithItsContext(t *testing.T) {
	cfg, err := mysql.ParseDSN(testenv.Database(t))
	if err != nil {
		t.Fatal(err)
	}
	server, err := net.Dial("tcp", cfg.Addr)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	silent := make(chan struct{}) // closed: what the server says is kept back
	go func() {
		client, err := ln.Accept()
		if err != nil {
			return
		}
		go func() { _, _ = io.Copy(server, client) }()
		buf := make([]byte, 1<<16)
		for {
			n, err := server.Read(buf)
			if err != nil {
				return
			}
			select {
			case <-silent:
			default:
				_, _ = client.Write(buf[:n])
			}
		}
	}()
	defer func() { _, _ = ln.Close(), server.Close() }()
	cfg.Addr = ln.Addr().String()
	db, err := sqltx.Open(cfg.FormatDSN(), sqltx.Config{MaxOpen: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	if err := db.PingContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	close(silent)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	began := time.Now()
	err = sqltx.Once(ctx, db, func(context.Context, *sqltx.Tx) error { return errors.New("it began") })
	if !errors.Is(err, sqltx.ErrNotBegun) || time.Since(began) > 10*time.Second {
		t.Errorf("after %s: %v, want ErrNotBegun", time.Since(began), err)
	}
}
