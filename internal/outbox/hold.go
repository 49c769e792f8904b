package outbox

import (
	"time"
)

// hold is a destination that has refused a row. One probe at a time finds out whether it
// takes messages again.
type hold struct {
	dest  destination
	since time.Time // of the first refusal in a row; zero: not held
	until time.Time
	wait  time.Duration
	probe *line   // that is trying
	lines []*line // that wait for it
	rows  int     // known rows waiting for it
}

func (h *hold) held() bool { return !h.since.IsZero() }

// overdue reports that an unroutable destination has been tried long enough: its rows are
// tried once each and parked, without waiting for each other.
func (p *pump) overdue(h *hold) bool { return h.held() && time.Since(h.since) >= p.cfg.ParkAfter }

func (p *pump) uncount(r *row) {
	h := p.dests[r.dest]
	h.rows--
	if h.rows <= 0 && !h.held() {
		delete(p.dests, r.dest)
	}
}

// probe lets one row of each held destination try again when its wait is over.
func (p *pump) probe() {
	now := time.Now()
	for _, h := range p.dests {
		if !h.held() || h.probe != nil || len(h.lines) == 0 || now.Before(h.until) {
			continue
		}
		if p.overdue(h) {
			p.lift(h)
			continue
		}
		h.probe = h.lines[0]
		p.ready = append(p.ready, h.probe) // still queued
		h.lines = h.lines[1:]
	}
}

func (p *pump) lift(h *hold) {
	p.ready = append(p.ready, h.lines...) // still queued
	h.lines = nil
}
