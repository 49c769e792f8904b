package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"backstep/internal/bench"
	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// endedPoll is how often it is looked which sagas have ended, while any is open.
const endedPoll = time.Millisecond

// latency starts sagas at a pace and measures how long each takes.
func (b *sagaBench) latency(ctx context.Context, s *station) error {
	if err := s.rest(ctx); err != nil {
		return err
	}
	orders := generate(mix{count: b.paced()}, orderSeed+1, b.skus())
	w := &watch{open: map[string]time.Time{}, added: make(chan struct{}, 1)}
	ringing, stop := context.WithCancel(ctx)
	var parts errgroup.Group
	defer func() {
		stop()
		_ = parts.Wait() // nil: only we end them
	}()
	bell, err := s.bell(ringing, &parts)
	if err != nil {
		return err
	}
	seen := make(chan error, 1)
	parts.Go(func() error {
		seen <- w.run(ringing, s.db, len(orders))
		return nil
	})

	intake := handlers.NewOrderCreate(slog.New(plainLog{s.progress}))
	bar := newProgress(s.progress, len(orders), "sagas started")
	err = bench.Pace(ctx, b.every(), len(orders), func(i int) error {
		o := &orders[i]
		o.message(ctx)
		var shards uint16
		if err := start(outbox.NoteShards(ctx, &shards), s, intake, o); err != nil {
			return err
		}
		w.add(o.MessageID, time.Now())
		bell.Ring(shards)
		bar.set(i + 1)
		return nil
	})
	bar.done()
	if err != nil {
		return err
	}
	err = s.await(ctx, "all sagas have ended", deliveryPoll, func(context.Context) (int, bool, error) {
		select {
		case err := <-seen:
			return 0, true, err
		default:
			return w.openNow(), false, nil
		}
	})
	if err != nil {
		return err
	}
	b.result.P50.add(precise(bench.Quantile(w.took, 0.50)))
	b.result.P99.add(precise(bench.Quantile(w.took, 0.99)))
	return b.checkAll(ctx, s)
}

// start is what a worker does with an order.create, in this process: when it returns, the
// order, its saga and the first command are committed.
func start(ctx context.Context, s *station, intake *handlers.OrderCreate, o *order) error {
	err := sqltx.WithTx(ctx, s.db, func(ctx context.Context, tx *sqltx.Tx) error {
		out := intake.HandleBatch(ctx, tx, []message.Message{o.msg})[0]
		if tx.Err() == nil && out.Kind != message.Done {
			return errors.New(out.Reason)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("start the saga of order %d: %w", o.Line, err)
	}
	return nil
}

// checkAll demands that all orders there are, of throughput and latency, became what they
// should, and that every invariant holds.
func (b *sagaBench) checkAll(ctx context.Context, s *station) error {
	v := verifier{db: s.db, broker: s.broker, retention: s.place.config.Inbox.Retention}
	if err := v.await(ctx, benchPatience); err != nil {
		return err
	}
	f, err := v.verify(ctx)
	if err != nil {
		return err
	}
	m, have := b.mix(), f.Checked.Orders
	confirmed := m.count - m.refuse + b.paced()
	if !f.OK || have["CONFIRMED"] != confirmed || have["CANCELLED"] != m.refuse || sum(have) != confirmed+m.refuse {
		f.print(s.progress)
		return fmt.Errorf("the orders are %v; %d should be CONFIRMED and %d CANCELLED, with every invariant intact", have, confirmed, m.refuse)
	}
	return nil
}

// watch notes when sagas end.
type watch struct {
	added chan struct{}   // has one while there may be open ones it does not know of
	took  []time.Duration // until run returns it is run's

	mu   sync.Mutex // guards below
	open map[string]time.Time
}

// add notes that the saga of a request began.
func (w *watch) add(request string, at time.Time) {
	w.mu.Lock()
	w.open[request] = at
	w.mu.Unlock()
	select {
	case w.added <- struct{}{}:
	default:
	}
}

func (w *watch) openNow() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.open)
}

// run looks for the ends of open sagas until n have ended.
func (w *watch) run(ctx context.Context, db sqltx.Querier, n int) error {
	tick := time.NewTicker(endedPoll)
	defer tick.Stop()
	for len(w.took) < n {
		w.mu.Lock()
		requests := slices.Collect(maps.Keys(w.open))
		w.mu.Unlock()
		next := tick.C
		if len(requests) == 0 {
			next = nil // nothing to look for: do not burden the server
		}
		select {
		case <-next:
		case <-w.added:
			continue
		case <-ctx.Done():
			return ctx.Err()
		}
		ended, err := bench.Ended(ctx, db, requests)
		if err != nil {
			return err
		}
		now := time.Now()
		w.mu.Lock()
		for _, id := range ended {
			w.took = append(w.took, now.Sub(w.open[id]))
			delete(w.open, id)
		}
		w.mu.Unlock()
	}
	return nil
}
