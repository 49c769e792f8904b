package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"backstep/internal/inbox"
	"backstep/internal/message"
)

// startAll starts relays and workers, and waits until they can do their work and each relay
// has its share of the shards. A role may have an environment of its own.
func (b *sagaBench) startAll(ctx context.Context, s *station, environments map[string][]string) error {
	for role, n := range map[string]int{"relay": b.relays, "worker": b.workers} {
		if env := environments[role]; env != nil {
			s.fleet.env = env
		}
		if err := s.start(role, n); err != nil {
			return err
		}
	}
	if err := s.fleet.awaitReady(ctx); err != nil {
		return err
	}
	return s.await(ctx, "each relay has its share of the shards", sharesPoll, func(ctx context.Context) (int, bool, error) {
		held, fair := 0, true
		for _, p := range s.fleet.procs {
			if !strings.HasPrefix(p.name, "relay") {
				continue
			}
			var stats struct{ Shards int }
			if err := p.get(ctx, "/stats", &stats); err != nil {
				return 0, false, err
			}
			held += stats.Shards
			fair = fair && stats.Shards >= message.Shards/b.relays
		}
		return held, fair && held == message.Shards, nil
	})
}

const sharesPoll = 100 * time.Millisecond

// trial is of orders in a station where none has been before.
func (b *sagaBench) trial(s *station, n int) *trial {
	d := &demo{demoOptions: demoOptions{relays: b.relays, workers: b.workers, orders: n, patience: benchPatience}, progress: s.progress}
	return &trial{demo: d, db: s.db, broker: s.broker, fleet: s.fleet, config: s.place.config, poll: countPoll}
}

// countPoll is how often it is looked how many orders have ended. The database counts them all,
// which must not slow down what is measured; when the last one ended it tells itself.
const countPoll = time.Second

// throughput returns how many sagas a second end when all orders are submitted at once.
func (b *sagaBench) throughput(ctx context.Context, s *station) (float64, error) {
	orders := generate(b.mix(), orderSeed, b.skus())
	t := b.trial(s, len(orders))
	if err := s.rest(ctx); err != nil {
		return 0, err
	}
	before, err := s.cpu()
	if err != nil {
		return 0, err
	}
	if err := t.submit(ctx, orders); err != nil {
		return 0, err
	}
	if err := t.awaitEnd(ctx); err != nil {
		return 0, err
	}
	after, err := s.cpu()
	if err != nil {
		return 0, err
	}
	b.result.CPU.add(before, after, float64(len(orders))/1000)
	r, err := b.check(ctx, t, orders)
	if err != nil {
		return 0, err
	}
	work, err := s.work(ctx)
	if err != nil {
		return 0, err
	}
	b.result.Fill.add(float64(work.Done) / float64(work.Batches))
	b.result.Duplicates.add(float64(work.Duplicates))
	b.result.Conflicts.add(float64(work.Conflicts))
	s.say("%s through the system: %.0f a second", plural(len(orders), "saga"), r.SagasPerSecond)
	return r.SagasPerSecond, nil
}

// check demands that every order became what it should, and that every invariant holds: the
// rate of a system that loses something is none.
func (b *sagaBench) check(ctx context.Context, t *trial, orders []order) (*result, error) {
	r, err := t.check(ctx, orders)
	if err != nil {
		return nil, err
	}
	if !r.OK {
		t.out = t.progress
		t.printResult(r)
		return nil, errors.New("the outcome is not what it should be")
	}
	return r, nil
}

// work adds up what the workers did since they started.
func (s *station) work(ctx context.Context) (inbox.Snapshot, error) {
	var all inbox.Snapshot
	for _, p := range s.fleet.procs {
		if !strings.HasPrefix(p.name, "worker") {
			continue
		}
		var w inbox.Snapshot
		if err := p.get(ctx, "/stats", &w); err != nil {
			return all, fmt.Errorf("ask %s what it did: %w", p.name, err)
		}
		all.Batches += w.Batches
		all.Done += w.Done
		all.Duplicates += w.Duplicates
		all.Conflicts += w.Conflicts
	}
	return all, nil
}
