package app

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"time"

	"backstep/internal/sqltx"
	"backstep/migrations"
)

// AwaitDatabase waits until the database answers, and then refuses a server that was never
// tested and a schema older than this binary needs. A schema that is merely not there yet is
// waited for as well, up to patience: in a rollout the migration job may come second.
func AwaitDatabase(ctx context.Context, db *sql.DB, c sqltx.Config, patience time.Duration, log *slog.Logger) error {
	began := time.Now()
	for {
		err := migrations.Check(ctx, db)
		if err == nil {
			if err = sqltx.CheckServer(ctx, db, c); err == nil {
				return nil
			}
		}
		if ctx.Err() != nil {
			return nil // it is to stop, and that is why there was no answer
		}
		class := sqltx.Classify(err)
		if class != sqltx.Lost && !errors.Is(err, migrations.ErrSchemaBehind) {
			return err
		}
		if errors.Is(err, migrations.ErrSchemaBehind) && time.Since(began) > patience {
			return err
		}
		log.Warn("waiting for the database", "error", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}
