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

func (p *pump) publish(ctx context.Context) {
	p.probeHolds()
	if p.channel == nil || p.broken || !p.pub.Ready() {
		return
	}
	window := p.cfg.Window
	if p.solo > 0 {
		window = 1
		p.suspectsFirst()
	}
	owned := p.leases.owned()
	n := 0
	for _, ln := range p.ready {
		if len(p.inFlight) >= window || p.broken {
			break
		}
		n++
		r := ln.waiting[0]
		if owned[r.shard] != r.epoch { // 0 is no lease's
			p.abandon(ln)
			continue
		}
		if h := p.dests[r.dest]; h.held && h.probe != ln && !p.due(h, r) {
			p.offer(ln) // held since it was offered
			continue
		}
		p.send(ctx, ln, r)
	}
	p.ready = append(p.ready[:0], p.ready[n:]...)
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

func (p *pump) send(ctx context.Context, ln *line, r *row) {
	ln.place = busy
	ln.waiting = ln.waiting[1:]
	p.nextTag++
	r.sent, r.alone = time.Now(), p.solo > 0
	p.inFlight[p.nextTag] = r
	if r.fault != "" {
		p.settle(message.Result{Tag: p.nextTag, Kind: message.Refused, Reason: r.fault})
		return
	}
	span := tracing.Publish(ctx, &r.msg)
	err := p.channel.Publish(ctx, p.nextTag, &r.msg)
	tracing.End(span, err)
	switch {
	case err == nil:
		crash.Point("relay.published")
	case errors.Is(err, ErrRefused):
		p.settle(message.Result{Tag: p.nextTag, Kind: message.Refused, Reason: err.Error()})
	default:
		p.broken = true
		p.settle(message.Result{Tag: p.nextTag, Kind: message.Lost, Reason: err.Error()})
	}
}
