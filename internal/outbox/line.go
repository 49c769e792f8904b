package outbox

import "slices"

// line is the rows of one ordering key, in id order. At most one of them is in flight.
type line struct {
	key     string
	waiting []*row
	place   place
}

// place is where a line is.
type place int

const (
	nowhere place = iota // on its way to one of the others
	ready                // its first row can be published
	held                 // its first row waits for its destination
	trying               // its first row tries out its destination, or is to
	busy                 // a row of it is in flight, or its park is being written
)

// stuck reports whether it is for its destination to say when the line goes on. Then it takes
// no rows.
func (ln *line) stuck() bool { return ln.place == held || ln.place == trying }

// hasRoom reports whether it is worth while to read rows of the key that were left out.
func (ln *line) hasRoom(p *pump) bool {
	now := p.keys[ln.key] // ln may have been dropped
	return now == nil || !now.stuck() && len(now.waiting) < p.cfg.bound/2
}

// enqueue puts a row into its key's line, unless there is no room for it; then later rows of
// its key are left out too. It reports false if the pass must not go on.
func (p *pump) enqueue(w *walk, r *row) bool {
	if w.current != nil {
		w.current.sum = w.current.sum.minus(sumOf(r.id))
	}
	ln, h, b := p.keys[r.key], p.dests[r.dest], w.leftOut(r.key)
	switch {
	case b != nil:
		return p.leaveOut(w, r, b)
	case ln != nil && (ln.stuck() || len(ln.waiting) >= p.cfg.bound):
		return p.leaveOut(w, r, ln)
	case ln == nil && h != nil && h.held && len(h.lines) >= p.cfg.bound:
		return p.leaveOut(w, r, h)
	}
	if ln == nil {
		ln = &line{key: r.key}
		p.keys[r.key] = ln
	}
	if h == nil {
		h = &hold{dest: r.dest}
		p.dests[r.dest] = h
	}
	p.known[r.id] = r
	p.load += r.load()
	ln.waiting = append(ln.waiting, r)
	h.rows++
	if ln.place == nowhere {
		p.offer(ln)
	}
	return true
}

// offer puts a line where its first row can be published from. One without rows is dropped.
func (p *pump) offer(ln *line) {
	ln.place = nowhere
	if len(ln.waiting) == 0 {
		delete(p.keys, ln.key)
		return
	}
	switch h := p.dests[ln.waiting[0].dest]; {
	case !h.held:
		ln.place = ready
		p.ready = append(p.ready, ln)
	case p.due(h, ln.waiting[0]):
		p.try(ln)
	default:
		h.waitFor(ln)
	}
}

// try lets the first row of a line try out a destination that has refused.
func (p *pump) try(ln *line) {
	ln.place = trying
	p.tries = append(p.tries, ln)
}

// again puts a row back to the head of its line.
func (p *pump) again(ln *line, r *row) {
	ln.waiting = slices.Insert(ln.waiting, 0, r)
	p.offer(ln)
}

// abandon drops a line whose shard has changed hands since it was read. If it is ours, its
// rows are read anew, but not by this pass: that is past some of them.
func (p *pump) abandon(ln *line) {
	for _, r := range ln.waiting {
		if w := p.walks[r.shard]; w != nil {
			w.on = false
		}
		if h := p.dests[r.dest]; h.probe == ln {
			h.probe = nil
		}
		p.uncount(r)
		p.forget(r)
	}
	ln.waiting = nil
	p.offer(ln)
}

// forget drops a row from what is known: a read may bring it again.
func (p *pump) forget(r *row) {
	p.load -= r.load()
	delete(p.known, r.id)
}

// load is what the rows of a line count in memory.
func (ln *line) load() (n int) {
	for _, r := range ln.waiting {
		n += r.load()
	}
	return n
}
