package outbox

import (
	"context"
	"time"

	"backstep/internal/message"
)

func (p *pump) connect(ctx context.Context) {
	if p.channel != nil || p.acquiring || len(p.ready) == 0 {
		return
	}
	p.acquiring = true
	p.wg.Go(func() {
		for try := 1; ; try++ {
			ch, err := p.pub.Acquire(ctx)
			if err == nil {
				select {
				case p.acquired <- ch:
				case <-ctx.Done():
					ch.Destroy()
				}
				return
			}
			if ctx.Err() != nil {
				return
			}
			pause(ctx, jitter(min(holdMax, holdMin<<min(try, 6))))
		}
	})
}

// checkChannel destroys a channel that is broken or whose confirms do not come, and
// releases one that has long been idle.
func (p *pump) checkChannel() {
	if p.channel == nil {
		return
	}
	if len(p.inFlight) > 0 {
		p.idleSince = time.Now()
	}
	switch {
	case p.broken && len(p.inFlight) == 0:
		p.dropChannel()
	case len(p.inFlight) == 0 && time.Since(p.idleSince) > 5*time.Second:
		p.channel.Release()
		p.channel = nil
	case len(p.inFlight) > 0 && time.Now().After(p.nextCheck) && p.pub.Ready() && p.oldest() > p.cfg.ConfirmTimeout:
		p.cfg.Log.Warn("confirms did not come; publishing again", "rows", len(p.inFlight), "timeout", p.cfg.ConfirmTimeout)
		p.dropChannel()
	}
}

func (p *pump) oldest() time.Duration {
	p.nextCheck = time.Now().Add(time.Second) // it looks at every row
	var age time.Duration
	for _, r := range p.inFlight {
		age = max(age, time.Since(r.sent))
	}
	return age
}

// dropChannel destroys the channel. The outcome of what is in flight is unknown; it is
// published again, which the inbox makes harmless.
func (p *pump) dropChannel() {
	if p.channel == nil {
		return
	}
	p.channel.Destroy()
	p.channel, p.broken = nil, false
	for tag := range p.inFlight {
		p.settle(message.Result{Tag: tag, Kind: message.Lost})
	}
}
