package main

import (
	"context"
	"database/sql"
	"errors"

	"backstep/internal/bench"
	"backstep/internal/handlers"
	"backstep/internal/sqltx"
	"backstep/migrations"
)

// sagaCeilings are sagas a second.
type sagaCeilings struct{ single, batch float64 }

// ceilings measures what the servers do without us, in a database of its own. Nothing of ours
// runs yet.
func (b *sagaBench) ceilings(ctx context.Context, s *station) (_ sagaCeilings, err error) {
	p, err := newPlace(ctx, "bench", s.servers, s.given)
	if err != nil {
		return sagaCeilings{}, err
	}
	defer func() { err = errors.Join(err, p.remove(true, true)) }()
	s.say("ceilings, in database %s", p.name)
	db, err := sqltx.Open(p.config.MySQL.DSN, sqltx.Config{MaxOpen: singleConnections, ProgramName: "backstep-bench"})
	if err != nil {
		return sagaCeilings{}, err
	}
	defer db.Close() //nolint:errcheck // the database is dropped next
	if _, err := migrations.Up(ctx, db, nil); err != nil {
		return sagaCeilings{}, err
	}
	if err := handlers.Seed(ctx, db, b.skus(), sagaStock); err != nil {
		return sagaCeilings{}, err
	}
	var c sagaCeilings
	if c.single, err = b.ceiling(ctx, s, db, b.singles(), singleConnections, 1, b.result.SingleCPU); err != nil {
		return c, err
	}
	if c.batch, err = b.ceiling(ctx, s, db, b.batched(), batchConnections, batchSize, b.result.BatchCPU); err != nil {
		return c, err
	}
	if b.seconds == 0 {
		return c, nil
	}
	return c, b.latencyBound(ctx, s, db)
}

// ceiling returns how many sagas a second their bare SQL is.
func (b *sagaBench) ceiling(ctx context.Context, s *station, db *sql.DB, n, connections, size int, cpu costs) (float64, error) {
	sagas, err := bench.NewSagas(ctx, db, b.bodies(n))
	if err != nil {
		return 0, err
	}
	if err := s.rest(ctx); err != nil {
		return 0, err
	}
	before, err := s.cpu()
	if err != nil {
		return 0, err
	}
	r, err := sagas.Run(ctx, connections, size)
	if err != nil {
		return 0, err
	}
	after, err := s.cpu()
	cpu.add(before, after, float64(n)/1000)
	s.say("%s by bare SQL, %d in a transaction: %.0f a second", plural(n, "saga"), size, r.Rate())
	return r.Rate(), err
}

// latencyBound measures the two of which the latency's bound is made.
func (b *sagaBench) latencyBound(ctx context.Context, s *station, db *sql.DB) error {
	sagas, err := bench.NewSagas(ctx, db, b.bodies(b.paced()))
	if err != nil {
		return err
	}
	if err := s.rest(ctx); err != nil {
		return err
	}
	s.say("bare steps, %d sagas a second for %d s", b.rate, b.seconds)
	took, err := sagas.Pace(ctx, b.every())
	if err != nil {
		return err
	}
	if err := s.declare(ctx, rawQueue); err != nil {
		return err
	}
	raw := latencyBench{benchmark: b.benchmark, latencyOptions: latencyOptions{rows: b.paced(), interval: b.every()}}
	raw.result.RawCPU = costs{}
	if err := raw.raw(ctx, s); err != nil {
		return err
	}
	add := func(bound, of, step, from *figure, q, margin float64) {
		r, st := from.Median, precise(bench.Quantile(took, q))
		of.add(r)
		step.add(st)
		bound.add(1.2*(3*r+3*st) + margin)
	}
	add(&b.result.P50Bound, &b.result.RawP50, &b.result.StepP50, &raw.result.RawP50, 0.50, 3)
	add(&b.result.P99Bound, &b.result.RawP99, &b.result.StepP99, &raw.result.RawP99, 0.99, 15)
	return nil
}
