package outbox

import (
	"slices"
	"time"
)

// ages tells how long rows have been there, by our own clock: the database's may step between
// a row's creation and now. A row that is not above what was the highest id once has been there
// since then.
type ages struct{ marks []mark } // oldest first

// mark is the highest id there was.
type mark struct {
	at time.Time // monotonic: not before it was read
	id uint64
}

// note remembers the highest id as long as it matters to what is asked about limit.
func (a *ages) note(id uint64, limit time.Duration) {
	now := time.Now()
	if n := len(a.marks); n > 0 && now.Sub(a.marks[n-1].at) < limit/64 {
		return
	}
	a.marks = append(a.marks, mark{now, id})
	for len(a.marks) > 1 && now.Sub(a.marks[1].at) >= limit {
		a.marks = slices.Delete(a.marks, 0, 1)
	}
}

// atLeast reports whether a row is known to have been there for limit. One that was there before
// us is as old as we are.
func (a *ages) atLeast(limit time.Duration, id uint64) bool {
	for _, m := range slices.Backward(a.marks) {
		if time.Since(m.at) >= limit {
			return id <= m.id
		}
	}
	return false
}
