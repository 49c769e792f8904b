package outbox

// line is the rows of one ordering key, in id order. At most one of them is in flight.
type line struct {
	key     string
	waiting []*row
	busy    bool // one is in flight, or its park is being written
	queued  bool // in ready, or in its destination's line
}

// enqueue puts a row into its key's line, unless it is known already or there is no room
// for it; then later rows of its key are left out too, for this pass.
func (p *pump) enqueue(r *row) {
	if _, ok := p.known[r.id]; ok || p.pass.skipped[r.key] {
		return
	}
	ln := p.keys[r.key]
	if ln == nil {
		ln = &line{key: r.key}
	}
	h := p.dests[r.dest]
	if h == nil {
		h = &hold{dest: r.dest}
	}
	if len(ln.waiting) >= keyBound || h.held() && h.rows >= destinationBound {
		p.pass.skipped[r.key] = true
		return
	}
	p.keys[r.key], p.dests[r.dest] = ln, h
	p.known[r.id] = r
	p.pass.found = true
	ln.waiting = append(ln.waiting, r)
	h.rows++
	p.offer(ln)
}

// offer puts a line where its first row can be published from.
func (p *pump) offer(ln *line) {
	if ln.busy || ln.queued || len(ln.waiting) == 0 {
		if !ln.busy && !ln.queued {
			delete(p.keys, ln.key)
		}
		return
	}
	ln.queued = true
	if h := p.dests[ln.waiting[0].dest]; h.held() && !p.overdue(h) {
		h.lines = append(h.lines, ln)
		return
	}
	p.ready = append(p.ready, ln)
}

// abandon drops a line whose shard is another relay's by now.
func (p *pump) abandon(ln *line) {
	for _, r := range ln.waiting {
		if h := p.dests[r.dest]; h.probe == ln {
			h.probe = nil
		}
		p.uncount(r)
		delete(p.known, r.id)
	}
	ln.waiting = nil
	p.offer(ln)
}
