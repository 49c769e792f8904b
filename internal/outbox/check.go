package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"backstep/internal/sqltx"
)

// check is what is to be compared with what is pending in a shard. Until that is done the
// shard's walk rests, and no other does.
type check struct {
	shard     int
	walk      *walk
	stretches []*stretch
	known     []uint64 // ids among them, sorted. Whether these are pending changes while we look
}

// checkDone is what checks have found.
type checkDone struct {
	checks   []check
	doubtful map[*stretch]bool // these do not agree
	took     time.Duration
	err      error
}

// unchecked returns the walk to check although nothing was found behind its stretches: what has
// committed among them is to be found as well.
func (p *pump) unchecked(done readDone) (oldest *walk) {
	if time.Now().Before(p.nextDue) {
		return nil
	}
	for _, sp := range done.page {
		w := p.walks[sp.shard]
		if !w.sure && time.Since(w.checked) > p.cfg.PollMax && (oldest == nil || w.checked.Before(oldest.checked)) {
			oldest = w
		}
	}
	if oldest != nil {
		p.nextDue = time.Now().Add(p.cfg.PollMax) // until it is done
	}
	return oldest
}

// startChecks checks the walks that wait for it.
func (p *pump) startChecks(ctx context.Context) {
	if p.checking {
		return
	}
	var checks []check
	for s, w := range p.walks {
		if w.haul != nil {
			checks = append(checks, check{shard: s, walk: w, stretches: w.stretches()})
		}
	}
	if len(checks) == 0 {
		return
	}
	known := map[int][]uint64{}
	for id, r := range p.known {
		known[r.shard] = append(known[r.shard], id)
	}
	for i, c := range checks {
		ids := known[c.shard]
		slices.Sort(ids)
		n, _ := slices.BinarySearch(ids, c.last()+1)
		checks[i].known = ids[:n]
	}
	p.checking = true
	p.wg.Go(func() {
		began := time.Now()
		doubtful, err := compare(ctx, p.db, checks)
		p.checked <- checkDone{checks, doubtful, time.Since(began), err}
	})
}

func (p *pump) finishChecks(done checkDone) {
	p.checking = false
	p.checkTrouble.report(p.cfg.Log, "outbox backlog not checked; trying again", done.err)
	found := false
	for _, c := range done.checks {
		w, h := c.walk, c.walk.haul
		w.haul = nil
		if len(h.rows) == 0 { // this takes a tenth of the time at most
			p.nextDue = time.Now().Add(9 * done.took)
			p.poll.by(p.nextDue)
		}
		switch {
		case !w.on || p.walks[c.shard] != w: // it is read anew
		case done.err != nil:
			w.on = false
		default:
			w.sure, w.checked = true, time.Now()
			if !p.doubt(w, done.doubtful) {
				found = p.take(w, *h) || found
			}
		}
	}
	if found {
		p.poll.by(time.Now().Add(p.cfg.PollMin))
	}
}

func (c check) last() uint64 { return c.stretches[len(c.stretches)-1].last }

// compare returns the stretches that do not agree with what is pending. Most often all do, and
// a few sums tell.
func compare(ctx context.Context, db *sql.DB, checks []check) (map[*stretch]bool, error) {
	var large []part
	for _, c := range checks {
		all := part{shard: c.shard, upTo: c.last(), known: c.known, stretches: c.stretches}
		large = append(large, all.split(querySum)...)
	}
	wrong, err := disagreeing(ctx, db, large)
	if err != nil {
		return nil, err
	}
	var small []part
	for _, pt := range wrong {
		small = append(small, pt.split(1)...)
	}
	if wrong, err = disagreeing(ctx, db, small); err != nil {
		return nil, err
	}
	doubtful := map[*stretch]bool{}
	for _, pt := range wrong {
		for _, st := range pt.stretches { // one, and such as have become empty
			doubtful[st] = true
		}
	}
	return doubtful, nil
}

// part is a part of a shard's ids, and what should be pending there.
type part struct {
	shard       int
	after, upTo uint64
	known       []uint64 // these do not count
	stretches   []*stretch
	want        checksum
}

// split returns parts with so many rows, or a little more: at least one stretch each.
func (pt part) split(rows uint64) (parts []part) {
	next, known := part{shard: pt.shard, after: pt.after}, pt.known
	for i, st := range pt.stretches {
		next.upTo, next.want = st.last, next.want.plus(st.sum)
		next.stretches = append(next.stretches, st)
		if next.want.rows < rows && i+1 < len(pt.stretches) {
			continue
		}
		n, _ := slices.BinarySearch(known, st.last+1)
		next.known, known = known[:n], known[n:]
		parts = append(parts, next)
		next = part{shard: pt.shard, after: st.last}
	}
	return parts
}

const (
	querySum  = 25_000 // rows of which one query makes the sum
	queryMax  = 100    // parts of one query: each opens the table anew
	atOneTime = 3      // queries; the pool has other work
)

// disagreeing returns the parts where something else is pending than should be.
func disagreeing(ctx context.Context, db *sql.DB, parts []part) ([]part, error) {
	sums := make([]checksum, len(parts))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(atOneTime)
	for rest := parts; len(rest) > 0; {
		n, rows := 0, uint64(0)
		for n < min(queryMax, len(rest)) && rows < querySum {
			rows += rest[n].want.rows
			n++
		}
		some, into := rest[:n], sums[len(sums)-len(rest):]
		g.Go(func() error { return sumPending(ctx, db, some, into) })
		rest = rest[n:]
	}
	if err := g.Wait(); err != nil {
		return nil, fmt.Errorf("sum up pending outbox rows: %w", err)
	}
	var wrong []part
	for i, pt := range parts {
		if sums[i] != pt.want {
			wrong = append(wrong, pt)
		}
	}
	return wrong, nil
}

// Served by ix_outbox_relay alone: no row is looked at.
const sumPendingSQL = `
(SELECT ?, COUNT(*), BIT_XOR((id & 4294967295) * (id & 4294967295))
   FROM outbox_events FORCE INDEX (ix_outbox_relay)
  WHERE shard = ?
    AND status = 'PENDING'
    AND id > ?
    AND id <= ?`

// sumQuery returns the query for what is pending in parts.
func sumQuery(parts []part) (query string, args []any) {
	selects := make([]string, len(parts))
	for i, pt := range parts {
		selects[i] = sumPendingSQL
		args = append(args, i, pt.shard, pt.after, pt.upTo)
		for known := range slices.Chunk(pt.known, sqltx.MaxIn) {
			selects[i] += "\n    AND id NOT IN (" + sqltx.Placeholders(len(known)) + ")"
			for _, id := range known {
				args = append(args, id)
			}
		}
		selects[i] += ")"
	}
	return strings.Join(selects, "\nUNION ALL"), args
}

func sumPending(ctx context.Context, db *sql.DB, parts []part, sums []checksum) error {
	query, args := sumQuery(parts)
	return scan(ctx, db, query, func(rows *sql.Rows) error {
		var i int
		var sum checksum
		if err := rows.Scan(&i, &sum.rows, &sum.squares); err != nil {
			return err
		}
		sums[i] = sum
		return nil
	}, args...)
}
