package inbox

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"backstep/internal/attempt"
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

	full      time.Time // since when the database has had no room for it; zero: it has
	uncounted time.Time // since when that has been so, or its failed attempt could not be counted
	counting  bool      // that is tried

	shards uint16 // of the outbox that it has added rows to

	calls map[uint64]message.Outcome // by tag: deliveries that have gone outside
}

// note keeps which deliveries go outside, now that the transaction is committed.
func (g *group) note(todo []*message.Delivery, outcomes []message.Outcome) {
	for i, o := range outcomes {
		if o.Kind != message.Outside {
			continue
		}
		if g.calls == nil {
			g.calls = map[uint64]message.Outcome{}
		}
		g.calls[todo[i].Tag] = o
	}
}

func (g *group) halves() []*group {
	h := len(g.ds) / 2
	return []*group{{ds: g.ds[:h], full: g.full, uncounted: g.uncounted}, {ds: g.ds[h:], full: g.full, uncounted: g.uncounted}}
}

func (g *group) singles() []*group {
	out := make([]*group, len(g.ds))
	for i := range g.ds {
		out[i] = &group{ds: g.ds[i : i+1]}
	}
	return out
}

// process runs a batch in one transaction and acks it. What fails together is run apart:
// conflicts first in place, then in halves, then, alone, after the others; what finds no room in halves, and
// alone after the others; a panic alone. When
// ctx ends the transaction in hand, which inHand is for, is finished and no other is begun. Nor is
// one when the session is gone: the rest could not be acked, and the broker has given it to somebody
// else, or will to us.
func (l *Lane) process(ctx, inHand context.Context, s *session, batch []message.Delivery) error {
	work := []*group{{ds: batch}}
	for len(work) > 0 {
		if ctx.Err() != nil {
			s.giveBack(work)
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
			s.giveBack(work)
			return ctx.Err()
		}
		if err != nil {
			parts, err := l.again(ctx, g, err)
			switch {
			case err != nil:
				return err
			case g.rejected:
			case len(g.ds) == 1 && (g.conflicts > 1 || !g.full.IsZero()):
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
		if l.full && !g.full.IsZero() && !g.counting { // a count finds room where the message does not
			l.cfg.Log.Info("database has room again", "after", time.Since(g.full).Round(time.Millisecond))
			l.full = false
		}
		crash.Point("worker.committed")
		l.cfg.Committed(g.shards)
		if err := l.settle(ctx, inHand, s, g, rest); err != nil {
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
func (l *Lane) settle(ctx, inHand context.Context, s *session, g *group, open []*group) error {
	var errs []error
	if !s.open && !g.ds[0].Redelivered {
		// Before the ack, so that nothing can be on its way to the consumer that is replaced.
		s.open = true
		errs = append(errs, s.Reopen(ctx, l.cfg.Prefetch))
	}
	for _, d := range g.ds {
		if call, ok := g.calls[d.Tag]; ok {
			s.send(ctx, inHand, l, d, call)
		} else {
			s.settled(&d)
		}
	}
	// One ack for all, unless a lower tag is still open: in a group, or outside.
	single := slices.ContainsFunc(open, func(o *group) bool { return o.ds[0].Tag < g.ds[0].Tag })
	lowest := s.lowestOutside()
	var last uint64
	for _, d := range g.ds {
		switch {
		case s.isOutside(&d):
		case g.rejected || !parkable(&d):
			errs = append(errs, s.Nack(d.Tag, false, false)) // the broker dead-letters it
		case single || d.Tag > lowest:
			errs = append(errs, s.Ack(d.Tag, false))
		default:
			last = d.Tag
		}
	}
	if last > 0 {
		errs = append(errs, s.Ack(last, true))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	l.progress.settled(g.ds, s.isOutside)
	return nil
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
	case sqltx.Full:
		return l.awaitRoom(ctx, g, err)
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

// fullAlone is for how long a message finds no room until a failed attempt is counted for it, if there is room
// for that: a table in memory may be full for ever. When it is the disk, there mostly is none for the count
// either, but tables have room of their own left.
const fullAlone = time.Minute

// awaitRoom waits before a group is run again that the database has had no room for. Only that tells
// whether there is some now: a small write may find it, where a large one does not.
func (l *Lane) awaitRoom(ctx context.Context, g *group, cause error) ([]*group, error) {
	d := &g.ds[0]
	if g.full.IsZero() {
		l.cfg.Log.Warn("database full; holding deliveries", "messages", len(g.ds), "first", d.MessageID, "error", cause)
		g.full, g.uncounted, l.full = time.Now(), time.Now(), true
	}
	switch {
	case g.counting: // no room for that either
		d.Failure, g.counting, g.uncounted = "", false, time.Now()
	case time.Since(g.full) > l.cfg.MaxHold:
		return nil, errHeldTooLong
	case len(g.ds) == 1 && d.Failure == "" && time.Since(g.uncounted) > min(fullAlone, l.cfg.MaxHold/2):
		l.cfg.Log.Warn("no room for a message; counting a failed attempt, if there is for that", "message_id", d.MessageID, "error", cause)
		d.Failure, g.counting = clip(cause.Error()), true
		return []*group{g}, nil
	}
	sleep(ctx, lostPause/2+rand.N(lostPause))
	if len(g.ds) > 1 {
		return g.halves(), nil
	}
	return []*group{g}, nil
}

// apart goes on after a failure that the messages of g are to blame for: each is run alone,
// to find out which. That one's next try only counts the failed attempt; if even that fails,
// it is parked; and if that fails because of what is in it, the broker dead-letters it.
func (l *Lane) apart(ctx context.Context, g *group, err error) ([]*group, error) {
	log := l.cfg.Log.With("messages", len(g.ds), "error", err)
	panicked, isPanic := errors.AsType[*attempt.Panic](err) // also one that the handler has made an error of
	if isPanic {
		log = log.With("stack", string(panicked.Stack))
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
	if errors.Is(err, sqltx.ErrLeftBehind) {
		g.fails++ // it is parked without another try, which would leave another behind
	}
	return []*group{g}, sqltx.Pause(ctx, g.fails)
}
