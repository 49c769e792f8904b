package outbox

import (
	"time"

	"backstep/internal/crash"
	"backstep/internal/message"
)

func (p *pump) settle(res message.Result) {
	r, ok := p.inFlight[res.Tag]
	if !ok {
		return // settled before, by a channel we gave up
	}
	delete(p.inFlight, res.Tag)
	ln, h := p.keys[r.key], p.dests[r.dest]
	if res.Kind == message.Aborted && r.alone {
		// Twice the broker closed on us, and the second time only this row was in flight.
		res.Kind = message.Refused
		p.broken = p.channel != nil
	}
	if p.solo > 0 && res.Kind != message.Lost && res.Kind != message.Aborted {
		p.solo--
	}
	switch res.Kind {
	case message.Confirmed:
		crash.Point("relay.confirmed")
		if h.held() {
			h.since, h.probe, h.wait = time.Time{}, nil, 0
			p.lift(h)
		}
		p.uncount(r)
		p.confirmed = append(p.confirmed, r)
		ln.busy = false
		p.offer(ln)
	case message.Nacked, message.Returned:
		p.refused(res, r, ln, h)
	case message.Refused:
		p.park(r, res.Reason)
	case message.Lost, message.Aborted:
		if p.channel != nil {
			p.broken = true
		}
		if res.Kind == message.Aborted {
			p.solo++
			p.suspects = append(p.suspects, ln)
		}
		p.again(r, ln, h)
	}
}

// refused holds the destination and puts the row back at the head of its line. A return is
// charged to the row; a nack (a full queue) is not, and never parks anything.
func (p *pump) refused(res message.Result, r *row, ln *line, h *hold) {
	now := time.Now()
	if !h.held() {
		h.since = now
		p.cfg.Log.Warn("destination held", "exchange", h.dest.exchange, "routing_key", h.dest.routingKey,
			"result", res.Kind.String(), "reason", res.Reason)
	}
	if res.Kind == message.Returned && p.overdue(h) {
		h.probe = nil
		p.park(r, res.Reason)
		return
	}
	h.wait = min(holdMax, max(holdMin, 2*h.wait))
	wait := h.wait/2 + jitter(h.wait/2)
	h.until, h.probe = now.Add(wait), nil
	if res.Kind == message.Returned {
		if epoch, ours := p.leases.owned()[r.shard]; ours {
			p.refusals = append(p.refusals, refusal{row: r, epoch: epoch, reason: res.Reason, wait: wait})
		}
	}
	ln.busy = false
	ln.waiting = append([]*row{r}, ln.waiting...)
	p.offer(ln)
}

// again publishes r once more: nothing was decided about it, and no attempt is spent.
func (p *pump) again(r *row, ln *line, h *hold) {
	if h.held() {
		h.since = time.Now() // time in which the broker is away does not count (P5)
		h.probe = nil
	}
	ln.busy = false
	ln.waiting = append([]*row{r}, ln.waiting...)
	p.offer(ln)
}

// park writes r off with a reason. Its key goes on only when that is committed.
func (p *pump) park(r *row, reason string) {
	epoch, ours := p.leases.owned()[r.shard]
	if !ours {
		p.uncount(r)
		delete(p.known, r.id)
		ln := p.keys[r.key]
		ln.busy = false
		p.abandon(ln)
		return
	}
	p.refusals = append(p.refusals, refusal{row: r, epoch: epoch, reason: reason, park: true})
}
