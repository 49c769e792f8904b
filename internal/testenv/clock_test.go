package testenv

import (
	"errors"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
)

// A step of the database's clock is one for all that goes by it, and for nothing else: waits take
// as long as ever, whether they began before it or after.
func TestShiftDatabaseClock(t *testing.T) {
	path := pathToProcesses(t)
	t.Parallel()
	s, err := Start(t.Context(), Options{
		Dir: t.TempDir(), Path: path, Stack: privateStack(), ShiftableClock: true,
		AMQPURL: Shared(t).AMQPURL(""), ManagementURL: Shared(t).ManagementURL(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Stop() })
	db := open(t, s.Database(t))
	ahead := func() time.Duration {
		t.Helper()
		var now time.Time
		if err := db.QueryRow("SELECT UTC_TIMESTAMP(6)").Scan(&now); err != nil {
			t.Fatal(err)
		}
		return time.Until(now)
	}
	for _, setup := range []string{"CREATE TABLE t (id INT PRIMARY KEY)", "INSERT INTO t VALUES (1)", "SET GLOBAL innodb_lock_wait_timeout = 1"} {
		if _, err := db.Exec(setup); err != nil {
			t.Fatal(err)
		}
	}
	locked, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = locked.Rollback() }()
	if _, err := locked.Exec("SELECT * FROM t FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	const tolerance = time.Minute // for a machine that is slow
	for _, by := range []time.Duration{0, time.Hour, -time.Hour, 5 * time.Minute, 0} {
		if err := s.ShiftDatabaseClock(by); err != nil {
			t.Fatal(err)
		}
		if got := ahead(); got < by-tolerance || got > by+tolerance {
			t.Errorf("shifted by %s the clock is %s ahead", by, got)
		}
		began := time.Now()
		_, err := db.Exec("SELECT * FROM t FOR UPDATE")
		if e, ok := errors.AsType[*mysql.MySQLError](err); !ok || e.Number != 1205 {
			t.Errorf("shifted by %s a lock that is held gave %v, want a time-out", by, err)
		}
		if took := time.Since(began); took > tolerance {
			t.Errorf("shifted by %s waiting a second took %s", by, took)
		}
		if _, err := db.Exec("SELECT SLEEP(0.1)"); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took > tolerance {
			t.Errorf("shifted by %s sleeping took %s", by, took)
		}
	}
	if err := errors.Join(s.ShiftDatabaseClock(time.Hour), s.RestartDatabase(t.Context())); err != nil {
		t.Fatal(err)
	}
	if got := ahead(); got < time.Hour-tolerance {
		t.Errorf("after a restart the clock is %s ahead, want an hour", got)
	}
	if err := Shared(t).ShiftDatabaseClock(0); err == nil {
		t.Error("a clock was shifted that is not the database's own")
	}
}
