package outbox

import (
	"context"
	"time"

	"backstep/internal/message"
)

// pipe is a confirm channel, for as long as there is need of one, and what is in flight on it.
type pipe struct {
	channel   Channel
	broken    bool // no more publishes; it goes when its results are in
	acquiring bool
	acquired  chan acquired
	asked     time.Time // when the channel was asked for: its connection was alive then, or is younger
	idleSince time.Time

	inFlight map[uint64]*row // by publish tag
	bytes    int             // of what is in flight
	looked   time.Time       // at how long it has been in flight
}

type acquired struct {
	Channel
	asked time.Time
}

func newPipe() *pipe { return &pipe{acquired: make(chan acquired), inFlight: map[uint64]*row{}} }

const (
	// maxFlyingBytes bounds what is in flight in bytes: about what sockets take from us when
	// the broker has stopped reading, so that Publish does not have to wait.
	maxFlyingBytes = 1 << 20

	idleTimeout = 5 * time.Second // until a channel without work is handed back
	lookEvery   = time.Second     // at each row in flight
)

// results is nil, and never ready, without a channel.
func (pi *pipe) results() <-chan message.Result {
	if pi.channel == nil {
		return nil
	}
	return pi.channel.Results()
}

func (pi *pipe) launch(tag uint64, r *row) {
	pi.inFlight[tag] = r
	pi.bytes += r.size
}

func (pi *pipe) land(tag uint64) {
	pi.bytes -= pi.inFlight[tag].size
	delete(pi.inFlight, tag)
	pi.idleSince = time.Now()
}

// fits reports whether one more row may be in flight.
func (pi *pipe) fits(r *row) bool {
	return len(pi.inFlight) == 0 || pi.bytes+r.size <= maxFlyingBytes
}

// connect acquires a channel for pi if lines wait for one.
func (p *pump) connect(ctx context.Context, pi *pipe, lines []*line) {
	if pi.channel != nil || pi.acquiring || len(lines) == 0 {
		return
	}
	pi.acquiring = true
	p.wg.Go(func() {
		for try := 1; ; try++ {
			asked := time.Now()
			ch, err := p.pub.Acquire(ctx)
			if err == nil {
				select {
				case pi.acquired <- acquired{ch, asked}:
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

// open takes a channel that was acquired.
func (pi *pipe) open(ch acquired) {
	pi.acquiring = false
	pi.channel, pi.asked, pi.broken, pi.idleSince = ch.Channel, ch.asked, false, time.Now()
}

// check destroys a channel that is broken or whose confirms do not come, and releases one
// that has long been idle.
func (p *pump) check(pi *pipe) {
	switch {
	case pi.channel == nil:
	case pi.broken && len(pi.inFlight) == 0:
		p.drop(pi)
	case len(pi.inFlight) == 0 && time.Since(pi.idleSince) > idleTimeout:
		pi.channel.Release()
		pi.channel = nil
	case len(pi.inFlight) > 0 && time.Now().After(pi.nextLook(p.cfg.ConfirmTimeout)) && p.pub.Ready():
		pi.looked = time.Now()
		p.checkConfirms(pi)
	}
}

func (pi *pipe) nextLook(timeout time.Duration) time.Time {
	return pi.looked.Add(min(lookEvery, timeout))
}

// checkConfirms gives up waiting for confirms that do not come. A queue that cannot confirm,
// its majority lost, must not take the window from all others each time: its destination is
// held, as that of a full one is.
func (p *pump) checkConfirms(pi *pipe) {
	late := 0
	for tag, r := range pi.inFlight {
		if time.Since(r.sent) > p.cfg.ConfirmTimeout {
			late++
			p.settle(pi, message.Result{Tag: tag, Kind: message.Nacked, Reason: "no confirm within " + p.cfg.ConfirmTimeout.String()})
		}
	}
	if late > 0 {
		p.cfg.Log.Warn("confirms did not come; publishing again", "rows", late, "timeout", p.cfg.ConfirmTimeout)
		p.drop(pi)
	}
}

// drop destroys the channel. The outcome of what is in flight is unknown; it is published
// again, which the inbox makes harmless.
func (p *pump) drop(pi *pipe) {
	if pi.channel == nil {
		return
	}
	pi.channel.Destroy()
	pi.channel, pi.broken = nil, false
	for tag := range pi.inFlight {
		p.settle(pi, message.Result{Tag: tag, Kind: message.Lost})
	}
}
