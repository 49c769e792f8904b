package outbox

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"backstep/internal/crash"
	"backstep/internal/message"
	"backstep/internal/tracing"
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

// line is the rows of one ordering key, in id order. At most one of them is in flight.
type line struct {
	key     string
	waiting []*row
	busy    bool // one is in flight, or its park is being written
	queued  bool // in ready, or in its destination's line
}

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

// pass is one walk over the pending rows, by id from 0. No mark outlives it: a row that
// commits late under a low id is found by the next one.
type pass struct {
	after   map[int]uint64  // shard → last id read; a shard leaves when it has no more
	skipped map[string]bool // keys of which a row was left out; later ones must not overtake it
	found   bool            // it brought something new
	next    time.Time
	wait    time.Duration
}

type readDone struct {
	rows  []*row
	bytes int
	after map[int]uint64
	limit int
	err   error
}

type writeDone struct {
	marked, unmarked   []*row
	refused, unrefused []refusal
	err                error
}

const maxPageBytes = 16 << 20

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
		if h.held() && h.probe == nil && len(h.lines) > 0 {
			soonest(h.until)
		}
	}
	if len(p.confirmed)+len(p.refusals) > 0 && !p.writing {
		soonest(p.retryAt)
	}
	return wait
}

// ---- the confirm channel

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
			select {
			case <-ctx.Done():
				return
			case <-time.After(jitter(min(holdMax, holdMin<<min(try, 6)))):
			}
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

// ---- reading

// read starts the next read, if one is due and there is room for what it may bring.
func (p *pump) read(ctx context.Context) {
	if p.reading || !p.pub.Ready() || p.roomLeft() <= 0 {
		return
	}
	if len(p.pass.after) == 0 && time.Now().Before(p.pass.next) {
		return
	}
	owned := p.leases.owned()
	if len(owned) == 0 {
		p.endPass() // a standby: leases.changed wakes it
		return
	}
	if len(p.pass.after) == 0 {
		p.pass.after = make(map[int]uint64, len(owned))
		for s := range owned {
			p.pass.after[s] = 0
		}
		p.pass.skipped, p.pass.found = map[string]bool{}, false
	}
	after := make(map[int]uint64, len(p.pass.after))
	for s, id := range p.pass.after {
		if _, ok := owned[s]; ok {
			after[s] = id
		}
	}
	if len(after) == 0 {
		p.endPass()
		return
	}
	limit := max(1, p.pages/len(after))
	p.reading = true
	p.wg.Go(func() {
		rows, bytes, err := readPending(ctx, p.db, after, limit)
		p.reads <- readDone{rows: rows, bytes: bytes, after: after, limit: limit, err: err}
	})
}

// roomLeft is how many more rows may be known. What waits for a held destination is bounded
// by itself and does not count.
func (p *pump) roomLeft() int {
	n := 4*p.cfg.Window - len(p.known)
	for _, h := range p.dests {
		if h.held() {
			n += h.rows
		}
	}
	return n
}

func (p *pump) admit(done readDone) {
	p.reading = false
	if done.err != nil {
		p.cfg.Log.Warn("outbox not read", "error", done.err)
		p.pass = pass{next: time.Now().Add(p.cfg.PollMax), wait: p.cfg.PollMax}
		p.forgetRetired()
		return
	}
	if done.bytes > maxPageBytes {
		p.pages = max(16, p.pages/4)
	} else if p.pages < p.cfg.Page {
		p.pages *= 2
	}
	if len(done.rows) > 0 {
		crash.Point("relay.read")
	}
	got := map[int]int{}
	for _, r := range done.rows {
		got[r.shard]++
		p.pass.after[r.shard] = r.id
		p.enqueue(r)
	}
	for s := range done.after {
		if got[s] < done.limit {
			delete(p.pass.after, s) // this shard has no more
		}
	}
	for s := range p.pass.after {
		if _, read := done.after[s]; !read {
			delete(p.pass.after, s) // no longer ours
		}
	}
	p.forgetRetired()
	if len(p.pass.after) == 0 {
		p.endPass()
	}
}

func (p *pump) endPass() {
	wait := p.cfg.PollMin
	if !p.pass.found {
		wait = min(p.cfg.PollMax, max(p.cfg.PollMin, 2*p.pass.wait))
	}
	p.pass = pass{wait: wait, next: time.Now().Add(wait/2 + jitter(wait/2))}
}

// enqueue puts a row into its key's line, unless it is known already or there is no room
// for it; then later rows of its key are left out too, for this pass.
func (p *pump) enqueue(r *row) {
	if _, ok := p.known[r.id]; ok || p.pass.skipped[r.key] {
		return
	}
	ln := p.keys[r.key]
	if ln == nil {
		ln = &line{key: r.key}
	}
	h := p.dests[r.dest]
	if h == nil {
		h = &hold{dest: r.dest}
	}
	if len(ln.waiting) >= keyBound || h.held() && h.rows >= destinationBound {
		p.pass.skipped[r.key] = true
		return
	}
	p.keys[r.key], p.dests[r.dest] = ln, h
	p.known[r.id] = r
	p.pass.found = true
	ln.waiting = append(ln.waiting, r)
	h.rows++
	p.offer(ln)
}

