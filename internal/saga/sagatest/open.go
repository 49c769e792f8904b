package sagatest

import (
	"database/sql"
	"testing"

	"backstep/internal/sqltx"
	"backstep/migrations"
)

// Open opens an empty database as workers do, and closes it when the test ends. It gets the schema
// of package migrations, and then what ddl makes, one statement in each string: the domain's.
func Open(t testing.TB, dsn string, ddl ...string) *sql.DB {
	t.Helper()
	db, err := sqltx.Open(dsn, sqltx.Config{})
	if err != nil {
		t.Fatalf("sagatest: %v", err)
	}
	t.Cleanup(func() { _ = db.Close() }) // the test is over
	if _, err := migrations.Up(t.Context(), db, nil); err != nil {
		t.Fatalf("sagatest: %v", err)
	}
	for _, statement := range ddl {
		if _, err := db.ExecContext(t.Context(), statement); err != nil {
			t.Fatalf("sagatest: %s: %v (each string of ddl is one statement, and package migrations has made its tables already)", statement, err)
		}
	}
	return db
}
