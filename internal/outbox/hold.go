package outbox

import (
	"time"

	"backstep/internal/message"
)

// hold is a destination and what is known of it. One that has refused a row is held: its rows
// wait, and one probe at a time finds out whether it takes messages again.
type hold struct {
	dest    destination
	rows    int // known rows that go there
	held    bool
	wait    time.Duration // from the last refusal to the next probe
	until   time.Time     // no probe before
	probe   *line         // that is trying
	lines   []*line       // that wait
	waiting int           // load of their rows

	returned   time.Time     // the last time it returned a row
	unroutable time.Duration // for how long it has done nothing else
}

// forgetHold is how long a destination that refused its last row, and to which no other goes,
// is remembered.
const forgetHold = time.Minute

// refuse holds h, or goes on holding it. Rows that were in flight together meet a full queue
// together, so only the first of them, and then the probe, makes the wait longer.
func (p *pump) refuse(h *hold, res message.Result, probed bool) {
	now := time.Now()
	switch {
	case res.Kind == message.Nacked: // there is a queue
		h.returned, h.unroutable = time.Time{}, 0
	case h.returned.IsZero():
		h.returned = now
	default:
		// More than the wait has passed if the broker, or we, were away. That does not count.
		h.unroutable += min(now.Sub(h.returned), h.wait)
		h.returned = now
	}
	if h.held && !probed {
		return
	}
	if !h.held {
		p.cfg.Log.Warn("destination held", "exchange", h.dest.exchange, "routing_key", h.dest.routingKey,
			"result", res.Kind.String(), "reason", res.Reason)
	}
	h.held = true
	h.wait = min(holdMax, max(holdMin, 2*h.wait))
	h.until = now.Add(h.wait/2 + jitter(h.wait/2))
}

// due reports that r has been tried for long enough: at the next return it is parked. It is
// tried once more without waiting for others.
func (p *pump) due(h *hold, r *row) bool {
	return h.unroutable >= p.cfg.ParkAfter && p.ages.atLeast(p.cfg.ParkAfter, r.id)
}

// hasRoom reports whether it is worth while to read rows of the destination that were left out.
func (h *hold) hasRoom(p *pump) bool {
	now := p.dests[h.dest] // h may have been dropped
	return now == nil || !now.held || len(now.lines) < p.cfg.bound/2
}

// waitFor puts a line among those that wait for h.
func (h *hold) waitFor(ln *line) {
	ln.place = held
	h.lines = append(h.lines, ln)
	h.waiting += ln.load()
}

// probeHolds lets one row of each held destination try again when its wait is over.
func (p *pump) probeHolds() {
	now := time.Now()
	for _, h := range p.dests {
		if !h.held || h.probe != nil || len(h.lines) == 0 || now.Before(h.until) {
			continue
		}
		h.probe, h.lines = h.lines[0], h.lines[1:]
		h.waiting -= h.probe.load()
		p.try(h.probe)
	}
}

// free ends a hold.
func (p *pump) free(h *hold) {
	if !h.held {
		return
	}
	h.held, h.wait, h.probe = false, 0, nil
	p.poll.next = time.Time{} // rows may have been left out because of it
	h.returned, h.unroutable = time.Time{}, 0
	p.lift(h)
}

// lift lets the lines go on that have not to wait for h, or not any more.
func (p *pump) lift(h *hold) {
	kept := h.lines[:0]
	for _, ln := range h.lines {
		if h.held && !p.due(h, ln.waiting[0]) {
			kept = append(kept, ln)
			continue
		}
		h.waiting -= ln.load()
		p.offer(ln)
	}
	clear(h.lines[len(kept):])
	h.lines = kept
}

// uncount notes that a row is not on its way to its destination any more.
func (p *pump) uncount(r *row) {
	h := p.dests[r.dest]
	h.rows--
	if h.rows == 0 && !h.held {
		delete(p.dests, r.dest)
	}
}

// forgetHolds drops destinations nothing has gone to for a while.
func (p *pump) forgetHolds() {
	for d, h := range p.dests {
		if h.rows == 0 && time.Since(h.until) > forgetHold {
			delete(p.dests, d)
		}
	}
}
