package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"hash/crc32"
	"hash/maphash"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// behind is what passes have left out of a shard for want of room: the rows to a full queue,
// say, a hundred thousand of them. To read them again in each pass would take more time than
// all others can wait.
//
// So the next passes begin behind them. That keeps the promised order only if nothing has
// committed among them meanwhile, under a low id: its successor, by key, would be found first.
// Sums over the index tell, on a younger snapshot than that of the rows that were read; they
// cost a fiftieth of reading what was left out.
type behind struct {
	epoch  uint64 // of the shard's lease
	last   uint64 // where the next pass begins
	sum    checksum
	keys   keySet               // of the rows left out: rows that follow them have to wait too
	dests  map[destination]bool // these had no room,
	lines  map[string]bool      // or these keys
	walked time.Time
	wrong  time.Time // since when the sums do not agree; zero if they do
	void   bool      // rows were dropped: they have to be read again
}

const (
	behindMin = 1000                   // rows of a shard left out for this to be worth while
	behindMax = 15 * time.Second       // until a shard is walked over again all the same
	wrongMax  = 300 * time.Millisecond // until it is walked over because the sums do not agree
)

// checksum tells one set of ids from another.
type checksum struct{ rows, ids, crcs uint64 }

func (c checksum) plus(d checksum) checksum {
	return checksum{c.rows + d.rows, c.ids + d.ids, c.crcs + d.crcs}
}

func (c checksum) minus(d checksum) checksum {
	return checksum{c.rows - d.rows, c.ids - d.ids, c.crcs - d.crcs}
}

func sumOf(id uint64) checksum {
	return checksum{1, id, uint64(crc32.ChecksumIEEE(strconv.AppendUint(nil, id, 10)))}
}

// keySet is a set of ordering keys. It may take a key for another: that costs time only.
type keySet map[uint64]struct{}

var keySeed = maphash.MakeSeed()

func (s keySet) add(key string) { s[maphash.String(keySeed, key)] = struct{}{} }

func (s keySet) has(key string) bool {
	_, ok := s[maphash.String(keySeed, key)]
	return ok
}

// Served by ix_outbox_relay alone: no row is looked at.
const sumPendingSQL = `
(SELECT %d, COUNT(*), COALESCE(SUM(id), 0), COALESCE(SUM(CRC32(id)), 0)
   FROM outbox_events FORCE INDEX (ix_outbox_relay)
  WHERE shard = ?
    AND status = 'PENDING'
    AND id <= ?)`

// sumQuery returns the query for the sums of shards, each up to an id.
func sumQuery(upTo map[int]uint64) (query string, args []any) {
	parts := make([]string, 0, len(upTo))
	for _, s := range slices.Sorted(maps.Keys(upTo)) {
		parts = append(parts, fmt.Sprintf(sumPendingSQL, s))
		args = append(args, s, upTo[s])
	}
	return strings.Join(parts, "\nUNION ALL"), args
}

func sumPending(ctx context.Context, db *sql.DB, upTo map[int]uint64) (map[int]checksum, error) {
	sums := map[int]checksum{}
	if len(upTo) == 0 {
		return sums, nil
	}
	query, args := sumQuery(upTo)
	err := scan(ctx, db, func(rows *sql.Rows) error {
		var s int
		var c checksum
		if err := rows.Scan(&s, &c.rows, &c.ids, &c.crcs); err != nil {
			return err
		}
		sums[s] = c
		return nil
	}, query, args...)
	if err != nil {
		return nil, fmt.Errorf("sum up pending outbox rows: %w", err)
	}
	return sums, nil
}

// begin returns behind which row of a shard the next pass begins. If head is true it reads one
// page from the beginning first.
func (p *pump) begin(shard int, epoch uint64) (after uint64, head bool) {
	b := p.behind[shard]
	if b == nil {
		return 0, false
	}
	age := time.Since(b.walked)
	rested := age > 4*p.walkTook // a walk takes its time; others have more before the next
	switch {
	case b.epoch != epoch, age > max(behindMax, 20*p.walkTook), rested && p.destHasRoom(b):
		delete(p.behind, shard)
		return 0, false
	case rested && p.keyHasRoom(b):
		return 0, true
	}
	return b.last, false
}

// destHasRoom reports whether a row left out because of its destination could be let in now.
// It may be anywhere.
func (p *pump) destHasRoom(b *behind) bool {
	for d := range b.dests {
		if h := p.dests[d]; h == nil || !h.held || len(h.lines) < destinationBound/2 {
			return true
		}
	}
	return false
}

