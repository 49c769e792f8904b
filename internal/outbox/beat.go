package outbox

import "time"

// beat is when the loops of a relay that has nothing to do look again: together, because what an
// idle process costs is waking up. Those of different relays do not beat together.
type beat struct {
	began time.Time
	every time.Duration
}

func newBeat(every time.Duration) beat { return beat{time.Now().Add(-jitter(every)), every} }

// next returns how long it is until the next one.
func (b beat) next() time.Duration { return b.every - time.Since(b.began)%b.every }
