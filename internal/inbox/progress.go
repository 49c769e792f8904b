package inbox

import (
	"sync"
	"time"

	"backstep/internal/message"
)

// Progress is how far the lanes of one queue in this process have come, in memory: a batch costs
// two short locks and no statement. The zero value is ready; lanes that share it are one consumer.
type Progress struct {
	mu    sync.Mutex // guards below and the lanes; nothing that waits is called under it
	lanes []*laneProgress
}

// Standing is a consumer's at one moment.
type Standing struct {
	Subscribed bool // a lane is; else it holds nothing, and nothing comes

	// Latest is a time such that nothing published before it is in the lanes' hands, and
	// something published then, or later, has been: what was in the queue before that has come
	// out of it. Zero: not known.
	Latest time.Time

	// Idle is for how long no lane that is subscribed has had anything in hand; 0: one has.
	Idle time.Duration
}

// Standing returns what holds now.
func (p *Progress) Standing() Standing {
	p.mu.Lock()
	defer p.mu.Unlock()
	var s Standing
	var rest time.Time // the latest of lanes that have nothing in hand, and hold nothing back
	idle := true
	for _, l := range p.lanes {
		if !l.subscribed {
			continue
		}
		latest := l.latest()
		if len(l.inHand) == 0 {
			if !s.Subscribed || time.Since(l.since) < s.Idle {
				s.Idle = time.Since(l.since)
			}
			if rest.Before(latest) {
				rest = latest
			}
		} else {
			if idle || latest.Before(s.Latest) {
				s.Latest = latest
			}
			idle = false
		}
		s.Subscribed = true
	}
	if idle {
		s.Latest = rest
	} else {
		s.Idle = 0
	}
	return s
}

// laneProgress is one lane's part. It is guarded by the mutex of its Progress.
type laneProgress struct {
	all        *Progress
	subscribed bool
	newest     time.Time            // publish time of the last first delivery of this session that is settled
	inHand     map[uint64]time.Time // publish times by tag; zero: it does not say
	since      time.Time            // nothing is in hand
}

// lane makes the part of one lane.
func (p *Progress) lane() *laneProgress {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := &laneProgress{all: p, inHand: map[uint64]time.Time{}}
	p.lanes = append(p.lanes, l)
	return l
}

// publishedAt is a lower bound of when a message was published, and so it is safe to go by: the
// timestamp is when its outbox row was added, by the database's clock, in whole seconds; for want
// of one, the id says when it was made. Zero: it does not say.
func publishedAt(m *message.Message) time.Time {
	if !m.Timestamp.IsZero() {
		return m.Timestamp
	}
	return m.Time()
}

// begin notes a new session. What the lane had of the one before went back to the queue, to be
// delivered before all else, perhaps to others: nothing is known until a first delivery is settled.
func (l *laneProgress) begin() {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	l.subscribed, l.newest, l.since = true, time.Time{}, time.Now()
	clear(l.inHand)
}

// end notes that the session is gone.
func (l *laneProgress) end() {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	l.subscribed = false
	clear(l.inHand)
}

// took notes deliveries that are in the lane's hands from now on.
func (l *laneProgress) took(ds []message.Delivery) {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	for i := range ds {
		l.inHand[ds[i].Tag] = publishedAt(&ds[i].Message)
	}
}

// settled notes deliveries that are committed, and that the broker has been told of. ds are in the
// order of their tags. The last one counts, not the latest: a clock that was set back, or a
// timestamp from nowhere, misleads nobody for longer than until the next. Those that are outside for
// a call are in hand still.
func (l *laneProgress) settled(ds []message.Delivery, outside func(d *message.Delivery) bool) {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	for i := range ds {
		if outside(&ds[i]) {
			continue
		}
		delete(l.inHand, ds[i].Tag)
		// One that was requeued has left its place in the queue, and says nothing about others.
		if at := publishedAt(&ds[i].Message); !at.IsZero() && !ds[i].Redelivered {
			l.newest = at
		}
	}
	if len(l.inHand) == 0 {
		l.since = time.Now()
	}
}

// latest is as in Standing.
func (l *laneProgress) latest() time.Time {
	latest := l.newest
	for _, at := range l.inHand {
		if !at.IsZero() && at.Before(latest) {
			latest = at
		}
	}
	return latest
}
