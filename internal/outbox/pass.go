package outbox

import (
	"context"
	"maps"
	"math"
	"time"

	"backstep/internal/crash"
	"backstep/internal/message"
)

// pass is one walk over the pending rows, by id from 0. No mark outlives it: a row that
// commits late under a low id is found by the next one.
//
// Each read of a pass sees what was committed meanwhile. So only the first may go beyond the
// ids there were when it began: a later one would find a row whose predecessor, by key, has
// committed behind its back under an id the pass is past.
type pass struct {
	began map[int]uint64  // shard → id it began behind, most often 0
	after map[int]uint64  // shard → last id read; a shard leaves when it has no more
	last  uint64          // no row beyond it
	left  map[int]*behind // shard → what it has left out; later rows must not overtake that
	head  map[int]int     // of these it reads one page before it goes on behind what was left out, and lets in so many rows
	check map[int]uint64  // of these it reads what is behind, which is still to be verified
	found bool            // it brought something new
	took  time.Duration   // its reads
	next  time.Time
	wait  time.Duration
}

type readDone struct {
	page
	found
	took   time.Duration
	epochs map[int]uint64 // of the leases when the read began
	err    error
}

// read starts the next read, if one is due and there is room for what it may bring.
func (p *pump) read(ctx context.Context) {
	if p.reading || !p.pub.Ready() || p.roomLeft() <= 0 {
		return
	}
	if len(p.pass.after) == 0 && time.Now().Before(p.pass.next) {
		return
	}
	owned := p.leases.owned()
	if len(owned) == 0 {
		p.endPass() // a standby: leases.changed wakes it
		return
	}
	if len(p.pass.after) == 0 {
		p.startPass(owned)
	}
	after := make(map[int]uint64, len(p.pass.after))
	for s, id := range p.pass.after {
		if _, ok := owned[s]; ok {
			after[s] = id
		}
	}
	if len(after) == 0 {
		p.endPass()
		return
	}
	pg := page{after: after, last: p.pass.last, limit: max(1, p.pages/len(after)), check: p.pass.check}
	p.pass.check = map[int]uint64{}
	p.reading = true
	p.wg.Go(func() {
		began := time.Now()
		f, err := pg.read(ctx, p.db)
		p.reads <- readDone{page: pg, found: f, took: time.Since(began), epochs: owned, err: err}
	})
}

func (p *pump) startPass(owned map[int]uint64) {
	p.pass.began, p.pass.head, p.pass.check = map[int]uint64{}, map[int]int{}, map[int]uint64{}
	for s, epoch := range owned {
		after, head := p.begin(s, epoch)
		p.pass.began[s] = after
		if head {
			p.pass.head[s] = 0
		}
		if after > 0 {
			p.pass.check[s] = after
		}
	}
	p.pass.after, p.pass.last, p.pass.left = maps.Clone(p.pass.began), math.MaxUint64, map[int]*behind{}
	p.pass.found, p.pass.took = false, 0
}

// roomLeft is how many more rows may be known. What waits for a held destination, and behind
// that for its key's turn, is bounded by itself and does not count.
func (p *pump) roomLeft() int {
	n := 4*p.cfg.Window - p.load
	for _, h := range p.dests {
		n += h.waiting
	}
	return n
}

func (p *pump) admit(done readDone) {
	p.reading = false
	p.readTrouble.report(p.cfg.Log, "outbox not read; trying again", done.err)
	if done.err != nil {
		p.pass = pass{next: time.Now().Add(p.cfg.PollMax), wait: p.cfg.PollMax}
		p.forgetRetired()
		return
	}
	if len(done.rows) > 0 {
		crash.Point("relay.read")
	}
	p.pass.took += done.took
	doubtful := p.doubt(done.sums)
	got := map[int]int{}
	for _, r := range done.rows {
		if doubtful[r.shard] {
			continue
		}
		got[r.shard]++
		r.epoch = done.epochs[r.shard]
		p.pass.after[r.shard] = r.id
		p.enqueue(r)
	}
	if len(done.rows) > 0 {
		p.pass.last = min(p.pass.last, done.highest)
	}
	for s := range p.pass.after {
		_, read := done.after[s]
		_, head := p.pass.head[s]
		switch {
		case doubtful[s]:
			p.pass.found = true // it is read again soon
			delete(p.pass.after, s)
		case !read: // it was not ours
			delete(p.pass.after, s)
		case !done.cut && got[s] < done.limit: // there are no more
			p.leaveBehind(s)
			delete(p.pass.after, s)
		case head:
			p.jump(s)
		}
	}
	if done.cut {
		p.pages = max(message.Shards, p.pages/4)
	} else {
		p.pages = min(p.cfg.Page, 2*p.pages)
	}
	p.forgetRetired()
	if len(p.pass.after) == 0 {
		p.endPass()
	}
}

func (p *pump) endPass() {
	wait := p.cfg.PollMin
	if !p.pass.found {
		wait = min(p.cfg.PollMax, max(p.cfg.PollMin, 2*p.pass.wait))
	}
	p.pass = pass{wait: wait, next: time.Now().Add(wait/2 + jitter(wait/2))}
	p.forgetHolds()
}
