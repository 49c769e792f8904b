package saga

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"backstep/internal/sqltx"
	"backstep/internal/testenv"
	"backstep/migrations"
)

func openDatabase(t *testing.T) *sql.DB {
	t.Helper()
	db, err := sqltx.Open(testenv.Database(t), sqltx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	if _, err := migrations.Up(t.Context(), db, nil); err != nil {
		t.Fatal(err)
	}
	return db
}

// put inserts an instance that was last changed so long ago.
func put(t *testing.T, db *sql.DB, id, typ string, s Status, unchanged time.Duration) {
	t.Helper()
	_, err := db.ExecContext(t.Context(), `
INSERT INTO saga_instances (id, type, version, correlation_id, status, payload, updated_at)
VALUES (?, ?, 1, ?, ?, '{"n":1}', NOW(6) - INTERVAL ? SECOND)`,
		[]byte(id), []byte(typ), []byte("c-"+id), string(s), int64(unchanged.Seconds()))
	if err != nil {
		t.Fatal(err)
	}
}

func TestList(t *testing.T) {
	db := openDatabase(t)
	put(t, db, "old", "place-order", Running, time.Hour)
	put(t, db, "older", "place-order", Compensating, 2*time.Hour)
	put(t, db, "new", "place-order", Running, 0)
	put(t, db, "done", "place-order", Completed, time.Minute)
	put(t, db, "other", "ship-parcel", Running, 3*time.Hour)
	tests := []struct {
		name string
		f    Filter
		want string
	}{
		{"all, the last change first", Filter{}, "new done old older other"},
		{"a page", Filter{Limit: 2}, "new done"},
		{"one status", Filter{Status: Running}, "new old other"},
		{"one type", Filter{Type: "ship-parcel"}, "other"},
		{"unchanged for long, the longest first", Filter{OlderThan: 30 * time.Minute}, "other older old"},
		{"everything", Filter{Type: "place-order", Status: Running, OlderThan: 30 * time.Minute, Limit: 1}, "old"},
		{"nothing", Filter{Status: ManualAction}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			list, _, err := List(t.Context(), db, tt.f)
			if err != nil {
				t.Fatal(err)
			}
			var ids []string
			for _, s := range list {
				ids = append(ids, s.ID)
			}
			if got := strings.Join(ids, " "); got != tt.want {
				t.Errorf("List(%+v) = %q, want %q", tt.f, got, tt.want)
			}
		})
	}
}

// TestListReadsNoMoreThanItMust on the plan that the server makes of each query.
func TestListReadsNoMoreThanItMust(t *testing.T) {
	db := openDatabase(t)
	for i := range 200 {
		put(t, db, fmt.Sprintf("id-%03d", i), "place-order", Running, time.Duration(i)*time.Minute)
	}
	for _, f := range []Filter{
		{Limit: 5}, {Limit: 5, OlderThan: time.Hour}, {Limit: 5, Type: "place-order", OlderThan: time.Hour},
		{Limit: 5, At: []Position{{"place-order", 1, 0}, {"place-order", 2, 0}}, Error: "away", until: time.Now().Add(-time.Hour)},
		{Limit: 5, At: []Position{{"place-order", 1, 0}}, Type: "place-order", OlderThan: time.Hour, until: time.Now()},
	} {
		query, args := f.query(Running)
		rows, err := db.QueryContext(t.Context(), "EXPLAIN FORMAT=TRADITIONAL "+query, args...)
		if err != nil {
			t.Fatal(err)
		}
		plan := readPlan(t, rows)
		if plan["key"] != "ix_saga_status" || strings.Contains(plan["Extra"], "filesort") {
			t.Errorf("plan of %+v: key %q, extra %q", f, plan["key"], plan["Extra"])
		}
	}
}

func readPlan(t *testing.T, rows *sql.Rows) map[string]string {
	t.Helper()
	defer rows.Close()
	names, err := rows.Columns()
	if err != nil {
		t.Fatal(err)
	}
	values := make([]sql.NullString, len(names))
	dest := make([]any, len(names))
	for i := range values {
		dest[i] = &values[i]
	}
	if !rows.Next() {
		t.Fatal("EXPLAIN gave no row")
	}
	if err := rows.Scan(dest...); err != nil {
		t.Fatal(err)
	}
	plan := map[string]string{}
	for i, name := range names {
		plan[name] = values[i].String
	}
	return plan
}

func TestGet(t *testing.T) {
	db := openDatabase(t)
	if _, err := Get(t.Context(), db, "nobody"); !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "nobody") {
		t.Errorf("Get of no saga: %v, want ErrNotFound with the id", err)
	}
	put(t, db, "one", "place-order", Compensating, time.Minute)
	exec := func(query string, args ...any) {
		if _, err := db.ExecContext(t.Context(), query, args...); err != nil {
			t.Fatal(err)
		}
	}
	exec(`UPDATE saga_instances SET command_id = 'm-7', awaited_since = NOW(6), last_error = 'no 金', trace_id = 'abc' WHERE id = 'one'`)
	exec(`INSERT INTO saga_steps (saga_id, step_order, name, status, attempts, result, error) VALUES
	      ('one', 1, 'charge-payment', 'FAILED', 3, NULL, 'payment declined'),
	      ('one', 0, 'reserve-stock', 'COMPLETED', 1, 'not json', NULL)`)
	d, err := Get(t.Context(), db, "one")
	if err != nil {
		t.Fatal(err)
	}
	if d.CommandID != "m-7" || d.AwaitedSince.IsZero() || d.LastError != "no 金" || d.TraceID != "abc" ||
		string(d.Payload) != `{"n":1}` || d.Unchanged < 50*time.Second || d.Unchanged > 10*time.Minute {
		t.Errorf("Get = %+v", d)
	}
	if len(d.Steps) != 2 || d.Steps[0].Name != "reserve-stock" || d.Steps[1].Attempts != 3 || d.Steps[1].Error != "payment declined" {
		t.Errorf("steps = %+v", d.Steps)
	}
	// Whatever is stored, it can be shown.
	if _, err := json.Marshal(d); err != nil {
		t.Error(err)
	}
}

func TestCountsAndVerify(t *testing.T) {
	db := openDatabase(t)
	put(t, db, "a", "place-order", Running, time.Minute)
	put(t, db, "b", "place-order", Compensating, 0)
	put(t, db, "c", "place-order", ManualAction, 0)
	put(t, db, "d", "place-order", Completed, 0)
	put(t, db, "e", "place-order", Completed, 0)
	counts, err := Counts(t.Context(), db)
	if err != nil {
		t.Fatal(err)
	}
	if counts[Completed] != 2 || counts[Running] != 1 || counts[ManualAction] != 1 || counts[Compensated] != 0 {
		t.Errorf("Counts = %v", counts)
	}
	violations, err := Verify(t.Context(), db)
	if err != nil {
		t.Fatal(err)
	}
	var subjects []string
	for _, v := range violations {
		subjects = append(subjects, v.Subject)
	}
	if !slices.Equal(subjects, []string{"a", "b"}) || !strings.HasPrefix(violations[0].Detail, "RUNNING, unchanged for 6") {
		t.Errorf("Verify = %+v, want a and b", violations)
	}
}
