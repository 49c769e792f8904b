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
	ready                // its first row can be published, or is to try out its destination
	held                 // its first row waits for its destination
	busy                 // a row of it is in flight, or its park is being written
)

// enqueue puts a row into its key's line, unless it is known already or there is no room
// for it; then later rows of its key are left out too, for this pass.
func (p *pump) enqueue(r *row) {
	if _, ok := p.known[r.id]; ok || p.pass.skipped[r.key] {
		return
	}
	ln, h := p.keys[r.key], p.dests[r.dest]
	switch {
	case ln != nil && (ln.place == held || len(ln.waiting) >= keyBound),
		ln == nil && h != nil && h.held && len(h.lines) >= destinationBound:
		p.pass.skipped[r.key] = true
		return
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
	p.pass.found = true
	ln.waiting = append(ln.waiting, r)
	h.rows++
	if ln.place == nowhere {
		p.offer(ln)
	}
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
	ln.place = ready
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
	if len(ln.waiting) > 0 && p.pass.skipped != nil {
		p.pass.skipped[ln.key] = true
	}
	for _, r := range ln.waiting {
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
