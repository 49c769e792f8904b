package outbox

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"backstep/internal/message"
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

// sighting is what this relay last saw of a counter, and since when it has not moved.
type sighting struct {
	owner  string
	epoch  uint64
	count  uint64
	moved  time.Time
	absent bool
}

// leases keeps this relay's share of the shards.
type leases struct {
	db  *sql.DB
	cfg Config

	mu      sync.Mutex // guards what follows; never held during I/O
	held    map[int]lease
	giveUp  map[int]bool // surplus: no new work of it; released when nothing is in flight
	changed chan struct{}

	shards  map[int]sighting // used by renew alone
	members map[string]sighting
}

func newLeases(db *sql.DB, cfg Config) *leases {
	return &leases{
		db: db, cfg: cfg, held: map[int]lease{}, giveUp: map[int]bool{}, changed: make(chan struct{}, 1),
		shards: map[int]sighting{}, members: map[string]sighting{},
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

// run renews until ctx ends. The first renewal happens at once.
func (l *leases) run(ctx context.Context) error {
	tick := time.NewTicker(l.cfg.LeaseTTL / 5)
	defer tick.Stop()
	failing := false
	for {
		err := l.renew(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !failing:
			l.cfg.Log.Warn("relay leases not renewed", "error", err)
		case err == nil && failing:
			l.cfg.Log.Info("relay leases renewed again")
		}
		failing = err != nil
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
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

	selectShardsSQL  = `SELECT shard, owner, epoch, renewals FROM outbox_shards ORDER BY shard`
	selectMembersSQL = `SELECT relay_id, heartbeats FROM relay_members`

	takeShardSQL = `
UPDATE outbox_shards
   SET owner = ?, epoch = epoch + 1, renewals = renewals + 1, leased_until = NOW(6) + INTERVAL ? MICROSECOND
 WHERE shard = ?
   AND epoch = ?
   AND renewals = ?
   AND owner <=> ?`

	releaseShardSQL = `
UPDATE outbox_shards
   SET owner = NULL, leased_until = NULL, renewals = renewals + 1
 WHERE shard = ?
   AND owner = ?`

	buryMemberSQL = `DELETE FROM relay_members WHERE relay_id = ? AND heartbeats = ?`
	leaveSQL      = `DELETE FROM relay_members WHERE relay_id = ?`
)

// renew is one heartbeat. Each statement is a transaction of its own, so that a relay which
// is paused in the middle holds no row locks.
func (l *leases) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.LeaseTTL)
	defer cancel()
	if _, err := l.db.ExecContext(ctx, heartbeatSQL, []byte(l.cfg.ID), []byte(l.cfg.Host)); err != nil {
		return fmt.Errorf("relay heartbeat: %w", err)
	}
	start := time.Now()
	if _, err := l.db.ExecContext(ctx, renewSQL, l.cfg.LeaseTTL.Microseconds(), []byte(l.cfg.ID)); err != nil {
		return fmt.Errorf("renew shard leases: %w", err)
	}
	if err := l.look(ctx); err != nil {
		return err
	}
	until := start.Add(l.cfg.LeaseTTL - l.margin())
	l.confirm(until)
	return l.balance(ctx, start)
}

// look reads who holds what and remembers when it last moved.
func (l *leases) look(ctx context.Context) error {
	now := time.Now()
	err := scan(ctx, l.db, selectShardsSQL, func(rows *sql.Rows) error {
		var shard int
		var owner []byte
		var s sighting
		if err := rows.Scan(&shard, &owner, &s.epoch, &s.count); err != nil {
			return err
		}
		s.owner, s.absent, s.moved = string(owner), owner == nil, now
		if last, ok := l.shards[shard]; ok && last.owner == s.owner && last.epoch == s.epoch && last.count == s.count {
			s.moved = last.moved
		}
		l.shards[shard] = s
		return nil
	})
	if err != nil {
		return fmt.Errorf("read outbox shards: %w", err)
	}
	seen := map[string]sighting{}
	err = scan(ctx, l.db, selectMembersSQL, func(rows *sql.Rows) error {
		var id []byte
		var s sighting
		if err := rows.Scan(&id, &s.count); err != nil {
			return err
		}
		s.owner, s.moved = string(id), now
		if last, ok := l.members[s.owner]; ok && last.count == s.count {
			s.moved = last.moved
		}
		seen[s.owner] = s
		return nil
	})
	if err != nil {
		return fmt.Errorf("read relay members: %w", err)
	}
	l.members = seen
	return nil
}

func scan(ctx context.Context, db *sql.DB, query string, each func(*sql.Rows) error) error {
	rows, err := db.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := each(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// confirm makes held what the table says is ours.
func (l *leases) confirm(until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	held := make(map[int]lease, len(l.held))
	for shard, s := range l.shards {
		if s.absent || s.owner != l.cfg.ID {
			continue
		}
		held[shard] = lease{epoch: s.epoch, until: until}
		if _, had := l.held[shard]; !had {
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

// balance takes free and abandoned shards up to our fair share, and offers what is over it.
func (l *leases) balance(ctx context.Context, start time.Time) error {
	var live []string
	for id, m := range l.members {
		if id != l.cfg.ID && time.Since(m.moved) > 2*l.cfg.LeaseTTL {
			// Only tidiness: a member that comes back inserts itself again.
			if _, err := l.db.ExecContext(ctx, buryMemberSQL, []byte(id), m.count); err != nil {
				return fmt.Errorf("remove dead relay %s: %w", id, err)
			}
		}
		if time.Since(m.moved) <= l.cfg.LeaseTTL {
			live = append(live, id)
		}
	}
	share := fairShare(live, l.cfg.ID)

	l.mu.Lock()
	have := len(l.held) - len(l.giveUp)
	for shard := range l.held {
		if have > share && !l.giveUp[shard] {
			l.giveUp[shard] = true
			have--
			l.notify()
		}
		if have < share && l.giveUp[shard] {
			delete(l.giveUp, shard)
			have++
		}
	}
	l.mu.Unlock()

	for shard := 0; shard < message.Shards && have < share; shard++ {
		s := l.shards[shard]
		free := s.absent || s.owner != l.cfg.ID && time.Since(s.moved) > l.cfg.LeaseTTL
		if !free {
			continue
		}
		took, err := l.take(ctx, shard, s, start)
		if err != nil {
			return err
		}
		if took {
			have++
		}
	}
	return nil
}

func (l *leases) take(ctx context.Context, shard int, s sighting, start time.Time) (bool, error) {
	var owner []byte
	if !s.absent {
		owner = []byte(s.owner)
	}
	res, err := l.db.ExecContext(ctx, takeShardSQL,
		[]byte(l.cfg.ID), l.cfg.LeaseTTL.Microseconds(), shard, s.epoch, s.count, owner)
	if err != nil {
		return false, fmt.Errorf("take shard %d: %w", shard, err)
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return false, err // somebody else was faster, or its owner lives
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held[shard] = lease{epoch: s.epoch + 1, until: start.Add(l.cfg.LeaseTTL - l.margin())}
	l.notify()
	if !s.absent {
		l.cfg.Log.Info("relay took over a shard", slog.Int("shard", shard), slog.String("from", s.owner))
	}
	return true, nil
}

// release hands a shard over at once.
func (l *leases) release(ctx context.Context, shard int) error {
	l.mu.Lock()
	delete(l.held, shard)
	delete(l.giveUp, shard)
	l.mu.Unlock()
	if _, err := l.db.ExecContext(ctx, releaseShardSQL, shard, []byte(l.cfg.ID)); err != nil {
		return fmt.Errorf("release shard %d: %w", shard, err)
	}
	return nil
}

// leave releases everything, in order and at once, when nothing is in flight any more.
func (l *leases) leave(ctx context.Context) error {
	for shard := range message.Shards {
		l.mu.Lock()
		_, ours := l.held[shard]
		l.mu.Unlock()
		if !ours {
			continue
		}
		if err := l.release(ctx, shard); err != nil {
			return err
		}
	}
	if _, err := l.db.ExecContext(ctx, leaveSQL, []byte(l.cfg.ID)); err != nil {
		return fmt.Errorf("leave relay members: %w", err)
	}
	return nil
}

// fairShare returns how many shards relay id should hold among the live ones: all get the
// same, the first by name get one more until the shards are used up.
func fairShare(live []string, id string) int {
	if !slices.Contains(live, id) {
		live = append(live, id)
	}
	slices.Sort(live)
	share := message.Shards / len(live)
	if slices.Index(live, id) < message.Shards%len(live) {
		share++
	}
	return share
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
