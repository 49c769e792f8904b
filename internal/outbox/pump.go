package outbox

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"backstep/internal/message"
)

// pump is the relay's hot path: one goroutine that owns all state and does no I/O but write
// to the confirm channel. Reading, marking and connecting run beside it and report back, so
// reading, publishing and marking overlap.
//
// A row it knows is in exactly one place: waiting in its key's line, in flight, waiting for
// a mark or refusal to be written, or written and kept until no read that began before the
// write can still bring it back.
type pump struct {
	*Relay

	known    map[uint64]*row
	keys     map[string]*line
	ready    []*line
	dests    map[destination]*hold
	inFlight map[uint64]*row // by publish tag
	nextTag  uint64
	solo     int // how many rows still to publish one at a time, after the broker blamed one
	suspects []*line

	channel   Channel
	broken    bool // no more publishes on channel; it goes when its results are in
	acquiring bool
	acquired  chan Channel
	idleSince time.Time

	reads   chan readDone
	reading bool
	pass    pass
	pages   int // rows of one read; shrinks when rows are large

	confirmed []*row
	marking   []*row // confirmed, and being marked
	refusals  []refusal
	writing   bool
	written   chan writeDone
	retired   []uint64 // written while a read was running: forgotten when it is in
	retryAt   time.Time

	releasing map[int]bool
	released  chan int

	nextCheck time.Time
	wg        sync.WaitGroup
}

func newPump(r *Relay) *pump {
	return &pump{
		Relay: r, known: map[uint64]*row{}, keys: map[string]*line{}, dests: map[destination]*hold{},
		inFlight: map[uint64]*row{}, acquired: make(chan Channel), reads: make(chan readDone, 1),
		written: make(chan writeDone, 1), pages: r.cfg.Page,
		releasing: map[int]bool{}, released: make(chan int, message.Shards),
	}
}

// run pumps until ctx ends and then until nothing is in flight or unmarked, or the drain
// time-out is over.
func (p *pump) run(ctx context.Context) {
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer p.wg.Wait()
	defer cancel()
	stopping := ctx.Done()
	var deadline <-chan time.Time
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var results <-chan message.Result
		if p.channel != nil {
			results = p.channel.Results()
		}
		select {
		case <-stopping:
			stopping = nil
			deadline = time.After(p.cfg.DrainTimeout)
		case <-deadline:
			p.cfg.Log.Warn("relay stopped with rows in flight; they will be published again",
				"rows", len(p.inFlight), "unmarked", len(p.confirmed))
			p.dropChannel()
			return
		case ch := <-p.acquired:
			p.acquiring = false
			p.channel, p.broken, p.idleSince = ch, false, time.Now()
		case res := <-results:
			p.settle(res)
			p.settleMore(results)
		case done := <-p.reads:
			p.admit(done)
		case done := <-p.written:
			p.finishWrite(done)
		case shard := <-p.released:
			delete(p.releasing, shard)
		case <-p.wake:
			p.pass.next, p.pass.wait = time.Time{}, p.cfg.PollMin
		case <-p.leases.changed:
			p.pass.next = time.Time{}
		case <-timer.C:
		}
		running := stopping != nil
		p.checkChannel()
		if running {
			p.publish(work)
			p.connect(work)
			p.read(work)
		}
		p.write(work)
		p.handOver(work)
		if !running && len(p.inFlight) == 0 && !p.writing && len(p.confirmed) == 0 && len(p.refusals) == 0 {
			p.dropChannel()
			return
		}
		timer.Reset(p.nap())
	}
}

// settleMore takes what has already arrived, so that one mark covers it all.
func (p *pump) settleMore(results <-chan message.Result) {
	for range p.cfg.Window {
		select {
		case res := <-results:
			p.settle(res)
		default:
			return
		}
	}
}

// nap returns how long nothing needs to be done unless something happens.
func (p *pump) nap() time.Duration {
	wait := time.Second
	now := time.Now()
	soonest := func(t time.Time) { wait = min(wait, max(time.Millisecond, t.Sub(now))) }
	switch {
	case !p.pub.Ready():
		wait = p.cfg.PollMax
	case !p.reading && p.roomLeft() > 0:
		soonest(p.pass.next)
	}
	for _, h := range p.dests {
		if h.held && h.probe == nil && len(h.lines) > 0 {
			soonest(h.until)
		}
	}
	if len(p.confirmed)+len(p.refusals) > 0 && !p.writing {
		soonest(p.retryAt)
	}
	return wait
}

// handOver releases surplus shards of which nothing is in flight or unmarked: their next
// owner would publish it again.
func (p *pump) handOver(ctx context.Context) {
	surplus := p.leases.surplus()
	if len(surplus) == 0 {
		return
	}
	open := map[int]bool{}
	for _, r := range p.inFlight {
		open[r.shard] = true
	}
	for _, r := range p.confirmed {
		open[r.shard] = true
	}
	for _, r := range p.marking {
		open[r.shard] = true
	}
	for _, shard := range surplus {
		if open[shard] || p.releasing[shard] {
			continue
		}
		p.releasing[shard] = true
		p.wg.Go(func() {
			if err := p.leases.release(ctx, shard); err != nil {
				p.cfg.Log.Warn("surplus shard not released; trying again", "shard", shard, "error", err)
				pause(ctx, p.cfg.PollMax)
			}
			p.released <- shard
		})
	}
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

func jitter(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return rand.N(d)
}
