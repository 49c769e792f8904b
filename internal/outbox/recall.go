package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"backstep/internal/sqltx"
)

const (
	selectOwnerSQL = `
SELECT s.owner, s.epoch, s.recalled, TIMESTAMPDIFF(MICROSECOND, m.heartbeat_at, NOW(6))
  FROM outbox_shards s
  LEFT JOIN relay_members m ON m.relay_id = s.owner
 WHERE s.shard = ?`

	recallSQL = `
UPDATE outbox_shards
   SET recalled = TRUE
 WHERE shard = ?
   AND owner = ?
   AND epoch = ?`

	// recallLook is how often we look whether a recall was answered.
	recallLook = 50 * time.Millisecond
)

// ownership is who owns a shard.
type ownership struct {
	owner    *string // nil: nobody
	epoch    uint64
	recalled bool
	silent   sql.NullInt64 // microseconds since the owner's last heartbeat
}

func ownerOf(ctx context.Context, q sqltx.Querier, shard int) (o ownership, err error) {
	if err := q.QueryRowContext(ctx, selectOwnerSQL, shard).Scan(&o.owner, &o.epoch, &o.recalled, &o.silent); err != nil {
		return o, fmt.Errorf("read owner of shard %d: %w", shard, err)
	}
	return o, nil
}

func (o ownership) String() string {
	switch {
	case o.owner == nil:
		return "no relay"
	case !o.silent.Valid:
		return fmt.Sprintf("relay %s, which has no heartbeat", *o.owner)
	}
	return fmt.Sprintf("relay %s, whose last heartbeat was %s ago", *o.owner,
		(time.Duration(o.silent.Int64) * time.Microsecond).Round(time.Millisecond))
}

// recall asks the owner of a shard to hand it over. When it has, no relay knows a row of it
// that is not PENDING, nothing of it is in flight, and what was confirmed is marked.
func recall(ctx context.Context, db *sql.DB, shard int) (was ownership, err error) {
	if was, err = ownerOf(ctx, db, shard); err != nil || was.owner == nil {
		return was, err
	}
	if _, err := db.ExecContext(ctx, recallSQL, shard, []byte(*was.owner), was.epoch); err != nil {
		return was, fmt.Errorf("recall shard %d: %w", shard, err)
	}
	return was, nil
}

// over reports whether the shard has been handed over since it was recalled from o.
func (o ownership) over(is ownership) bool {
	return o.owner == nil || is.owner == nil || *is.owner != *o.owner || is.epoch != o.epoch || !is.recalled
}
