package sagatest

import (
	"database/sql"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"backstep/internal/saga"
)

// verdict says what is wrong at the end of a run, nil if nothing is.
func (r *run) verdict() *finding {
	r.t.Helper()
	what := r.wrong()
	if what == "" {
		return nil
	}
	return &finding{saga: r.def.Type, faults: len(r.faults), log: r.log, what: what}
}

func (r *run) wrong() string {
	r.t.Helper()
	s := r.w.Saga(r.id)
	switch {
	case r.endless:
		return fmt.Sprintf("there is no end after %d moves", maxMoves)
	case len(r.w.parked) > 0:
		return "a message was parked: " + r.w.parked[0]
	case s.Status != saga.Completed && s.Status != saga.Compensated:
		return strings.TrimSuffix(fmt.Sprintf("the saga is %s at step %s: %s", s.Status, r.def.StepNames()[s.CurrentStep], s.LastError), ": ")
	}
	for _, key := range slices.Sorted(maps.Keys(r.w.ran)) {
		if n := r.w.ran[key]; n > 1 {
			return fmt.Sprintf("%s was committed %d times", strings.TrimPrefix(key, r.id+":"), n)
		}
	}
	if err := r.plan.Check(r.w, s); err != nil {
		return fmt.Sprintf("the saga is %s, and %v", s.Status, err)
	}
	if s.Status != saga.Completed || r.clean == nil {
		return ""
	}
	now := contents(r.w, r.tables)
	for _, name := range slices.Sorted(maps.Keys(now)) {
		if now[name] != r.clean[name] {
			return fmt.Sprintf("the saga is COMPLETED, and table %s has %s; without a fault it has %s", name, now[name], r.clean[name])
		}
	}
	return ""
}

// engineTables are emptied before a run.
var engineTables = []string{
	"saga_instances", "saga_steps", "saga_actions", "saga_calls", "saga_pulse",
	"inbox_messages", "outbox_events", "scheduled_messages",
}

// ours are how the names of tables begin that are not the domain's.
var ours = []string{"saga_", "inbox_", "outbox_", "scheduled_", "relay_", "parked_", "goose_", "backstep_"}

// table is one of the domain's.
type table struct {
	name string
	sums []string // columns with integers that somebody chose
}

const columnsSQL = `
SELECT t.table_name, c.column_name, c.data_type IN ('tinyint', 'smallint', 'mediumint', 'int', 'bigint', 'decimal') AND c.extra NOT LIKE '%auto_increment%'
  FROM information_schema.tables AS t
       JOIN information_schema.columns AS c ON c.table_schema = t.table_schema AND c.table_name = t.table_name
 WHERE t.table_schema = DATABASE()
   AND t.table_type = 'BASE TABLE'
 ORDER BY t.table_name, c.ordinal_position`

func domainTables(t testing.TB, db *sql.DB) (list []table) {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), columnsSQL)
	if err != nil {
		t.Fatalf("sagatest: read the tables of the domain: %v", err)
	}
	defer rows.Close()
	for rows.Next() {
		var name, column string
		var number bool
		if err := rows.Scan(&name, &column, &number); err != nil {
			t.Fatalf("sagatest: read the tables of the domain: %v", err)
		}
		if slices.ContainsFunc(ours, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
			continue
		}
		if len(list) == 0 || list[len(list)-1].name != name {
			list = append(list, table{name: name})
		}
		if number {
			last := &list[len(list)-1]
			last.sums = append(last.sums, column)
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatalf("sagatest: read the tables of the domain: %v", err)
	}
	return list
}

// contents says how many rows each table has, and what its integers add up to.
func contents(w *World, tables []table) map[string]string {
	w.t.Helper()
	out := map[string]string{}
	for _, t := range tables {
		query := "SELECT CONCAT(COUNT(*), ' rows'"
		for _, c := range t.sums {
			query += ", ', ', COALESCE(SUM(`" + c + "`), 0), ' " + c + "'"
		}
		var text string
		if err := w.db.QueryRowContext(w.t.Context(), query+") FROM `"+t.name+"`").Scan(&text); err != nil {
			w.t.Fatalf("sagatest: read table %s: %v", t.name, err)
		}
		out[t.name] = text
	}
	return out
}
