package outbox

import (
	"context"
	"errors"
	"slices"
	"time"

	"backstep/internal/crash"
)

// maxRefusals is how many refusals, and how many parks, go into one write: marks must not
// wait for thousands of them.
const maxRefusals = 64

// A mark is a commit whatever it marks, and nobody waits for it: it is written when so many rows
// are confirmed, or when the first of them was so long ago. Should the relay crash, these are
// published once more.
const (
	markRows = 128
	markWait = 20 * time.Millisecond
)

// toWrite is what is to be written about rows.
type toWrite struct {
	confirmed []*row     // to be marked, by one statement
	since     time.Time  // the first of them was confirmed
	refused   []*refusal // to be charged, by one transaction
	parks     []refusal  // a transaction each
}

func (w *toWrite) confirm(r *row) {
	if len(w.confirmed) == 0 {
		w.since = time.Now()
	}
	w.confirmed = append(w.confirmed, r)
}

// due returns when it is to be written.
func (w *toWrite) due() time.Time {
	if len(w.confirmed) >= markRows || len(w.refused)+len(w.parks) > 0 {
		return time.Time{}
	}
	return w.since.Add(markWait)
}

func (w *toWrite) empty() bool { return len(w.confirmed)+len(w.refused)+len(w.parks) == 0 }

// refuse notes a refusal. A row that is refused again before the last one is written is charged
// for both at once: with many of them writing could not keep up.
func (w *toWrite) refuse(r *row, reason string, wait time.Duration) {
	if r.charge == nil {
		r.charge = &refusal{row: r}
		w.refused = append(w.refused, r.charge)
	}
	r.charge.reason, r.charge.wait = reason, wait
	r.charge.times++
}

// cut takes off what goes into one write.
func (w *toWrite) cut() toWrite {
	n, m := min(maxRefusals, len(w.refused)), min(maxRefusals, len(w.parks))
	first := toWrite{confirmed: w.confirmed, refused: w.refused[:n], parks: w.parks[:m]}
	w.confirmed, w.refused, w.parks = nil, w.refused[n:], w.parks[m:]
	for _, f := range first.refused {
		f.row.charge = nil
	}
	return first
}

// writeDone is what became of a write.
type writeDone struct {
	marked []*row
	parked []*row
	lost   []*row  // not parked: not ours to decide any more
	failed toWrite // to be tried again
	err    error
}

// write starts the next write, if there is something to write and it is time for it; a relay
// that stops does not wait for more.
func (p *pump) write(ctx context.Context, running bool) {
	now := time.Now()
	if p.writing || p.todo.empty() || now.Before(p.retryAt) || running && now.Before(p.todo.due()) {
		return
	}
	w := p.todo.cut()
	p.writing, p.marking = true, w.confirmed
	p.wg.Go(func() { p.written <- p.writeAll(ctx, w) })
}

// writeAll writes what it can: what cannot be written holds up nothing else.
func (p *pump) writeAll(ctx context.Context, w toWrite) (done writeDone) {
	if err := p.markPublished(ctx, w.confirmed); err != nil {
		done.failed.confirmed, done.err = w.confirmed, err
	} else {
		done.marked = w.confirmed
	}
	if err := p.charge(ctx, w.refused); err != nil {
		done.failed.refused, done.err = w.refused, err
	}
	for _, f := range w.parks {
		err := p.park(ctx, f)
		switch {
		case err == nil:
			done.parked = append(done.parked, f.row)
		case errors.Is(err, errNotOurs):
			done.lost = append(done.lost, f.row)
		default:
			done.failed.parks, done.err = append(done.failed.parks, f), err
		}
	}
	return done
}

func (p *pump) finishWrite(done writeDone) {
	p.writing, p.marking = false, nil
	for _, r := range done.marked {
		crash.Point("relay.marked")
		p.retire(r)
	}
	for _, r := range done.parked {
		p.uncount(r)
		p.retire(r)
		p.offer(p.keys[r.key])
	}
	for _, r := range done.lost {
		ln := p.keys[r.key]
		ln.waiting = slices.Insert(ln.waiting, 0, r)
		p.abandon(ln)
	}
	p.writeTrouble.report(p.cfg.Log, "outbox rows not written; trying again", done.err)
	if done.err == nil {
		return
	}
	// Parks that fail come last: there may be others.
	p.todo.confirmed = append(done.failed.confirmed, p.todo.confirmed...)
	p.todo.refused = append(done.failed.refused, p.todo.refused...)
	p.todo.parks = append(slices.Clip(p.todo.parks), done.failed.parks...)
	p.retryAt = time.Now().Add(p.cfg.PollMax/2 + jitter(p.cfg.PollMax/2))
}

// retire forgets a row whose write is committed: now, or when the read that may have begun
// before the commit is in.
func (p *pump) retire(r *row) {
	if p.reading {
		p.retired = append(p.retired, r)
		return
	}
	p.forget(r)
}

// forgetRetired drops rows whose write is committed, now that no older read is running.
func (p *pump) forgetRetired() {
	for _, r := range p.retired {
		p.forget(r)
	}
	p.retired = nil
}
