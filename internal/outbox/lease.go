package outbox

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"fmt"
	"os"
	"sync"
	"time"
)

// A lease says which relay publishes a shard. Nobody's clock decides about it: the owner
// bumps a counter, and another relay may take the shard over when it has seen that counter
// stand still for the TTL on its own monotonic clock. The owner trusts its lease from the
// moment before the renewal was sent until TTL minus a margin later, which ends before
// anybody can have watched for a whole TTL. So a step of the database's clock, or a relay
// that is paused and wakes up, never makes two relays publish one shard on purpose.
type lease struct {
	epoch uint64
	until time.Time // monotonic: trusted before
}

// leases keeps this relay's share of the shards.
type leases struct {
	db  *sql.DB
	cfg Config

	mu      sync.Mutex // guards what follows; never held during I/O
	held    map[int]lease
	giveUp  map[int]bool // surplus or recalled: no new work of it; released when nothing is in flight
	changed chan struct{}

	// turn is held by one renewal, look or release at a time: what a look has read before a
	// release would bring the lease back after it.
	turn    chan struct{}
	seen    sightings // run's alone, as renewed
	renewed time.Time // monotonic: before the last renewal was sent
}

func newLeases(db *sql.DB, cfg Config) *leases {
	return &leases{
		db: db, cfg: cfg, held: map[int]lease{}, giveUp: map[int]bool{}, changed: make(chan struct{}, 1),
		turn: make(chan struct{}, 1),
	}
}

// margin covers the time between checking a lease and the bytes reaching the broker.
func (l *leases) margin() time.Duration { return l.cfg.LeaseTTL / 5 }

// owned returns the shards that may be read and published now, and their epochs.
func (l *leases) owned() map[int]uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	now, out := time.Now(), make(map[int]uint64, len(l.held))
	for s, h := range l.held {
		if now.Before(h.until) && !l.giveUp[s] {
			out[s] = h.epoch
		}
	}
	return out
}

// surplus returns the shards that wait to be released.
func (l *leases) surplus() []int {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []int
	for s := range l.giveUp {
		out = append(out, s)
	}
	return out
}

// run renews until ctx ends, first at once and then five times in a TTL. It looks more often:
// how late it sees that others come, go or die must not grow with the TTL.
//
// A relay that has not been ready to publish for a TTL, or ever, steps aside until it is: another
// may have its broker. If none has, nobody needs a shard.
func (l *leases) run(ctx context.Context, ready func() bool) {
	var trouble trouble
	var beat time.Time
	wasReady, aside := time.Time{}, true
	for ctx.Err() == nil {
		step, began := l.watch, time.Now()
		if ready() {
			wasReady, aside = began, false
		}
		gone := began.Sub(wasReady) > l.cfg.LeaseTTL
		switch {
		case aside:
			pause(ctx, min(l.cfg.idle.next(), l.cfg.LeaseTTL/5))
			continue
		case gone:
			step = l.stepAside
		case !began.Before(beat):
			step = l.renew
		}
		err := step(ctx)
		if err == nil && gone {
			aside, beat = true, time.Time{}
		}
		if ctx.Err() != nil {
			return
		}
		trouble.report(l.cfg.Log, "relay leases not renewed; trying again", err)
		wait := l.cfg.idle.next()
		if err == nil {
			if !began.Before(beat) {
				beat = began.Add(l.cfg.LeaseTTL / 5)
			}
			wait = min(wait, time.Until(beat), l.seen.untilDeath(l.cfg.LeaseTTL))
		}
		pause(ctx, wait)
	}
}

const (
	heartbeatSQL = `
INSERT INTO relay_members (relay_id, host, heartbeats, started_at, heartbeat_at)
VALUES (?, ?, 1, NOW(6), NOW(6))
    ON DUPLICATE KEY UPDATE heartbeats = heartbeats + 1, heartbeat_at = NOW(6)`

	renewSQL = `
UPDATE outbox_shards
   SET renewals = renewals + 1, leased_until = NOW(6) + INTERVAL ? MICROSECOND
 WHERE owner = ?`

	releaseShardSQL = `
UPDATE outbox_shards
   SET owner = NULL, leased_until = NULL, renewals = renewals + 1, recalled = FALSE
 WHERE shard = ?
   AND owner = ?`

	releaseAllSQL = `
UPDATE outbox_shards
   SET owner = NULL, leased_until = NULL, renewals = renewals + 1, recalled = FALSE
 WHERE owner = ?`

	leaveSQL = `DELETE FROM relay_members WHERE relay_id = ?`
)

