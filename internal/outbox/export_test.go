package outbox

import (
	"context"
	"database/sql"
	"maps"
	"slices"
	"time"
)

// What follows lets the tests take a relay's steps one by one.

// ReadQuery is the relay's read, of a pass that begins where after is 0. Known rows are skipped.
func ReadQuery(after map[int]uint64, last uint64, limit int, known ...uint64) (string, []any) {
	var pg page
	for _, s := range slices.Sorted(maps.Keys(after)) {
		pg = append(pg, span{shard: s, after: after[s], upTo: last, skip: known, limit: limit, first: after[s] == 0})
	}
	return pg.query()
}

// SumQuery is how the relay looks whether what it left out of shards is as it was: of each all
// up to an id, apart from known ones.
func SumQuery(upTo map[int]uint64, known ...uint64) (string, []any) {
	var parts []part
	for _, s := range slices.Sorted(maps.Keys(upTo)) {
		parts = append(parts, part{shard: s, upTo: upTo[s], known: known})
	}
	return sumQuery(parts)
}

// RowsRead, Jumps and Doubts are what the relay has counted.
func (r *Relay) RowsRead() int { return int(r.tally.rows.Load()) }
func (r *Relay) Jumps() int    { return int(r.tally.jumps.Load()) }
func (r *Relay) Doubts() int   { return int(r.tally.doubts.Load()) }

// WithBound returns c for a relay that keeps few rows that cannot be published.
func (c Config) WithBound(n int) Config {
	c.bound = n
	return c
}

// WithStretchTTL returns c for a relay that soon reads again what it left out.
func (c Config) WithStretchTTL(ttl time.Duration) Config {
	c.stretchTTL = ttl
	return c
}

// WithLeftOutMax returns c for a relay that leaves out rows of so many keys at most.
func (c Config) WithLeftOutMax(keys int) Config {
	c.leftOutMax = keys
	return c
}

// WithSchedulePoll returns c for a leader that looks for due messages so often if nobody rings.
func (c Config) WithSchedulePoll(d time.Duration) Config {
	c.schedulePoll, c.scheduleRest = d, d
	return c
}

// Promote moves one batch of due messages, whoever leads.
func (r *Relay) Promote(ctx context.Context) error { return r.promote(ctx) }

// FairShare is how many shards a relay should hold.
var FairShare = fairShare

// Leases are a relay's.
type Leases struct{ *leases }

// NewLeases returns leases that hold nothing.
func NewLeases(db *sql.DB, cfg Config) Leases { return Leases{newLeases(db, cfg.withDefaults())} }

// Renew is one heartbeat.
func (l Leases) Renew(ctx context.Context) error { return l.renew(ctx) }

// Watch is a look at the others.
func (l Leases) Watch(ctx context.Context) error { return l.watch(ctx) }

// Owned returns the shards held and their epochs.
func (l Leases) Owned() map[int]uint64 { return l.owned() }

// Release hands a shard over as if it were surplus.
func (l Leases) Release(ctx context.Context, shard int) error {
	l.mu.Lock()
	l.giveUp[shard] = true
	l.mu.Unlock()
	return l.release(ctx, shard)
}

// Leave releases everything.
func (l Leases) Leave(ctx context.Context) error { return l.leave(ctx) }

// Surplus returns the shards that wait to be released.
func (l Leases) Surplus() []int { return l.surplus() }

// ScheduleQueries are what the leader asks for due messages.
var ScheduleQueries = []string{nextDueSQL, selectDueSQL}

// SelectOldSQL is what the sweeper asks for.
const SelectOldSQL = selectOldSQL

// SweepIn is a sweep in a transaction of the caller's.
var SweepIn = sweep

// StatsQueries are what LookAt asks of outbox_events, with the index that must serve each.
func StatsQueries() (queries []IndexedQuery) {
	oldest, oldestArgs := oldestQuery()
	counts, countArgs := countQuery(StatusPending)
	return []IndexedQuery{
		{counts, countArgs, "ix_outbox_relay"},
		{oldest, oldestArgs, "ix_outbox_relay"},
		{countDestinationsSQL, []any{"PENDING", statsRows}, "ix_outbox_retention"},
		{countDestinationsSQL, []any{"PARKED", statsRows}, "ix_outbox_retention"},
		{rateSQL, []any{rateSeconds, rateRows}, "ix_outbox_retention"},
	}
}

// ListQuery is what List asks for one status.
func (f Filter) ListQuery(s Status, limit int) IndexedQuery {
	index, _, _, _ := f.where(s)
	query, args := f.query(itemColumnsSQL, s, s == StatusPublished, limit)
	return IndexedQuery{query, args, index}
}

// IndexedQuery is a query and the index that must serve it.
type IndexedQuery struct {
	SQL   string
	Args  []any
	Index string
}

// LocateQuery is how commands are found by their ids.
func LocateQuery(ids ...string) (string, []any) { return locateQuery(ids) }
