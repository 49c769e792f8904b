package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"backstep/internal/handlers"
)

// trial submits the demo's orders and finds out what became of each.
type trial struct {
	*demo
	db     *sql.DB
	broker *broker
	fleet  *fleet
	config config
	poll   time.Duration // how often it is looked how many orders have ended
}

func (t *trial) run(ctx context.Context) (*result, error) {
	orders := generate(t.mix(), 1, demoSKUs)
	if err := t.submit(ctx, orders); err != nil {
		return nil, err
	}
	if err := t.awaitEnd(ctx); err != nil {
		return nil, err
	}
	return t.check(ctx, orders)
}

// check compares what became of orders that have ended with what should have, and looks for
// broken invariants.
func (t *trial) check(ctx context.Context, orders []order) (*result, error) {
	v := verifier{db: t.db, broker: t.broker, retention: t.config.Inbox.Retention}
	if err := v.await(ctx, t.patience); err != nil {
		return nil, err
	}
	r := &result{Orders: t.orders, Relays: t.relays, Workers: t.workers, Differences: []difference{}}
	for _, find := range []func(context.Context, []order, *result) error{t.outcomes, t.counts, t.ledger} {
		if err := find(ctx, orders, r); err != nil {
			return nil, err
		}
	}
	var err error
	if r.Verify, err = v.verify(ctx); err != nil {
		return nil, err
	}
	r.OK = r.Verify.OK && len(r.Differences)+len(r.LedgerFaults) == 0
	return r, nil
}

func (t *trial) submit(ctx context.Context, orders []order) error {
	var failed []error
	s := submitter{broker: t.broker, patience: t.patience, settled: func(o *order) {
		if !o.Confirmed {
			failed = append(failed, fmt.Errorf("order %d: %s", o.Line, o.Reason))
		}
	}}
	s.submit(ctx, orders)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if len(failed) > 0 {
		return fmt.Errorf("submit orders: %w", errors.Join(limit(failed)...))
	}
	t.say("%s submitted and confirmed by the broker", plural(len(orders), "order"))
	return nil
}

// awaitEnd waits until every order has ended. It fails if a process ends, or if nothing has
// moved for too long.
func (t *trial) awaitEnd(ctx context.Context) error {
	bar := newProgress(t.progress, t.orders, "orders have ended")
	defer bar.done()
	tick := time.NewTicker(t.poll)
	defer tick.Stop()
	stuck := time.NewTimer(t.patience)
	defer stuck.Stop()
	moved := ""
	for {
		counts, err := handlers.Counts(ctx, t.db)
		if err != nil {
			return err
		}
		ended := sum(counts) - counts["PENDING"]
		bar.set(ended)
		if ended >= t.orders {
			return nil
		}
		if now := fmt.Sprint(counts); now != moved {
			moved = now
			stuck.Reset(t.patience)
		}
		select {
		case <-tick.C:
		case p := <-t.fleet.ended:
			return p.gone()
		case <-stuck.C:
			return t.stuck(ctx, ended)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// stuck says what everything waits for.
func (t *trial) stuck(ctx context.Context, ended int) error {
	v := verifier{db: t.db, broker: t.broker, retention: t.config.Inbox.Retention}
	open, err := v.open(ctx, &findings{})
	if err != nil {
		open = err.Error()
	}
	if open == "" {
		open = "nothing is in flight"
	}
	return fmt.Errorf("no order has moved for %s; %d of %d have ended: %s", short(t.patience), ended, t.orders, open)
}
