package migrations_test

import (
	"database/sql"
	"errors"
	"strings"
	"sync"
	"testing"

	"backstep/internal/sqltx"
	"backstep/internal/testenv"
	"backstep/migrations"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func open(t *testing.T) *sql.DB {
	t.Helper()
	db, err := sqltx.Open(testenv.Database(t), sqltx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func TestUpByManyAtOnce(t *testing.T) {
	db := open(t)
	err := migrations.Check(t.Context(), db)
	if !errors.Is(err, migrations.ErrSchemaBehind) || !strings.Contains(err.Error(), "backstep migrate up") {
		t.Errorf("Check of an empty database gave %v, want ErrSchemaBehind and the command that cures it", err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	applied := map[int64]int{}
	for range 4 {
		wg.Go(func() {
			list, err := migrations.Up(t.Context(), db, nil)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			for _, m := range list {
				applied[m.Version]++
			}
		})
	}
	wg.Wait()
	status, err := migrations.Status(t.Context(), db)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range status {
		if !m.Applied || applied[m.Version] != 1 {
			t.Errorf("migration %d: applied %t, by %d instances", m.Version, m.Applied, applied[m.Version])
		}
	}
	if err := migrations.Check(t.Context(), db); err != nil {
		t.Error(err)
	}
}

// MySQL commits each DDL statement by itself: one that was killed half-way runs again.
func TestUpAfterHalfAMigration(t *testing.T) {
	db := open(t)
	if _, err := migrations.Up(t.Context(), db, nil); err != nil {
		t.Fatal(err)
	}
	for _, q := range []string{
		`DELETE FROM goose_db_version WHERE version_id >= 3`, `DROP TABLE saga_actions, orders`,
	} {
		if _, err := db.ExecContext(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	if err := migrations.Check(t.Context(), db); !errors.Is(err, migrations.ErrSchemaBehind) {
		t.Errorf("Check gave %v, want ErrSchemaBehind", err)
	}
	if _, err := migrations.Up(t.Context(), db, nil); err != nil {
		t.Fatal(err)
	}
	if err := migrations.Check(t.Context(), db); err != nil {
		t.Error(err)
	}
}

// A text collation pads spaces and refuses invalid UTF-8: ids would collide or be lost.
func TestColumnsKeepAnyBytes(t *testing.T) {
	db := open(t)
	if _, err := migrations.Up(t.Context(), db, nil); err != nil {
		t.Fatal(err)
	}
	rows, err := db.QueryContext(t.Context(), `
SELECT c.table_name, c.column_name, c.data_type
  FROM information_schema.columns c
 WHERE c.table_schema = DATABASE()
   AND (c.column_name LIKE '%\_id' OR c.column_name LIKE '%key' OR c.column_name IN ('sku', 'consumer', 'exchange', 'owner'))
   AND c.data_type NOT IN ('bigint', 'varbinary')
   AND c.table_name NOT LIKE 'goose%'`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var table, column, typ string
		if err := rows.Scan(&table, &column, &typ); err != nil {
			t.Fatal(err)
		}
		t.Errorf("%s.%s is %s, want VARBINARY", table, column, typ)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	var wrong int
	if err := db.QueryRowContext(t.Context(), `
SELECT COUNT(*) FROM information_schema.tables
 WHERE table_schema = DATABASE() AND table_name NOT LIKE 'goose%'
   AND (engine <> 'InnoDB' OR table_collation <> 'utf8mb4_bin')`).Scan(&wrong); err != nil {
		t.Fatal(err)
	}
	if wrong != 0 {
		t.Errorf("%d tables are not InnoDB in utf8mb4_bin", wrong)
	}
}
