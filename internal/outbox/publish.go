package outbox

import (
	"context"
	"errors"
	"slices"
	"time"

	"backstep/internal/crash"
	"backstep/internal/message"
	"backstep/internal/tracing"
)

// publish sends what is ready, as far as the window allows. What tries out a destination that
// has refused goes through a pipe of its own: if its exchange is missing the broker closes
// the channel over it, and that must not take its neighbours down each time.
func (p *pump) publish(ctx context.Context) {
	p.probeHolds()
	if p.solo > 0 {
		p.suspectsFirst()
	}
	p.sendAll(ctx, p.side, &p.tries)
	p.sendAll(ctx, p.main, &p.ready)
}

// window returns how many rows may be in flight in all.
func (p *pump) window() int {
	if p.solo > 0 {
		return 1
	}
	return p.cfg.Window
}

// sendAll sends the first row of each line, as long as there is room. Lines that it finds
// another place for may come to the end of lines again.
func (p *pump) sendAll(ctx context.Context, pi *pipe, lines *[]*line) {
	began, owned := time.Now(), p.leases.owned()
	n := 0
	for _, ln := range *lines {
		r := ln.waiting[0]
		if pi.channel == nil || pi.broken || p.flying() >= p.window() || !pi.fits(r) {
			break
		}
		if !p.pub.Ready() || time.Since(began) > p.leases.margin()/2 {
			break // blocked by an alarm, or a write had to wait: then look at the leases again
		}
		n++
		h := p.dests[r.dest]
		switch {
		case owned[r.shard] != r.epoch: // 0 is no lease's
			p.abandon(ln)
		case h.held && h.probe != ln && !p.due(h, r):
			p.offer(ln) // held since it was offered
		default:
			p.send(ctx, pi, ln, r)
		}
	}
	*lines = slices.Delete(*lines, 0, n)
}

// suspectsFirst moves the lines whose first row may have made the broker close on us to the
// front, so that window 1 lasts no longer than it takes to find the one.
func (p *pump) suspectsFirst() {
	if len(p.suspects) == 0 {
		return
	}
	suspect := make(map[*line]bool, len(p.suspects))
	for _, ln := range p.suspects {
		suspect[ln] = true
	}
	slices.SortStableFunc(p.ready, func(a, b *line) int {
		switch {
		case suspect[a] == suspect[b]:
			return 0
		case suspect[a]:
			return -1
		}
		return 1
	})
	p.suspects = nil
}

func (p *pump) send(ctx context.Context, pi *pipe, ln *line, r *row) {
	if ln.place == ready {
		ln.place = busy
	}
	ln.waiting = ln.waiting[1:]
	p.nextTag++
	// An older channel may be closed over a row that is in flight no more, with its connection.
	r.sent, r.alone = time.Now(), p.solo > 0 && pi.asked.After(p.aborted)
	pi.launch(p.nextTag, r)
	if r.fault != "" {
		p.settle(pi, message.Result{Tag: p.nextTag, Kind: message.Refused, Reason: r.fault})
		return
	}
	r.span = tracing.Publish(ctx, &r.msg)
	err := pi.channel.Publish(ctx, p.nextTag, &r.msg)
	switch {
	case err == nil:
		crash.Point("relay.published")
	case errors.Is(err, ErrRefused):
		p.settle(pi, message.Result{Tag: p.nextTag, Kind: message.Refused, Reason: err.Error()})
	default:
		p.settle(pi, message.Result{Tag: p.nextTag, Kind: message.Lost, Reason: err.Error()})
	}
}
