package inbox

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"backstep/internal/crash"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// group is deliveries that share a transaction, and what went wrong with it so far.
type group struct {
	ds []message.Delivery

	conflicts int  // deadlocks and lock waits
	lost      int  // connections that went away while the server was up
	fails     int  // everything else
	rejected  bool // it cannot even be parked

	shards uint16 // of the outbox that it has added rows to
}

func (g *group) halves() []*group {
	h := len(g.ds) / 2
	return []*group{{ds: g.ds[:h]}, {ds: g.ds[h:]}}
}

func (g *group) singles() []*group {
	out := make([]*group, len(g.ds))
	for i := range g.ds {
		out[i] = &group{ds: g.ds[i : i+1]}
	}
	return out
}

// process runs a batch in one transaction and acks it. What fails together is run apart:
// conflicts first in place, then in halves, then, alone, after the others; a panic alone. When
// ctx ends the transaction in hand is finished, and no other is begun. Nor is one when the session
// is gone: the rest could not be acked, and the broker has given it to somebody else, or will to us.
func (l *Lane) process(ctx context.Context, s *session, batch []message.Delivery) error {
	inHand, end := outlive(ctx, l.cfg.Drain)
	defer end()
	work := []*group{{ds: batch}}
	for len(work) > 0 {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := s.Err(); err != nil {
			return err
		}
		g, rest := work[0], work[1:]
		began := time.Now()
		err := l.transact(inHand, g)
		if err != nil && ctx.Err() != nil {
			l.cfg.Log.Info("stopping; the transaction in hand was rolled back and its messages go back", "messages", len(g.ds), "error", err)
			return ctx.Err()
		}
		if err != nil {
			parts, err := l.again(ctx, g, err)
			switch {
			case err != nil:
				return err
			case g.rejected:
			case len(g.ds) == 1 && g.conflicts > 1:
				work = append(rest, g)
				continue
			default:
				work = append(parts, rest...)
				continue
			}
		}
		if err == nil {
			l.size.done(len(g.ds), time.Since(began))
		}
		crash.Point("worker.committed")
		l.cfg.Committed(g.shards)
		if err := l.settle(ctx, s, g, rest); err != nil {
			return err
		}
		crash.Point("worker.acked")
		work = rest
	}
	return nil
}

// outlive returns a context that ends some time after ctx has.
func outlive(ctx context.Context, by time.Duration) (context.Context, func()) {
	longer, end := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		sleep(longer, by)
		end()
	})
	return longer, func() { stop(); end() }
}

// settle tells the broker about a group that is done; the groups in open are not.
func (l *Lane) settle(ctx context.Context, s *session, g *group, open []*group) error {
	var errs []error
	if !s.open && !g.ds[0].Redelivered {
		// Before the ack, so that nothing can be on its way to the consumer that is replaced.
		s.open = true
		errs = append(errs, s.Reopen(ctx, l.cfg.Prefetch))
	}
	// One ack for all, unless a lower tag is still open.
	single := slices.ContainsFunc(open, func(o *group) bool { return o.ds[0].Tag < g.ds[0].Tag })
	var last uint64
	for _, d := range g.ds {
		switch {
		case g.rejected || !parkable(&d):
			errs = append(errs, s.Nack(d.Tag, false, false)) // the broker dead-letters it
		case single:
			errs = append(errs, s.Ack(d.Tag, false))
		default:
			last = d.Tag
		}
	}
	if last > 0 {
		errs = append(errs, s.Ack(last, true))
	}
	return errors.Join(errs...)
}

const (
	// maxLostTogether is how often a batch may lose its connection to a server that is up, until
	// its messages are run alone; maxLostAlone, how often one then may in a row until it is to
	// blame. A network that cuts a connection now and then must not cost anybody an attempt.
	maxLostTogether, maxLostAlone = 2, 5
	// lostPause gives a server that is going down time to be noticed as down.
	lostPause = 500 * time.Millisecond
)

func (g *group) maxLost() int {
	if len(g.ds) > 1 {
		return maxLostTogether
	}
	return maxLostAlone
}

// again decides how to go on after the transaction of g failed with err. Nothing is spent and
// nothing parked for conflicts and outages.
func (l *Lane) again(ctx context.Context, g *group, err error) ([]*group, error) {
	switch class := sqltx.Classify(err); class {
	case sqltx.Conflict:
		g.conflicts++
		l.stats.Conflicts.Add(1)
		if perr := sqltx.Pause(ctx, g.conflicts); perr != nil {
			return nil, perr
		}
		if g.conflicts > 1 && len(g.ds) > 1 {
			l.size.shrink(len(g.ds))
			return g.halves(), nil
		}
		return []*group{g}, nil
	case sqltx.Lost, sqltx.ReadOnly, sqltx.Canceled:
		// Also an unknown outcome of COMMIT: run again, the inbox decides.
		wasUp, herr := l.hold(ctx, err)
		if herr != nil {
			return nil, herr
		}
		if !wasUp {
			g.lost = 0
			return []*group{g}, nil
		}
		if errors.Is(err, sqltx.ErrNotBegun) && class == sqltx.Lost { // it is nobody's fault here
			sleep(ctx, lostPause)
			return []*group{g}, nil
		}
		if g.lost++; class != sqltx.Canceled && g.lost < g.maxLost() {
			// Longer each time, and never as long: whoever cuts connections at a pace must not
			// meet the same message again and again.
			pause := lostPause << min(g.lost-1, 2)
			sleep(ctx, pause/2+rand.N(pause))
			return []*group{g}, nil
		}
	}
	return l.apart(ctx, g, err)
}

// apart goes on after a failure that the messages of g are to blame for: each is run alone,
// to find out which. That one's next try only counts the failed attempt; if even that fails,
// it is parked; and if that fails because of what is in it, the broker dead-letters it.
func (l *Lane) apart(ctx context.Context, g *group, err error) ([]*group, error) {
	log := l.cfg.Log.With("messages", len(g.ds), "error", err)
	panicked, isPanic := errors.AsType[*panicError](err)
	if isPanic {
		log = log.With("stack", string(panicked.stack))
	}
	if len(g.ds) > 1 {
		log.Error("batch failed")
		if errors.Is(err, context.DeadlineExceeded) {
			l.size.shrink(len(g.ds))
		}
		return g.singles(), nil
	}
	d := &g.ds[0]
	log = log.With("message_id", d.MessageID)
	g.fails++
	if g.fails > 2 && (isPanic || errors.Is(err, outbox.ErrInvalid)) {
		log.Error("message cannot be parked; dead-lettering it")
		g.rejected = true
		return []*group{g}, nil
	}
	log.Error("message failed", "failures", g.fails)
	if g.fails == 1 {
		d.Failure = clip(err.Error()) // later ones are about counting and parking
	}
	if errors.Is(err, errLeftBehind) {
		g.fails++ // it is parked without another try, which would leave another behind
	}
	return []*group{g}, sqltx.Pause(ctx, g.fails)
}
