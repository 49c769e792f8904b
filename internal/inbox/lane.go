package inbox

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// errHeldTooLong means the database stayed away until the broker would have complained.
var errHeldTooLong = errors.New("deliveries held too long; handing them back")

// Lane consumes one queue, a batch at a time.
type Lane struct {
	db    *sql.DB
	src   Source
	cfg   Config
	size  size
	stats *Stats
}

// NewLane returns a lane that is not running yet. stats may be shared between lanes.
func NewLane(db *sql.DB, src Source, cfg Config, stats *Stats) *Lane {
	cfg = cfg.withDefaults()
	return &Lane{db: db, src: src, cfg: cfg, size: size{limit: cfg.Batch, most: cfg.Batch}, stats: stats}
}

// Run consumes until ctx ends, then requeues what it has not started, finishes the
// transaction in hand and returns nil. Outages of the database or the broker never end it.
func (l *Lane) Run(ctx context.Context) error {
	for try := 0; ctx.Err() == nil; try++ {
		if err := l.awaitDatabase(ctx, 0); err != nil {
			break // only ctx ends it
		}
		began := time.Now()
		err := l.consume(ctx)
		if ctx.Err() != nil {
			break
		}
		l.cfg.Log.Warn("consumer ended; subscribing again", "error", err)
		if time.Since(began) > time.Minute {
			try = 0
		}
		// All shall flow within 5 s of the end of an outage.
		sleep(ctx, rand.N(min(3*time.Second, 100*time.Millisecond<<min(try, 6))))
	}
	return nil
}

// consume works on one subscription until it ends, or ctx does.
func (l *Lane) consume(ctx context.Context) error {
	// Prefetch 1 at first: with a full prefetch a process that crashes on a poison message
	// again and again would burn the delivery counts of its innocent neighbours too.
	sub, err := l.src.Subscribe(ctx, l.cfg.Queue, 1)
	if err != nil {
		return err
	}
	// What was not started goes back at once, while the transaction in hand is finished.
	returned := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { defer close(returned); handBack(sub) })
	defer func() {
		if !stop() {
			<-returned
		}
		_ = sub.Close() // the broker requeues what we have not acked either way
	}()
	s := &session{Subscription: sub}
	for d := range sub.Deliveries() {
		if err := l.process(ctx, s, l.collect(d, sub.Deliveries())); err != nil {
			if errors.Is(err, sub.Err()) {
				return err
			}
			return errors.Join(err, sub.Err()) // why the acks did not get through
		}
	}
	return errors.Join(errors.New("subscription ended"), sub.Err())
}

// session is a subscription and whether it has its full prefetch yet.
type session struct {
	Subscription
	open bool
}

// handBack stops new deliveries and requeues those that nobody has taken.
func handBack(sub Subscription) {
	if err := sub.Cancel(); err != nil {
		_ = sub.Close() // gone, and the broker has requeued everything
		return
	}
	for d := range sub.Deliveries() {
		// One by one: the tags before them are in hand. After an error the broker has requeued
		// them already.
		_ = sub.Nack(d.Tag, false, true)
	}
}

// maxBatchBytes is where a batch ends, however many deliveries it may have: its rows go into
// one transaction, and copies of its bodies into the outbox.
const maxBatchBytes = 4 << 20

// collect takes d and what is already there. A lone message is not held back for more; several
// are, for the time that size says.
func (l *Lane) collect(d message.Delivery, more <-chan message.Delivery) []message.Delivery {
	batch, bytes := []message.Delivery{d}, len(d.Body)
	var enough <-chan time.Time // nil until there is no more to take at once
	for len(batch) < l.size.limit && bytes < maxBatchBytes {
		var ok bool
		select {
		case d, ok = <-more:
		default:
			if enough == nil {
				if len(batch) == 1 || l.size.linger == 0 {
					return batch
				}
				enough = time.After(l.size.linger)
			}
			select {
			case d, ok = <-more:
			case <-enough:
				return batch
			}
		}
		if !ok {
			return batch
		}
		batch = append(batch, d)
		bytes += len(d.Body)
	}
	return batch
}

// hold keeps the deliveries while the database is away. It reports whether the database was
// up at once, so that the message may be to blame.
func (l *Lane) hold(ctx context.Context, cause error) (wasUp bool, err error) {
	if sqltx.Probe(ctx, l.db) == nil {
		return true, nil
	}
	l.cfg.Log.Warn("database away; holding deliveries", "error", cause)
	began := time.Now()
	err = l.awaitDatabase(ctx, l.cfg.MaxHold)
	if err == nil {
		l.cfg.Log.Info("database back", "after", time.Since(began).Round(time.Millisecond))
	}
	return false, err
}

// awaitDatabase probes until the database takes writes, ctx ends, or limit is over (0: none).
func (l *Lane) awaitDatabase(ctx context.Context, limit time.Duration) error {
	began := time.Now()
	for try := 0; ; try++ {
		if sqltx.Probe(ctx, l.db) == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if limit > 0 && time.Since(began) > limit {
			return errHeldTooLong
		}
		sleep(ctx, 50*time.Millisecond+rand.N(min(time.Second, 50*time.Millisecond<<min(try, 5))))
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
