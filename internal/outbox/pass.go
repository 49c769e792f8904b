package outbox

import (
	"context"
	"maps"
	"slices"
	"time"

	"backstep/internal/crash"
	"backstep/internal/message"
)

// readDone is what a read has brought.
type readDone struct {
	page
	found
	polled bool           // passes began with it
	epochs map[int]uint64 // of the leases when it began
	err    error
}

// read starts the next read, if one is due and there is room for what it may bring. Shards
// that are at the end of their pass begin the next when it is time, and do not wait for those
// that are not. Shards that were rung for do not wait at all.
func (p *pump) read(ctx context.Context) {
	due := !time.Now().Before(p.poll.next)
	if p.reading || !due && p.bell == 0 && !p.walking() || !p.pub.Ready() || p.roomLeft() <= 0 {
		return
	}
	owned := p.leases.owned()
	p.bell &= mask(owned)
	for s := range owned {
		if p.walks[s] == nil {
			p.walks[s] = &walk{}
		}
	}
	on := map[int]*walk{}
	for s, w := range p.walks {
		if _, ok := owned[s]; !ok {
			delete(p.walks, s)
			continue
		}
		if w.haul != nil {
			continue
		}
		if !w.on && (due || p.bell>>s&1 == 1) {
			p.begin(w)
			p.bell &^= 1 << s
		}
		if w.on {
			on[s] = w
		}
	}
	if due {
		p.poll.next = time.Now().Add(p.cfg.PollMax) // until the read is in
		p.forgetHolds()
	}
	if len(on) == 0 {
		if due { // a standby, which leases.changed wakes, or all wait for their checks
			p.rest(false)
		}
		return
	}
	var pg page
	moving := p.moving()
	for _, s := range slices.Sorted(maps.Keys(on)) {
		sp := p.span(on[s], s, max(1, p.pages/len(on)))
		sp.skip = moving[s]
		pg = append(pg, sp)
	}
	p.reading = true
	p.wg.Go(func() {
		f, err := pg.read(ctx, p.db)
		p.reads <- readDone{page: pg, found: f, polled: due, epochs: owned, err: err}
	})
}

// moving returns the known rows of each shard that a read need not bring again. Those of lines
// that are stuck it must: take is told by them where the next passes may jump.
func (p *pump) moving() map[int][]uint64 {
	ids := make(map[int][]uint64, len(p.walks))
	for id, r := range p.known {
		if ln := p.keys[r.key]; ln == nil || !ln.stuck() {
			ids[r.shard] = append(ids[r.shard], id)
		}
	}
	return ids
}

// mask returns one bit for each shard owned.
func mask(owned map[int]uint64) (m uint16) {
	for s := range owned {
		m |= 1 << s
	}
	return m
}

// walking reports whether a shard is in the middle of its pass.
func (p *pump) walking() bool {
	for _, w := range p.walks {
		if w.on && w.haul == nil {
			return true
		}
	}
	return false
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
		for _, sp := range done.page {
			p.walks[sp.shard].on = false
		}
		p.poll = poll{next: time.Now().Add(p.cfg.PollMax), wait: p.cfg.PollMax}
		p.forgetRetired()
		return
	}
	if done.highest != unknown {
		p.ages.note(done.highest, p.cfg.ParkAfter)
	}
	if len(done.rows) > 0 {
		crash.Point("relay.read")
	}
	found, due := false, p.unchecked(done)
	for _, sp := range done.page {
		h := p.haul(sp, done)
		switch w := p.walks[sp.shard]; {
		case !w.on: // a line of it was abandoned: it is read anew
		case w.sure || len(w.stretches()) == 0 || len(h.rows) == 0 && w != due:
			found = p.take(w, h) || found
		default:
			w.haul = &h
		}
	}
	if done.cut {
		p.pages = max(message.Shards, p.pages/4)
	} else {
		p.pages = min(p.cfg.Page, 2*p.pages)
	}
	if done.polled && !p.poll.next.IsZero() { // no shard was gained, and no hold ended, meanwhile
		p.rest(found)
	}
	p.forgetRetired()
}

// haul returns what a read has brought of a shard, without the rows that are known. These may
// be forgotten when it returns.
func (p *pump) haul(sp span, done readDone) haul {
	if w := p.walks[sp.shard]; sp.first {
		w.last = done.highest
	}
	rows := done.rows[sp.shard]
	p.tally.rows.Add(int64(len(rows)))
	h := haul{after: sp.after, more: done.cut || len(rows) == sp.limit, blockers: map[*hold]bool{}}
	for _, r := range rows {
		h.after = r.id
		known := p.known[r.id]
		if known == nil {
			r.epoch = done.epochs[sp.shard]
			h.rows = append(h.rows, r)
			continue
		}
		if ln, d := p.keys[r.key], p.dests[known.dest]; ln != nil && ln.stuck() && d != nil {
			h.waiting++
			h.blockers[d] = true
		}
	}
	return h
}

// take takes in what was read, and goes on behind it. It reports whether there was room for
// any of it.
func (p *pump) take(w *walk, h haul) bool {
	before := len(p.known)
	for _, r := range h.rows {
		if w.on = p.enqueue(w, r); !w.on {
			break
		}
	}
	if w.on {
		// A few held rows are sooner read than a stretch is checked. One that is there grows for nothing.
		if w.current == nil && (h.waiting >= p.cfg.bound || h.waiting > 0 && len(w.behind) > 0) {
			p.cover(w, h)
		}
		w.after = h.after
		p.goOn(w, h.more)
	}
	return len(p.known) > before
}

// poll is when passes begin.
type poll struct {
	next time.Time
	wait time.Duration
}

// by has passes begin at t at the latest.
func (po *poll) by(t time.Time) {
	if t.Before(po.next) {
		po.next = t
	}
}

// rest waits until passes begin again: not for long if the last ones brought something new.
func (p *pump) rest(found bool) {
	wait := p.cfg.PollMin
	if !found {
		wait = min(p.cfg.PollMax, max(p.cfg.PollMin, 2*p.poll.wait))
	}
	next := wait/2 + jitter(wait/2)
	if wait == p.cfg.PollMax {
		next = p.cfg.idle.next()
	}
	p.poll = poll{wait: wait, next: time.Now().Add(next)}
}
