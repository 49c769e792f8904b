package outbox

import (
	"time"

	"backstep/internal/crash"
	"backstep/internal/message"
	"backstep/internal/tracing"
)

// settle takes what became of a publish on pi.
func (p *pump) settle(pi *pipe, res message.Result) {
	r, ok := pi.inFlight[res.Tag]
	if !ok {
		return // settled before, by a channel we gave up
	}
	pi.land(res.Tag)
	if r.span != nil { // a row that does not decode is not sent
		tracing.EndPublish(r.span, res)
		r.span = nil
	}
	ln, h := p.keys[r.key], p.dests[r.dest]
	probed := h.probe == ln
	if probed {
		h.probe = nil
	}
	if res.Kind == message.Lost || res.Kind == message.Aborted {
		p.breakOff(pi, res)
	}
	if res.Kind == message.Aborted && r.alone {
		// Twice the broker closed on us, and the second time only this row was in flight.
		res.Kind = message.Refused
	}
	if p.solo > 0 && res.Kind != message.Lost && res.Kind != message.Aborted {
		p.solo--
	}
	switch res.Kind {
	case message.Confirmed:
		crash.Point("relay.confirmed")
		p.free(h)
		p.uncount(r)
		r.msg = message.Message{} // it may be large, and is not needed any more
		p.todo.confirm(r)
		p.offer(ln)
	case message.Nacked:
		p.refuse(h, res, probed)
		p.again(ln, r)
	case message.Returned:
		p.refuse(h, res, probed)
		if p.due(h, r) {
			p.todo.parks = append(p.todo.parks, refusal{row: r, reason: res.Reason})
		} else {
			p.todo.refuse(r, res.Reason, max(0, time.Until(h.until)))
			p.again(ln, r)
		}
		p.lift(h)
	case message.Refused:
		// The line stays busy: its key goes on only when the park is committed.
		p.todo.parks = append(p.todo.parks, refusal{row: r, reason: res.Reason})
	case message.Aborted:
		p.aborted = time.Now()
		p.solo++
		p.suspects = append(p.suspects, ln)
		p.again(ln, r)
	case message.Lost:
		p.again(ln, r) // nothing was decided about it, and no attempt is spent
	}
}

// breakOff notes that pi's channel has gone.
func (p *pump) breakOff(pi *pipe, res message.Result) {
	if pi.channel == nil || pi.broken {
		return
	}
	pi.broken = true
	p.cfg.Log.Warn("confirm channel lost; publishing again", "result", res.Kind.String(), "reason", res.Reason)
}
