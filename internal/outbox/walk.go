package outbox

import (
	"maps"
	"math"
	"slices"
	"time"
)

// walk is a pass over a shard's pending rows, by id from 0. Each begins there, no low-water mark
// is kept: a row that commits late under a low id is found by the next one.
//
// A pass takes many reads, and each sees what was committed meanwhile: a late one could find a
// row whose predecessor, by key, has committed behind its back under an id the pass is past.
// So no pass goes beyond the highest id that its first read saw. What such a row has to wait for
// had committed by then, and each of its reads finds it.
//
// What a pass leaves out for want of room, the next ones jump over: a hundred thousand rows to
// a full queue take seconds to be read, and all others would wait for it each time.
type walk struct {
	on      bool       // from its beginning to its end
	last    uint64     // no row beyond it
	after   uint64     // last id read or jumped over
	behind  []*stretch // up to there
	current *stretch   // what is still to be read again of one
	ahead   []*stretch // beyond
	haul    *haul      // waits for the check of all these, and the walk with it
	sure    bool       // they were checked since the pass began
	checked time.Time  // when they last were, by whatever pass
}

// haul is what a read has brought of a shard.
type haul struct {
	rows  []*row // that are not known
	after uint64 // last id read
	more  bool   // there was more to read

	waiting  int            // known rows that were read and are held up
	blockers map[*hold]bool // by what
}

// unknown is the highest id as long as nobody has asked.
const unknown = math.MaxUint64

// begin starts a pass.
func (p *pump) begin(w *walk) {
	all := w.stretches()
	if len(all) > 0 {
		// What sums do not tell: a row was changed in place, by hand.
		oldest := slices.MinFunc(all, func(a, b *stretch) int { return a.walked.Compare(b.walked) })
		oldest.again = oldest.again || time.Since(oldest.walked) > p.cfg.stretchTTL
	}
	*w = walk{on: true, last: unknown, ahead: all, sure: len(all) == 0, checked: w.checked}
	p.advance(w)
}

// stretches returns all there are, by id.
func (w *walk) stretches() []*stretch {
	all := slices.Clone(w.behind)
	if w.current != nil {
		all = append(all, w.current)
	}
	return append(all, w.ahead...)
}

// span returns what is to be read next. Of a stretch that has room again that is little at a
// time: most often a key has, and takes no more.
func (p *pump) span(w *walk, shard, limit int) span {
	sp := span{shard: shard, after: w.after, upTo: w.last, limit: limit, first: w.last == unknown}
	if st := w.current; st != nil {
		sp.upTo = min(sp.upTo, st.last)
		if !st.again {
			sp.limit = min(limit, p.cfg.bound)
		}
	}
	return sp
}

// advance jumps over the stretches of which nothing can be let in.
func (p *pump) advance(w *walk) {
	for len(w.ahead) > 0 {
		st := w.ahead[0]
		w.ahead = w.ahead[1:]
		if st.again || st.hasRoom(p) {
			w.current = st
			return
		}
		w.jump(st)
		p.tally.jumps.Add(1)
	}
}

func (w *walk) jump(st *stretch) {
	w.behind = append(w.behind, st)
	w.after = st.last
}

// doubt notes which stretches do not agree with what is pending, and begins again if there
// are any: what was read behind them does not count.
func (p *pump) doubt(w *walk, doubtful map[*stretch]bool) bool {
	all, found := w.stretches(), false
	for _, st := range all {
		st.again = st.again || doubtful[st]
		found = found || doubtful[st]
	}
	if found {
		p.tally.doubts.Add(1)
		w.after, w.behind, w.current, w.ahead = 0, nil, nil, all
		p.advance(w)
	}
	return found
}

// goOn goes on behind what was read. more tells whether there was more before upTo.
func (p *pump) goOn(w *walk, more bool) {
	switch st := w.current; {
	case st == nil:
		w.on = more
		return
	case !more: // what is still left out of it is in stretches behind
		w.after = st.last
	case st.again || st.hasRoom(p):
		return
	default:
		w.jump(st) // over the rest
	}
	w.current = nil
	p.advance(w)
}

// leftOut returns what the row waits for that was left out before, of the same key.
func (w *walk) leftOut(key string) blocker {
	h := hashKey(key)
	for _, st := range w.behind {
		if b, ok := st.keys[h]; ok {
			return b
		}
	}
	return nil
}

// leaveOut notes a row there is no room for. It reports false if there are too many to go on.
func (p *pump) leaveOut(w *walk, r *row, b blocker) bool {
	if n := len(w.behind); n == 0 || w.behind[n-1].sum.rows >= uint64(p.cfg.Page) {
		if w.current == nil && p.keysLeftOut() >= p.cfg.leftOutMax {
			p.tellCrowded()
			return false
		}
		w.behind = append(w.behind, newStretch())
	}
	w.behind[len(w.behind)-1].add(r, b)
	return true
}

// cover has the next passes jump over what was read, too, though it is known, because much of it
// is held up: as many rows as were in flight when their destination refused the first.
//
// A destination that has room for more is no reason to read a stretch again: what goes there is
// known. As one, it would have all be read by each pass that was left out for another's sake.
func (p *pump) cover(w *walk, h haul) {
	maps.DeleteFunc(h.blockers, func(b *hold, _ bool) bool { return b.hasRoom(p) })
	n := len(w.behind)
	if n == 0 || w.behind[n-1].sum.rows >= uint64(p.cfg.Page) {
		if len(h.blockers) == 0 {
			return // nothing would end it
		}
		w.behind = append(w.behind, newStretch())
		n++
	}
	st := w.behind[n-1]
	st.last = h.after
	for b := range h.blockers {
		st.blockers[b] = true
	}
}

// keysLeftOut is what the memory of rows left out grows with.
func (p *pump) keysLeftOut() (n int) {
	for _, w := range p.walks {
		for _, st := range w.stretches() {
			n += len(st.keys)
		}
	}
	return n
}

func (p *pump) tellCrowded() {
	if time.Since(p.crowded) > tellEvery {
		p.crowded = time.Now()
		p.cfg.Log.Warn("too many rows wait for their destinations; the relay does not look beyond them", "keys", p.cfg.leftOutMax)
	}
}
