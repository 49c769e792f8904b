package inbox

import "time"

// size is how many deliveries a lane puts into one batch. It is what has arrived, up to limit,
// so it follows the load; the limit shrinks when batches of that size get into each other's way,
// or take too long, and grows back when they do not any more.
type size struct {
	limit, most int
	linger      time.Duration // how long several that have arrived wait for more
}

const (
	// longBatch is how long a transaction may hold its locks before the next has fewer messages.
	longBatch = 2 * time.Second

	// Under load a transaction costs the servers much the same for few messages as for many, and
	// the more lanes there are the fewer each finds waiting. So after a batch of busyBatch or more,
	// the next waits for company as long as that one took, and no longer than maxLinger
	// (docs/adr/0008).
	busyBatch = 8
	maxLinger = 200 * time.Millisecond
)

// shrink halves the limit after a batch of n messages.
func (s *size) shrink(n int) { s.limit = max(1, min(s.limit, n)/2) }

// done notes that a batch of n messages has been committed after so long.
func (s *size) done(n int, took time.Duration) {
	s.linger = 0
	if n >= busyBatch {
		s.linger = min(took, maxLinger)
	}
	switch {
	case took > longBatch && n > 1:
		s.shrink(n)
	case n >= s.limit:
		s.limit = min(s.most, s.limit+1+s.limit/8)
	}
}
