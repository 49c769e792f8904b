package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"regexp"
	"strconv"
	"time"

	"backstep/internal/sqltx"
)

// RelayState is a relay as the database knows it. Whether it lives nobody can tell by a clock:
// other relays go by its counter (docs/adr/0001).
type RelayState struct {
	ID          string        `json:"relay_id"`
	Host        string        `json:"host,omitempty"`
	PID         int           `json:"pid,omitempty"` // 0: its id does not tell
	StartedAt   time.Time     `json:"started_at,omitzero"`
	HeartbeatAt time.Time     `json:"heartbeat_at,omitzero"` // zero: it owns shards and is no member (any more)
	Heartbeats  uint64        `json:"heartbeats,omitempty"`
	Silent      time.Duration `json:"-"` // since the last heartbeat, by the database's clock
	Uptime      time.Duration `json:"-"`
	Shards      []ShardState  `json:"shards"`
}

// ShardState is who owns a shard.
type ShardState struct {
	Shard       int           `json:"shard"`
	Epoch       uint64        `json:"epoch"`
	LeasedUntil time.Time     `json:"leased_until,omitzero"` // as its owner wrote; nobody decides by it
	Left        time.Duration `json:"-"`                     // until then, by the database's clock
	Recalled    bool          `json:"recalled,omitempty"`    // its owner is asked to hand it over
}

const (
	shardStatesSQL = `
SELECT shard, owner, epoch, recalled, leased_until, COALESCE(TIMESTAMPDIFF(MICROSECOND, NOW(6), leased_until), 0)
  FROM outbox_shards
 ORDER BY shard`

	relayStatesSQL = `
SELECT relay_id, host, heartbeats, started_at, heartbeat_at,
       TIMESTAMPDIFF(MICROSECOND, heartbeat_at, NOW(6)), TIMESTAMPDIFF(MICROSECOND, started_at, NOW(6))
  FROM relay_members
 ORDER BY relay_id`
)

// Relays returns the relays with the shards they own, and the shards that nobody owns.
func Relays(ctx context.Context, q sqltx.Querier) (relays []RelayState, free []ShardState, err error) {
	err = scan(ctx, q, relayStatesSQL, func(rows *sql.Rows) error {
		r := RelayState{Shards: []ShardState{}}
		var id, host []byte
		var silent, uptime int64
		if err := rows.Scan(&id, &host, &r.Heartbeats, &r.StartedAt, &r.HeartbeatAt, &silent, &uptime); err != nil {
			return err
		}
		r.ID, r.Host, r.PID = string(id), string(host), processOf(string(id))
		r.Silent, r.Uptime = time.Duration(silent)*time.Microsecond, time.Duration(uptime)*time.Microsecond
		relays = append(relays, r)
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("read relay members: %w", err)
	}
	err = scan(ctx, q, shardStatesSQL, func(rows *sql.Rows) error {
		var s ShardState
		var owner []byte
		var until sql.NullTime
		var left int64
		if err := rows.Scan(&s.Shard, &owner, &s.Epoch, &s.Recalled, &until, &left); err != nil {
			return err
		}
		s.LeasedUntil, s.Left = until.Time, time.Duration(left)*time.Microsecond
		if owner == nil {
			free = append(free, s)
			return nil
		}
		relays = own(relays, string(owner), s)
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("read outbox shards: %w", err)
	}
	return relays, free, nil
}

// own gives a shard to its owner, who may not be a member any more.
func own(relays []RelayState, owner string, s ShardState) []RelayState {
	for i := range relays {
		if relays[i].ID == owner {
			relays[i].Shards = append(relays[i].Shards, s)
			return relays
		}
	}
	return append(relays, RelayState{ID: owner, PID: processOf(owner), Shards: []ShardState{s}})
}

var relayIDForm = regexp.MustCompile(`-(\d+)-[0-9a-f]{8}$`)

// processOf returns the process id in a relay's id, 0 if it has another form than newRelayID's.
func processOf(relayID string) int {
	m := relayIDForm.FindStringSubmatch(relayID)
	if m == nil {
		return 0
	}
	pid, err := strconv.Atoi(m[1])
	if err != nil {
		return 0 // more digits than any process id
	}
	return pid
}