// renew is one heartbeat. Each statement is a transaction of its own, so that a relay which
// is paused in the middle holds no row locks.
func (l *leases) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.LeaseTTL)
	defer cancel()
	done, err := l.take(ctx)
	if err != nil {
		return fmt.Errorf("renew shard leases: %w", err)
	}
	defer done()
	if _, err := l.db.ExecContext(ctx, heartbeatSQL, []byte(l.cfg.ID), []byte(l.cfg.Host)); err != nil {
		return fmt.Errorf("relay heartbeat: %w", err)
	}
	start := time.Now()
	if _, err := l.db.ExecContext(ctx, renewSQL, l.cfg.LeaseTTL.Microseconds(), []byte(l.cfg.ID)); err != nil {
		return fmt.Errorf("renew shard leases: %w", err)
	}
	l.renewed = start
	return l.look(ctx)
}

// watch is a look at the others between two heartbeats.
func (l *leases) watch(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.LeaseTTL)
	defer cancel()
	done, err := l.take(ctx)
	if err != nil {
		return fmt.Errorf("look at shard leases: %w", err)
	}
	defer done()
	return l.look(ctx)
}

// look finds out what is ours and what is to be done about it.
func (l *leases) look(ctx context.Context) error {
	if err := l.seen.look(ctx, l.db, l.cfg.LeaseTTL); err != nil {
		return err
	}
	l.confirm()
	return l.balance(ctx)
}

// take waits for our turn; done ends it.
func (l *leases) take(ctx context.Context) (done func(), err error) {
	select {
	case l.turn <- struct{}{}:
		return func() { <-l.turn }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// confirm makes held what the table says is ours: it was renewed, or taken, after renewed.
func (l *leases) confirm() {
	until := l.renewed.Add(l.cfg.LeaseTTL - l.margin())
	l.mu.Lock()
	defer l.mu.Unlock()
	held := make(map[int]lease, len(l.held))
	for shard, s := range l.seen.shards {
		if s.owner == nil || *s.owner != l.cfg.ID {
			continue
		}
		held[shard] = lease{epoch: s.epoch, until: until}
		if l.held[shard].epoch != s.epoch {
			l.notify()
		}
	}
	for shard := range l.held {
		if _, ok := held[shard]; !ok {
			l.cfg.Log.Warn("relay lost a shard to another relay", "shard", shard)
			delete(l.giveUp, shard)
		}
	}
	l.held = held
}

func (l *leases) notify() {
	select {
	case l.changed <- struct{}{}:
	default:
	}
}

// release hands a shard over at once, if it is surplus still. After an error it is.
func (l *leases) release(ctx context.Context, shard int) error {
	done, err := l.take(ctx)
	if err != nil {
		return fmt.Errorf("release shard %d: %w", shard, err)
	}
	defer done()
	l.mu.Lock()
	surplus := l.giveUp[shard]
	l.mu.Unlock()
	if !surplus {
		return nil
	}
	if _, err := l.db.ExecContext(ctx, releaseShardSQL, shard, []byte(l.cfg.ID)); err != nil {
		return fmt.Errorf("release shard %d: %w", shard, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.held, shard)
	delete(l.giveUp, shard)
	return nil
}

// stepAside leaves until the broker is back. What is in flight may go out twice: as when a relay
// is paused, first deliveries stay in order.
func (l *leases) stepAside(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.LeaseTTL)
	defer cancel()
	done, err := l.take(ctx)
	if err != nil {
		return err
	}
	defer done()
	l.mu.Lock()
	n := len(l.held)
	l.mu.Unlock()
	if n > 0 { // once, though the database may be away too
		l.cfg.Log.Warn("relay leaves its shards to others until it can publish again", "shards", n)
	}
	return l.leave(ctx)
}

// leave releases everything at once, when nothing is in flight and nothing is renewed any
// more. It goes by the table: a shard may have been taken without our knowing.
func (l *leases) leave(ctx context.Context) error {
	l.mu.Lock()
	clear(l.held)
	clear(l.giveUp)
	l.mu.Unlock()
	if _, err := l.db.ExecContext(ctx, releaseAllSQL, []byte(l.cfg.ID)); err != nil {
		return fmt.Errorf("release all shards: %w", err)
	}
	if _, err := l.db.ExecContext(ctx, leaveSQL, []byte(l.cfg.ID)); err != nil {
		return fmt.Errorf("leave relay members: %w", err)
	}
	return nil
}

func hostname() string {
	h, err := os.Hostname()
	if err != nil {
		return "unknown-host"
	}
	return h
}

func newRelayID(host string) string {
	var b [4]byte
	rand.Read(b[:]) // never fails, see its documentation
	return fmt.Sprintf("%.80s-%d-%s", host, os.Getpid(), hex.EncodeToString(b[:]))
}