// keyHasRoom reports whether a row left out because of its key could be let in now. Most often
// a key with so many rows has some at the head.
func (p *pump) keyHasRoom(b *behind) bool {
	for k := range b.lines {
		if ln := p.keys[k]; ln == nil || ln.place != held && len(ln.waiting) < keyBound/2 {
			return true
		}
	}
	return false
}

// left returns what this pass leaves out of a shard.
func (p *pump) left(shard int, epoch uint64) *behind {
	b := p.pass.left[shard]
	if b == nil {
		b = &behind{
			epoch: epoch, keys: keySet{}, dests: map[destination]bool{}, lines: map[string]bool{}, walked: time.Now(),
		}
		p.pass.left[shard] = b
	}
	return b
}

// isLeftOut reports whether a row of the key was left out, by this pass or by those before
// that it does not walk again.
func (p *pump) isLeftOut(shard int, key string) bool {
	if b := p.pass.left[shard]; b != nil && b.keys.has(key) {
		return true
	}
	b := p.behind[shard]
	_, head := p.pass.head[shard]
	return b != nil && !head && b.keys.has(key)
}

// letIn notes that a row of the head that was left out is not any more.
func (p *pump) letIn(r *row) {
	n, head := p.pass.head[r.shard]
	if b := p.behind[r.shard]; b != nil && head && r.id <= b.last {
		b.sum = b.sum.minus(sumOf(r.id))
		p.pass.head[r.shard] = n + 1
	}
}

// jump goes on behind what was left out, when a page of the head was read. If nothing there
// could be let in it has to walk.
func (p *pump) jump(shard int) {
	b, letIn := p.behind[shard], p.pass.head[shard]
	delete(p.pass.head, shard)
	if b == nil || letIn == 0 {
		delete(p.behind, shard)
		return
	}
	delete(p.pass.left, shard) // b has it
	p.pass.began[shard], p.pass.after[shard], p.pass.check[shard] = b.last, b.last, b.last
}

// doubt compares sums with what we have left out and what we know, and returns the shards
// where they do not agree: what was read behind it does not count.
func (p *pump) doubt(sums map[int]checksum) map[int]bool {
	if len(sums) == 0 {
		return nil
	}
	might := p.mightBePending()
	doubtful := map[int]bool{}
	for s, sum := range sums {
		b := p.behind[s]
		switch {
		case b == nil: // dropped while the read ran
			doubtful[s] = true
		case slices.Contains(might[s], sum.minus(b.sum)):
			b.wrong = time.Time{}
		default:
			doubtful[s] = true
			if b.wrong.IsZero() {
				b.wrong = time.Now()
			}
			if time.Since(b.wrong) > wrongMax {
				delete(p.behind, s)
			}
		}
	}
	return doubtful
}

// mightBePending returns, by shard, the sums there may be of rows that we know among what was
// left out: some were, or are being, marked or parked while the sums were read.
func (p *pump) mightBePending() map[int][]checksum {
	pending, marking := map[int]checksum{}, map[int]checksum{}
	among := func(r *row) bool {
		b := p.behind[r.shard]
		return b != nil && r.id <= b.last
	}
	for _, r := range p.known {
		if among(r) && !r.written {
			pending[r.shard] = pending[r.shard].plus(sumOf(r.id))
		}
	}
	for _, r := range p.marking {
		if among(r) {
			marking[r.shard] = marking[r.shard].plus(sumOf(r.id))
		}
	}
	might := map[int][]checksum{}
	for s := range p.behind {
		might[s] = []checksum{pending[s], pending[s].minus(marking[s])}
	}
	for _, r := range slices.Backward(p.retired) { // the last was written last
		if among(r) {
			pending[r.shard] = pending[r.shard].plus(sumOf(r.id))
			might[r.shard] = append(might[r.shard], pending[r.shard])
		}
	}
	return might
}

// leaveBehind notes what a pass has left out of a shard when it has come to its end.
func (p *pump) leaveBehind(shard int) {
	b, left := p.behind[shard], p.pass.left[shard]
	walked := p.pass.began[shard] == 0
	if walked {
		delete(p.behind, shard)
		p.walkTook = p.pass.took
	}
	if left != nil && left.void {
		delete(p.behind, shard)
		return
	}
	if left == nil || left.sum.rows < p.cfg.behindMin {
		return
	}
	left.last = p.pass.last
	switch {
	case walked:
		p.behind[shard] = left
	case b != nil: // it was not dropped on the way
		b.last, b.sum = left.last, b.sum.plus(left.sum)
		maps.Copy(b.keys, left.keys)
		maps.Copy(b.dests, left.dests)
		maps.Copy(b.lines, left.lines)
	}
}
