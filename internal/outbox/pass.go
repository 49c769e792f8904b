package outbox

import (
	"context"
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
	after   map[int]uint64  // shard → last id read; a shard leaves when it has no more
	last    uint64          // no row beyond it
	skipped map[string]bool // keys of which a row was left out; later ones must not overtake it
	found   bool            // it brought something new
	next    time.Time
	wait    time.Duration
}

type readDone struct {
	page
	found
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
		p.pass.after = make(map[int]uint64, len(owned))
		for s := range owned {
			p.pass.after[s] = 0
		}
		p.pass.last, p.pass.skipped, p.pass.found = math.MaxUint64, map[string]bool{}, false
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
	pg := page{after: after, last: p.pass.last, limit: max(1, p.pages/len(after))}
	p.reading = true
	p.wg.Go(func() {
		f, err := pg.read(ctx, p.db)
		p.reads <- readDone{page: pg, found: f, epochs: owned, err: err}
	})
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
	got := map[int]int{}
	for _, r := range done.rows {
		got[r.shard]++
		r.epoch = done.epochs[r.shard]
		p.pass.after[r.shard] = r.id
		p.enqueue(r)
	}
	for s := range p.pass.after {
		// Either there are no more, or the shard was not ours to be read.
		if !done.cut && got[s] < done.limit {
			delete(p.pass.after, s)
		}
	}
	p.pass.last = min(p.pass.last, done.highest)
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
