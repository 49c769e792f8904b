package outbox

import (
	"hash/maphash"
	"math"
	"time"
)

// stretch is a part of a shard's ids, behind the stretch before it, and the rows of it that
// were left out. A pass may jump over it if the pending rows there still are those, apart from
// rows that are known: if nothing has committed among them meanwhile, that is, whose successor
// the pass would find first.
type stretch struct {
	last     uint64 // its last row
	sum      checksum
	keys     map[uint64]blocker // by the hash of the ordering key: later rows of these have to wait too
	blockers map[blocker]bool
	walked   time.Time
	again    bool // it has to be read again, to its end
}

// blocker is what a row waits for that was left out: its key's line, or its destination.
type blocker interface{ hasRoom(*pump) bool }

const (
	// stretchTTL is when a stretch is read again all the same.
	stretchTTL = 5 * time.Minute
	// leftOutMax bounds the memory of what was left out, to some 60 MB.
	leftOutMax = 1 << 20
)

// Two keys that are taken for one wait for each other. With 64 bits nobody will see it.
var keySeed = maphash.MakeSeed()

func hashKey(key string) uint64 { return maphash.String(keySeed, key) }

func newStretch() *stretch {
	return &stretch{keys: map[uint64]blocker{}, blockers: map[blocker]bool{}, walked: time.Now()}
}

func (st *stretch) add(r *row, b blocker) {
	st.last = r.id
	st.sum = st.sum.plus(sumOf(r.id))
	st.keys[hashKey(r.key)] = b
	st.blockers[b] = true
}

// hasRoom reports whether a row of it may be let in now.
func (st *stretch) hasRoom(p *pump) bool {
	for b := range st.blockers {
		if b.hasRoom(p) {
			return true
		}
	}
	return false
}

// checksum tells one set of ids from another: how many they are, and the XOR of the squares of
// their lower halves. A set that has only grown, or only shrunk, is never taken for the same;
// and the server computes it in integers.
type checksum struct{ rows, squares uint64 }

func (c checksum) plus(d checksum) checksum {
	return checksum{c.rows + d.rows, c.squares ^ d.squares}
}

func (c checksum) minus(d checksum) checksum {
	return checksum{c.rows - d.rows, c.squares ^ d.squares}
}

func sumOf(id uint64) checksum {
	low := id & math.MaxUint32
	return checksum{1, low * low}
}
