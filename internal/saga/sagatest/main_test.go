package sagatest

import (
	"context"
	"database/sql"
	"fmt"
	"reflect"
	"testing"

	"backstep/client/participant"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// trip is the input of the sagas in these tests, ticket what their actions return.
type (
	trip   struct{ Name string }
	ticket struct{ Seats int }
)

// openDatabase has a table of seats: ten are free of each.
func openDatabase(t testing.TB) *sql.DB {
	t.Helper()
	db := Open(t, testenv.Database(t),
		`CREATE TABLE seats (what VARBINARY(10) PRIMARY KEY, free INT NOT NULL)`,
		`CREATE TABLE notes (what VARBINARY(10) NOT NULL)`, participant.Schema)
	refill(t, db)
	return db
}

func refill(t testing.TB, db *sql.DB) {
	t.Helper()
	exec(t, db, `REPLACE INTO seats VALUES ('flight', 10), ('hotel', 10), ('car', 10)`)
	exec(t, db, `DELETE FROM notes`)
}

func exec(t testing.TB, db *sql.DB, query string) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), query); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

const moveSQL = `UPDATE seats SET free = free - ? WHERE what = ?`

func take(what string) func(ctx context.Context, tx *sqltx.Tx, in trip) (ticket, error) {
	return func(ctx context.Context, tx *sqltx.Tx, _ trip) (ticket, error) {
		_, err := tx.Exec(ctx, moveSQL, 1, []byte(what))
		return ticket{1}, err
	}
}

func giveBack(what string) func(ctx context.Context, tx *sqltx.Tx, in trip, done ticket) error {
	return func(ctx context.Context, tx *sqltx.Tx, _ trip, done ticket) error {
		_, err := tx.Exec(ctx, moveSQL, -done.Seats, []byte(what))
		return err
	}
}

// step is one that takes a seat.
func step(what string, options ...saga.StepOption) saga.Part[trip] {
	return saga.Step(what, saga.Queue(what), take(what), giveBack(what), options...)
}

// free says that a completed trip has taken one seat of each, and no other has.
func free(w *World, s saga.Detail) error {
	want := 10
	if s.Status == saga.Completed {
		want = 9
	}
	for _, what := range []string{"flight", "hotel", "car"} {
		if n := w.Int(`SELECT free FROM seats WHERE what = ?`, []byte(what)); n != want {
			return fmt.Errorf("%d %s seats are free, not %d", n, what, want)
		}
	}
	return nil
}

func equal(t testing.TB, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: %#v, want %#v", what, got, want)
	}
}
