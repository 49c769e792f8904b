package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"backstep/internal/sqltx"
)

// sighting is what this relay last saw of a counter, and since when it has not moved: not
// before it was read, however long the reading took.
type sighting struct {
	count uint64
	moved time.Time
}

// shard is what this relay last saw of a shard.
type shard struct {
	sighting
	owner    *string // nil: nobody's
	epoch    uint64
	recalled bool // its owner is asked to hand it over
}

// sightings are all shards and all relays.
type sightings struct {
	at      time.Time
	shards  map[int]shard
	members map[string]sighting
}

// Shards, and members as if they were some. One statement: it is most of what an idle relay does.
const sightSQL = `
SELECT shard, owner, epoch, renewals, recalled FROM outbox_shards
 UNION ALL
SELECT NULL, relay_id, 0, heartbeats, FALSE FROM relay_members`

// look reads who holds what and remembers when it last moved. If that could not be watched
// for a whole TTL, because the database was away or this process was paused, nobody else is
// blamed for having stood still: it may have been away for them too.
func (s *sightings) look(ctx context.Context, db *sql.DB, ttl time.Duration) error {
	now := time.Now()
	blind := now.Sub(s.at) > ttl
	see := func(last sighting, count uint64) sighting {
		if blind || last.moved.IsZero() || last.count != count {
			return sighting{count, time.Now()}
		}
		return last
	}
	shards, members := map[int]shard{}, map[string]sighting{}
	err := scan(ctx, db, sightSQL, func(rows *sql.Rows) error {
		var id *int
		var sh shard
		var count uint64
		if err := rows.Scan(&id, &sh.owner, &sh.epoch, &count, &sh.recalled); err != nil {
			return err
		}
		if id == nil {
			members[*sh.owner] = see(s.members[*sh.owner], count)
			return nil
		}
		sh.sighting = see(s.shards[*id].sighting, count)
		shards[*id] = sh
		return nil
	})
	if err != nil {
		return fmt.Errorf("read outbox shards and relay members: %w", err)
	}
	s.at, s.shards, s.members = now, shards, members
	return nil
}

// untilDeath returns for how long nobody more can be given up who has not been yet.
func (s *sightings) untilDeath(ttl time.Duration) time.Duration {
	soonest := ttl
	see := func(last sighting) {
		if left := ttl - time.Since(last.moved); left > 0 {
			soonest = min(soonest, left)
		}
	}
	for _, sh := range s.shards {
		if sh.owner != nil {
			see(sh.sighting)
		}
	}
	for _, m := range s.members {
		see(m)
	}
	return soonest
}

// scan runs a query and calls each for each of its rows.
func scan(ctx context.Context, q sqltx.Querier, query string, each func(*sql.Rows) error, args ...any) error {
	rows, err := q.QueryContext(ctx, query, args...)
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
