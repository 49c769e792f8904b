package outbox

import (
	"context"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
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

	known map[uint64]*row
	load  int              // of the known rows
	keys  map[string]*line // by ordering key
	dests map[destination]*hold
	ages  ages
	ready []*line // to be published
	tries []*line // to try out destinations that have refused

	main, side *pipe
	nextTag    uint64
	solo       int // how many rows still to publish one at a time, after the broker blamed one
	suspects   []*line
	aborted    time.Time // the last time it closed on us over one

	reads   chan readDone
	reading bool
	walks   map[int]*walk // by shard
	poll    poll
	bell    uint16    // shards that were rung for since their last pass began
	pages   int       // rows of one read; shrinks when rows are large
	crowded time.Time // when it was last told that too much is left out

	checked  chan checkDone
	checking bool
	nextDue  time.Time // no check before if nothing was found

	todo    toWrite
	marking []*row // confirmed, and being marked
	writing bool
	written chan writeDone
	retired []*row // written while a read was running: forgotten when it is in
	retryAt time.Time

	readTrouble, checkTrouble, writeTrouble trouble

	releasing map[int]bool
	released  chan int

	wg sync.WaitGroup
}

func newPump(r *Relay) *pump {
	return &pump{
		Relay: r, known: map[uint64]*row{}, keys: map[string]*line{}, dests: map[destination]*hold{},
		walks: map[int]*walk{}, main: newPipe(), side: newPipe(),
		reads: make(chan readDone, 1), checked: make(chan checkDone, 1), written: make(chan writeDone, 1), pages: r.cfg.Page,
		releasing: map[int]bool{}, released: make(chan int, message.Shards),
	}
}

// run pumps until ctx ends and then until nothing is in flight or unmarked, or the drain
// time-out is over.
func (p *pump) run(ctx context.Context) {
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer p.wg.Wait()
	defer cancel()
	defer func() { p.drop(p.main); p.drop(p.side) }()
	// This loop looks at its deadline only when it does not wait in a write.
	publishing, giveUp := context.WithCancel(work)
	defer giveUp()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(p.cfg.DrainTimeout, giveUp) })()
	stopping := ctx.Done()
	var deadline <-chan time.Time
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-stopping:
			stopping = nil
			deadline = time.After(p.cfg.DrainTimeout)
		case <-deadline:
			p.cfg.Log.Warn("relay stopped with rows in flight; they will be published again",
				"rows", p.flying(), "unmarked", len(p.todo.confirmed)+len(p.marking))
			return
		case ch := <-p.main.acquired:
			p.main.open(ch)
		case ch := <-p.side.acquired:
			p.side.open(ch)
		case res := <-p.main.results():
			p.settleAll(p.main, res)
		case res := <-p.side.results():
			p.settleAll(p.side, res)
		case done := <-p.reads:
			p.admit(done)
		case done := <-p.checked:
			p.finishChecks(done)
		case done := <-p.written:
			p.finishWrite(done)
		case shard := <-p.released:
			delete(p.releasing, shard)
		case <-p.wake:
			p.bell |= uint16(p.rungFor.Swap(0))
		case <-p.leases.changed:
			p.poll.next = time.Time{}
		case <-timer.C:
		}
		p.check(p.main)
		p.check(p.side)
		running := stopping != nil
		if running {
			p.publish(publishing)
			p.connect(work, p.side, p.tries)
			p.connect(work, p.main, p.ready)
			p.startChecks(work)
			p.read(work)
		}
		p.write(work, running)
		p.handOver(work)
		if !running && p.flying() == 0 && !p.writing && p.todo.empty() {
			return
		}
		timer.Reset(p.nap(running))
	}
}

// flying is how many rows are in flight.
func (p *pump) flying() int { return len(p.main.inFlight) + len(p.side.inFlight) }

// settleAll settles res and what else has arrived, so that one mark covers it all.
func (p *pump) settleAll(pi *pipe, res message.Result) {
	results := pi.results()
	p.settle(pi, res)
	for range p.cfg.Window {
		select {
		case res := <-results:
			p.settle(pi, res)
		default:
			return
		}
	}
}

// nap returns how long nothing needs to be done unless something happens.
func (p *pump) nap(running bool) time.Duration {
	wait, now := time.Second, time.Now()
	soonest := func(t time.Time) { wait = min(wait, max(time.Millisecond, t.Sub(now))) }
	if !p.writing && !p.todo.empty() {
		soonest(later(p.retryAt, p.todo.due()))
	}
	if !p.pub.Ready() {
		return min(wait, p.cfg.PollMax)
	}
	for _, pi := range []*pipe{p.main, p.side} {
		if len(pi.inFlight) > 0 {
			soonest(pi.nextLook(p.cfg.ConfirmTimeout))
		}
	}
	if !running {
		return wait
	}
	if !p.reading && p.roomLeft() > 0 {
		soonest(p.poll.next)
	}
	for _, h := range p.dests {
		if h.held && h.probe == nil && len(h.lines) > 0 {
			soonest(h.until)
		}
	}
	return wait
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// handOver releases surplus shards of which nothing is in flight or unmarked: their next
// owner would publish it again.
func (p *pump) handOver(ctx context.Context) {
	surplus := p.leases.surplus()
	if len(surplus) == 0 {
		return
	}
	open := map[int]bool{}
	for _, rows := range []iter.Seq[*row]{
		maps.Values(p.main.inFlight), maps.Values(p.side.inFlight), slices.Values(p.todo.confirmed), slices.Values(p.marking),
	} {
		for r := range rows {
			open[r.shard] = true
		}
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
