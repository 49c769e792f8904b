package outbox

import (
	"context"
	"errors"
	"slices"
	"time"

	"backstep/internal/crash"
)

type writeDone struct {
	marked, unmarked   []*row
	refused, unrefused []refusal
	lost               []refusal // not ours to decide any more
	err                error
}

// write starts the next write: refusals and parks first, then one mark for all that is
// confirmed.
func (p *pump) write(ctx context.Context) {
	if p.writing || len(p.confirmed)+len(p.refusals) == 0 || time.Now().Before(p.retryAt) {
		return
	}
	rows, refusals := p.confirmed, p.refusals
	p.confirmed, p.marking, p.refusals = nil, rows, nil
	p.writing = true
	p.wg.Go(func() { p.written <- p.writeAll(ctx, rows, refusals) })
}

// writeAll writes what it can; one refusal that cannot be written holds up nothing else.
func (p *pump) writeAll(ctx context.Context, rows []*row, refusals []refusal) writeDone {
	var done writeDone
	for _, f := range refusals {
		err := p.writeRefusal(ctx, f)
		switch {
		case err == nil:
			done.refused = append(done.refused, f)
		case errors.Is(err, errNotOurs):
			done.lost = append(done.lost, f)
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
	p.writing, p.marking = false, nil
	for _, r := range done.marked {
		crash.Point("relay.marked")
		p.retire(r)
	}
	for _, f := range done.refused {
		if !f.park {
			continue
		}
		p.uncount(f.row)
		p.retire(f.row)
		p.offer(p.keys[f.row.key])
	}
	for _, f := range done.lost {
		ln := p.keys[f.row.key]
		ln.waiting = slices.Insert(ln.waiting, 0, f.row)
		p.abandon(ln)
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
