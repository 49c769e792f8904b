package inbox

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"slices"
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
	full  bool          // it was said that the database has no room
	slots chan struct{} // one for each call that is being made

	progress *laneProgress
}

// NewLane returns a lane that is not running yet. stats may be shared between lanes.
func NewLane(db *sql.DB, src Source, cfg Config, stats *Stats) *Lane {
	cfg = cfg.withDefaults()
	return &Lane{
		db: db, src: src, cfg: cfg, size: size{limit: cfg.Batch, most: cfg.Batch}, stats: stats,
		slots: make(chan struct{}, cfg.Calls), progress: cfg.Progress.lane(),
	}
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
	l.progress.begin()
	defer l.progress.end()
	// What was not started goes back at once, while the transaction in hand is finished.
	cancelled, returned := make(chan struct{}), make(chan struct{})
	stop := context.AfterFunc(ctx, func() { defer close(returned); handBack(sub, cancelled) })
	defer func() {
		if !stop() {
			<-returned
		}
		_ = sub.Close() // the broker requeues what we have not acked either way
	}()
	s := newSession(sub, cancelled)
	defer s.calls.Wait() // they end soon after inHand
	inHand, end := outlive(ctx, l.cfg.Drain)
	defer end()
	err = l.work(ctx, inHand, s)
	if ctx.Err() != nil && s.Err() == nil {
		return l.drain(inHand, s)
	}
	if errors.Is(err, sub.Err()) {
		return err
	}
	return errors.Join(err, sub.Err()) // why the acks did not get through
}

// work processes what comes, from the broker or from outside, until the subscription ends.
func (l *Lane) work(ctx, inHand context.Context, s *session) error {
	for {
		var batch []message.Delivery
		select {
		case d, ok := <-s.Deliveries():
			if !ok {
				return errors.New("subscription ended")
			}
			batch = l.take(s, batch, d)
		case r := <-s.answers:
			if s.back(&r) {
				batch = append(batch, r.Delivery)
			}
		}
		if len(batch) == 0 {
			continue
		}
		batch = l.collect(s, batch, s.Deliveries())
		l.progress.took(batch)
		if err := l.process(ctx, inHand, s, batch); err != nil {
			return err
		}
	}
}

// drain waits for the calls that are being made and processes their answers, until inHand ends.
func (l *Lane) drain(inHand context.Context, s *session) error {
	for len(s.outside) > 0 {
		batch := s.kept
		s.kept = nil
		if len(batch) == 0 {
			select {
			case r := <-s.answers:
				if !s.back(&r) {
					continue
				}
				batch = l.collect(s, []message.Delivery{r.Delivery}, nil)
			case <-inHand.Done():
				l.cfg.Log.Info("stopping; calls without an answer are given up and their messages go back", "messages", len(s.outside))
				return inHand.Err()
			}
		}
		if err := l.process(inHand, inHand, s, batch); err != nil {
			return err
		}
	}
	return nil
}

// handBack stops new deliveries, which closes cancelled, and requeues those that nobody has taken.
func handBack(sub Subscription, cancelled chan<- struct{}) {
	err := sub.Cancel()
	close(cancelled)
	if err != nil {
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

// collect adds to a batch what is already there, from the broker and from outside. A lone message
// is not held back for more; several are, for the time that size says. The batch that it returns is
// in the order of tags.
func (l *Lane) collect(s *session, batch []message.Delivery, more <-chan message.Delivery) []message.Delivery {
	bytes := 0
	for i := range batch {
		bytes += len(batch[i].Body)
	}
	var enough <-chan time.Time // nil until there is no more to take at once
	for open := true; open && len(batch) < l.size.limit && bytes < maxBatchBytes; {
		n := len(batch)
		var d message.Delivery
		var r reply
		select {
		case d, open = <-more:
		case r = <-s.answers:
		default:
			if enough == nil {
				if len(batch) == 1 || l.size.linger == 0 {
					return inOrder(batch)
				}
				enough = time.After(l.size.linger)
			}
			select {
			case d, open = <-more:
			case r = <-s.answers:
			case <-enough:
				return inOrder(batch)
			}
		}
		switch {
		case r.Tag > 0:
			if s.back(&r) {
				batch = append(batch, r.Delivery)
			}
		case open:
			batch = l.take(s, batch, d)
		}
		if len(batch) > n {
			bytes += len(batch[n].Body)
		}
	}
	return inOrder(batch)
}

// take adds a delivery to a batch, unless it is a second copy of a message that is outside.
func (l *Lane) take(s *session, batch []message.Delivery, d message.Delivery) []message.Delivery {
	if s.isCopy(&d) && l.unfit(&d) == "" {
		l.stats.Duplicates.Add(1)
		_ = s.Ack(d.Tag, false) // after an error the session has ended, and the broker has it again
		return batch
	}
	return append(batch, d)
}

// inOrder sorts a batch by tag: what comes back from outside is older than the others.
func inOrder(batch []message.Delivery) []message.Delivery {
	slices.SortFunc(batch, func(a, b message.Delivery) int { return cmp.Compare(a.Tag, b.Tag) })
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