// offer puts a line where its first row can be published from.
func (p *pump) offer(ln *line) {
	if ln.busy || ln.queued || len(ln.waiting) == 0 {
		if !ln.busy && !ln.queued {
			delete(p.keys, ln.key)
		}
		return
	}
	ln.queued = true
	if h := p.dests[ln.waiting[0].dest]; h.held() && !p.overdue(h) {
		h.lines = append(h.lines, ln)
		return
	}
	p.ready = append(p.ready, ln)
}

// overdue reports that an unroutable destination has been tried long enough: its rows are
// tried once each and parked, without waiting for each other.
func (p *pump) overdue(h *hold) bool { return h.held() && time.Since(h.since) >= p.cfg.ParkAfter }

// forgetRetired drops rows whose write is committed, now that no older read is running.
func (p *pump) forgetRetired() {
	for _, id := range p.retired {
		delete(p.known, id)
	}
	p.retired = p.retired[:0]
}

// ---- publishing

func (p *pump) publish(ctx context.Context) {
	p.probe()
	if p.channel == nil || p.broken {
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
		ln.queued = false
		r := ln.waiting[0]
		if _, ours := owned[r.shard]; !ours {
			p.abandon(ln)
			continue
		}
		if h := p.dests[r.dest]; h.held() && h.probe != ln && !p.overdue(h) {
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

// abandon drops a line whose shard is another relay's by now.
func (p *pump) abandon(ln *line) {
	for _, r := range ln.waiting {
		if h := p.dests[r.dest]; h.probe == ln {
			h.probe = nil
		}
		p.uncount(r)
		delete(p.known, r.id)
	}
	ln.waiting = nil
	p.offer(ln)
}

func (p *pump) uncount(r *row) {
	h := p.dests[r.dest]
	h.rows--
	if h.rows <= 0 && !h.held() {
		delete(p.dests, r.dest)
	}
}

func (p *pump) send(ctx context.Context, ln *line, r *row) {
	ln.busy = true
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

// ---- outcomes

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

// ---- writing

// write starts the next write: refusals and parks first, then one mark for all that is
// confirmed.
func (p *pump) write(ctx context.Context) {
	if p.writing || len(p.confirmed)+len(p.refusals) == 0 || time.Now().Before(p.retryAt) {
		return
	}
	rows, refusals := p.confirmed, p.refusals
	p.confirmed, p.refusals = nil, nil
	p.writing = true
	p.wg.Go(func() { p.written <- p.writeAll(ctx, rows, refusals) })
}

// writeAll writes what it can; one refusal that cannot be written holds up nothing else.
func (p *pump) writeAll(ctx context.Context, rows []*row, refusals []refusal) writeDone {
	var done writeDone
	for _, f := range refusals {
		err := p.writeRefusal(ctx, f)
		switch {
		case err == nil, errors.Is(err, errNotOurs):
			done.refused = append(done.refused, f)
		default:
			done.err = err
			done.unrefused = append(done.unrefused, f)
		}
	}
	if len(rows) == 0 {
		return done
	}
	if err := markPublished(ctx, p.db, rows); err != nil {
		done.err, done.unmarked = err, rows
		return done
	}
	done.marked = rows
	return done
}

func (p *pump) finishWrite(done writeDone) {
	p.writing = false
	for _, r := range done.marked {
		crash.Point("relay.marked")
		p.retire(r.id)
	}
	for _, f := range done.refused {
		if !f.park {
			continue
		}
		ln := p.keys[f.row.key]
		p.uncount(f.row)
		p.retire(f.row.id)
		ln.busy = false
		p.offer(ln)
	}
	if done.err == nil {
		return
	}
	p.cfg.Log.Warn("outbox rows not written; trying again", "error", done.err,
		"rows", len(done.unmarked)+len(done.unrefused))
	p.confirmed = append(done.unmarked, p.confirmed...)
	p.refusals = append(done.unrefused, p.refusals...)
	p.retryAt = time.Now().Add(p.cfg.PollMax/2 + jitter(p.cfg.PollMax/2))
}

// retire forgets a row whose write is committed: now, or when the read that may have begun
// before the commit is in.
func (p *pump) retire(id uint64) {
	if p.reading {
		p.retired = append(p.retired, id)
		return
	}
	delete(p.known, id)
}

// handOver releases surplus shards of which nothing is in flight.
func (p *pump) handOver(ctx context.Context) {
	surplus := p.leases.surplus()
	if len(surplus) == 0 {
		return
	}
	busy := map[int]bool{}
	for _, r := range p.inFlight {
		busy[r.shard] = true
	}
	for _, shard := range surplus {
		if busy[shard] || p.releasing[shard] {
			continue
		}
		p.releasing[shard] = true
		p.wg.Go(func() {
			err := p.leases.release(ctx, shard)
			if err != nil {
				// It runs out by itself: we no longer renew what we do not hold.
				p.cfg.Log.Warn("surplus shard not released", "error", err)
			}
			p.released <- shard
		})
	}
}

func jitter(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return rand.N(d)
}
