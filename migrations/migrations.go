// Package migrations holds the schema: numbered, forward-only files, embedded in every
// binary and applied with goose under a table lock, so any number of instances may try at
// once. Every statement can run twice, because MySQL commits each DDL statement by itself
// and a migration that was killed half-way is simply run again.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed *.sql
var files embed.FS

// ErrSchemaBehind means the database lacks migrations that this binary needs.
var ErrSchemaBehind = errors.New("the database schema is older than this binary needs")

// Migration is one numbered file and whether the database has it.
type Migration struct {
	Version   int64     `json:"version"`
	Name      string    `json:"name"`
	Applied   bool      `json:"applied"`
	AppliedAt time.Time `json:"applied_at,omitzero"`
}

// Up applies what is missing, in order, and returns what it applied. Instances that run it at
// once wait for each other. One that was killed holds the lock for up to 30 s more.
func Up(ctx context.Context, db *sql.DB, log *slog.Logger) ([]Migration, error) {
	p, err := provider(db, log)
	if err != nil {
		return nil, err
	}
	results, err := p.Up(ctx)
	if err != nil {
		return nil, fmt.Errorf("migrate up: %w", err)
	}
	applied := make([]Migration, 0, len(results))
	for _, r := range results {
		applied = append(applied, Migration{Version: r.Source.Version, Name: r.Source.Path, Applied: true})
	}
	return applied, nil
}

// Status lists every migration this binary knows.
func Status(ctx context.Context, db *sql.DB) ([]Migration, error) {
	p, err := provider(db, nil)
	if err != nil {
		return nil, err
	}
	states, err := p.Status(ctx)
	if err != nil {
		return nil, fmt.Errorf("migrate status: %w", err)
	}
	list := make([]Migration, 0, len(states))
	for _, s := range states {
		list = append(list, Migration{
			Version: s.Source.Version, Name: s.Source.Path,
			Applied: s.State == goose.StateApplied, AppliedAt: s.AppliedAt,
		})
	}
	return list, nil
}

const tableMissing = 1146 // ER_NO_SUCH_TABLE

// Check returns ErrSchemaBehind, with both versions and the command that cures it, if the
// database is older than this binary. A newer one is fine: changes are expand-then-contract.
func Check(ctx context.Context, db *sql.DB) error {
	p, err := provider(db, nil)
	if err != nil {
		return err
	}
	sources := p.ListSources()
	need := sources[len(sources)-1].Version
	// Read-only on purpose: a worker's database user may not create goose's table.
	var have int64
	err = db.QueryRowContext(ctx,
		`SELECT COALESCE(MAX(version_id), 0) FROM goose_db_version WHERE is_applied = 1`).Scan(&have)
	if me, ok := errors.AsType[*mysql.MySQLError](err); ok && me.Number == tableMissing {
		have, err = 0, nil
	}
	if err != nil {
		return fmt.Errorf("read schema version: %w", err)
	}
	if have < need {
		return fmt.Errorf("%w: it has version %d, version %d is needed; run: backstep migrate up",
			ErrSchemaBehind, have, need)
	}
	return nil
}

func provider(db *sql.DB, log *slog.Logger) (*goose.Provider, error) {
	locker, err := lock.NewMySQLTableLocker(lock.WithTableLockTimeout(500*time.Millisecond, 600))
	if err != nil {
		return nil, fmt.Errorf("migration lock: %w", err)
	}
	opts := []goose.ProviderOption{
		goose.WithLocker(locker), goose.WithDisableGlobalRegistry(true),
	}
	if log != nil {
		opts = append(opts, goose.WithSlog(log))
	}
	p, err := goose.NewProvider(goose.DialectMySQL, db, files, opts...)
	if err != nil {
		return nil, fmt.Errorf("read migrations: %w", err)
	}
	return p, nil
}
