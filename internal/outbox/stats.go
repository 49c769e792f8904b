package outbox

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Stats is the state of the outbox at a glance. No published row is counted but those of the
// last minute: there may be millions.
type Stats struct {
	At        time.Time `json:"at"` // by the database's clock, as all ages
	Pending   int       `json:"pending"`
	Oldest    float64   `json:"oldest_pending_seconds"` // since the oldest pending row was created
	Parked    int       `json:"parked"`
	Scheduled int       `json:"scheduled"`
	Due       int       `json:"due"`                // scheduled, and due: the leading relay moves them
	OldestDue float64   `json:"oldest_due_seconds"` // for how long the oldest has been due

	// PublishedEstimate is by the server's statistics, -1 if it has none.
	PublishedEstimate int64 `json:"published_estimate"`
	// Rate is rows published per second in the last RateOver seconds: a minute, or as long as
	// the last 10,000 rows took.
	Rate     float64 `json:"published_per_second"`
	RateOver float64 `json:"rate_over_seconds"`

	Shards       []ShardStats       `json:"shards"`
	Destinations []DestinationStats `json:"destinations"` // those with the most waiting first
	// Partial means that there are more than 100,000 pending or parked rows: Destinations
	// counts the oldest of them only.
	Partial bool `json:"destinations_partial,omitempty"`
}

// ShardStats is the part of one shard.
type ShardStats struct {
	Shard   int     `json:"shard"`
	Owner   string  `json:"owner,omitempty"` // the relay; "": none
	Pending int     `json:"pending"`
	Oldest  float64 `json:"oldest_pending_seconds"`
	Parked  int     `json:"parked"`
	Rate    float64 `json:"published_per_second"`
}

// DestinationStats is the part of one exchange and routing key.
type DestinationStats struct {
	Exchange   string  `json:"exchange"`
	RoutingKey string  `json:"routing_key"`
	Pending    int     `json:"pending"`
	Oldest     float64 `json:"oldest_pending_seconds"`
	Parked     int     `json:"parked"`
	Rate       float64 `json:"published_per_second"`
}

// Bounds of what is read to answer.
const (
	statsRows   = 100_000 // pending, and parked, rows that are looked at for their destinations
	rateRows    = 10_000  // published rows
	rateSeconds = 60
)

const (
	// One shard's part. Index entries of one status alone; no row is read. With shard IN (…)
	// MySQL 9 may scan the whole index.
	countShardSQL = `
(SELECT ?, COUNT(*)
   FROM outbox_events FORCE INDEX (ix_outbox_relay)
  WHERE shard = ?
    AND status = ?)`

	// Ids and creation times go the same way, so one row of each shard is read.
	oldestOfShardSQL = `
(SELECT shard, TIMESTAMPDIFF(MICROSECOND, created_at, NOW(6))
   FROM outbox_events FORCE INDEX (ix_outbox_relay)
  WHERE shard = ?
    AND status = 'PENDING'
  ORDER BY id
  LIMIT 1)`

	// Served by ix_outbox_retention, which has the rows of these statuses in id order.
	countDestinationsSQL = `
SELECT exchange, routing_key, COUNT(*), TIMESTAMPDIFF(MICROSECOND, MIN(created_at), NOW(6))
  FROM (SELECT exchange, routing_key, created_at
          FROM outbox_events FORCE INDEX (ix_outbox_retention)
         WHERE status = ?
         LIMIT ?) AS waiting
 GROUP BY exchange, routing_key`

	// Served by ix_outbox_retention, backwards.
	rateSQL = `
SELECT shard, exchange, routing_key, COUNT(*), TIMESTAMPDIFF(MICROSECOND, MIN(published_at), NOW(6))
  FROM (SELECT shard, exchange, routing_key, published_at
          FROM outbox_events FORCE INDEX (ix_outbox_retention)
         WHERE status = 'PUBLISHED'
           AND published_at > NOW(6) - INTERVAL ? SECOND
         ORDER BY published_at DESC, id DESC
         LIMIT ?) AS latest
 GROUP BY shard, exchange, routing_key`

	// Served by ix_scheduled_due; no row is read.
	countScheduledSQL = `
SELECT COUNT(*), COALESCE(SUM(due_at <= NOW(6)), 0),
       GREATEST(COALESCE(TIMESTAMPDIFF(MICROSECOND, MIN(due_at), NOW(6)), 0), 0), NOW(6)
  FROM scheduled_messages`

	// What the optimiser believes is live in every server; information_schema may be a day old.
	estimateSQL = `EXPLAIN FORMAT=TRADITIONAL SELECT COUNT(*) FROM outbox_events`
)

// beginner is a pool, or one connection.
type beginner interface {
	BeginTx(ctx context.Context, opts *sql.TxOptions) (*sql.Tx, error)
}

// LookAt returns the state of the outbox at one moment.
func LookAt(ctx context.Context, db beginner) (Stats, error) {
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true})
	if err != nil {
		return Stats{}, fmt.Errorf("outbox stats: %w", err)
	}
	defer tx.Rollback() //nolint:errcheck // it has written nothing
	st := stats{Stats: Stats{Shards: make([]ShardStats, message.Shards)}, byDestination: map[destination]*DestinationStats{}}
	for i := range st.Shards {
		st.Shards[i].Shard = i
	}
	for _, part := range []struct {
		what string
		read func(context.Context, sqltx.Querier) error
	}{
		{"owners of the shards", st.readOwners},
		{"pending and parked rows", st.countShards},
		{"oldest pending rows", st.readOldest},
		{"destinations", st.countDestinations},
		{"rows published lately", st.readRate},
		{"scheduled messages", st.countScheduled},
		{"estimate of published rows", st.readEstimate},
	} {
		if err := part.read(ctx, tx); err != nil {
			return Stats{}, fmt.Errorf("outbox stats: %s: %w", part.what, err)
		}
	}
	for _, d := range st.byDestination {
		st.Destinations = append(st.Destinations, *d)
	}
	slices.SortFunc(st.Destinations, func(a, b DestinationStats) int {
		return cmp.Or(cmp.Compare(b.Pending+b.Parked, a.Pending+a.Parked), cmp.Compare(b.Rate, a.Rate),
			cmp.Compare(a.Exchange, b.Exchange), cmp.Compare(a.RoutingKey, b.RoutingKey))
	})
	return st.Stats, nil
}

// stats is Stats in the making.
type stats struct {
	Stats
	byDestination map[destination]*DestinationStats
}

func seconds(microseconds int64) float64 { return float64(microseconds) / 1e6 }

func (s *stats) destination(exchange, routingKey []byte) *DestinationStats {
	k := destination{exchange: string(exchange), routingKey: string(routingKey)}
	if s.byDestination[k] == nil {
		s.byDestination[k] = &DestinationStats{Exchange: k.exchange, RoutingKey: k.routingKey}
	}
	return s.byDestination[k]
}

func (s *stats) readOwners(ctx context.Context, q sqltx.Querier) error {
	return scan(ctx, q, `SELECT shard, owner FROM outbox_shards WHERE owner IS NOT NULL`, func(rows *sql.Rows) error {
		var shard int
		var owner []byte
		if err := rows.Scan(&shard, &owner); err != nil {
			return err
		}
		s.Shards[shard].Owner = string(owner)
		return nil
	})
}

func (s *stats) countShards(ctx context.Context, q sqltx.Querier) error {
	count := func(status Status, total *int, of func(*ShardStats) *int) error {
		query, args := countQuery(status)
		return scan(ctx, q, query, func(rows *sql.Rows) error {
			var shard, n int
			if err := rows.Scan(&shard, &n); err != nil {
				return err
			}
			*of(&s.Shards[shard]) = n
			*total += n
			return nil
		}, args...)
	}
	if err := count(StatusPending, &s.Pending, func(sh *ShardStats) *int { return &sh.Pending }); err != nil {
		return err
	}
	return count(StatusParked, &s.Parked, func(sh *ShardStats) *int { return &sh.Parked })
}

// countQuery asks how many rows of a status each shard has.
func countQuery(s Status) (query string, args []any) {
	return eachShard(countShardSQL, func(shard int) []any { return []any{shard, shard, string(s)} })
}

// oldestQuery asks for the oldest pending row of each shard.
func oldestQuery() (query string, args []any) {
	return eachShard(oldestOfShardSQL, func(shard int) []any { return []any{shard} })
}

func eachShard(part string, argsOf func(shard int) []any) (query string, args []any) {
	for shard := range message.Shards {
		args = append(args, argsOf(shard)...)
	}
	return strings.Repeat(part+"\nUNION ALL", message.Shards-1) + part, args
}

func (s *stats) readOldest(ctx context.Context, q sqltx.Querier) error {
	query, args := oldestQuery()
	return scan(ctx, q, query, func(rows *sql.Rows) error {
		var shard int
		var age int64
		if err := rows.Scan(&shard, &age); err != nil {
			return err
		}
		s.Shards[shard].Oldest = seconds(age)
		s.Oldest = max(s.Oldest, seconds(age))
		return nil
	}, args...)
}

func (s *stats) countDestinations(ctx context.Context, q sqltx.Querier) error {
	for _, status := range []Status{StatusPending, StatusParked} {
		err := scan(ctx, q, countDestinationsSQL, func(rows *sql.Rows) error {
			var exchange, routingKey []byte
			var n int
			var age int64
			if err := rows.Scan(&exchange, &routingKey, &n, &age); err != nil {
				return err
			}
			d := s.destination(exchange, routingKey)
			if status == StatusParked {
				d.Parked = n
			} else {
				d.Pending, d.Oldest = n, seconds(age)
			}
			return nil
		}, string(status), statsRows)
		if err != nil {
			return err
		}
	}
	s.Partial = max(s.Pending, s.Parked) > statsRows
	return nil
}

func (s *stats) readRate(ctx context.Context, q sqltx.Querier) error {
	total, oldest := 0, int64(0)
	err := scan(ctx, q, rateSQL, func(rows *sql.Rows) error {
		var exchange, routingKey []byte
		var shard, n int
		var age int64
		if err := rows.Scan(&shard, &exchange, &routingKey, &n, &age); err != nil {
			return err
		}
		s.Shards[shard].Rate += float64(n)
		s.destination(exchange, routingKey).Rate += float64(n)
		total, oldest = total+n, max(oldest, age)
		return nil
	}, rateSeconds, rateRows)
	if err != nil {
		return err
	}
	s.RateOver = rateSeconds
	if total == rateRows { // there were more in the minute
		s.RateOver = max(seconds(oldest), 0.001)
	}
	s.Rate = float64(total) / s.RateOver
	for i := range s.Shards {
		s.Shards[i].Rate /= s.RateOver
	}
	for _, d := range s.byDestination {
		d.Rate /= s.RateOver
	}
	return nil
}

func (s *stats) countScheduled(ctx context.Context, q sqltx.Querier) error {
	var oldest int64
	if err := q.QueryRowContext(ctx, countScheduledSQL).Scan(&s.Scheduled, &s.Due, &oldest, &s.At); err != nil {
		return err
	}
	s.OldestDue = seconds(oldest)
	return nil
}

func (s *stats) readEstimate(ctx context.Context, q sqltx.Querier) error {
	s.PublishedEstimate = -1
	return scan(ctx, q, estimateSQL, func(rows *sql.Rows) error {
		names, err := rows.Columns()
		if err != nil {
			return err
		}
		values := make([]sql.RawBytes, len(names))
		into := make([]any, len(names))
		for i := range values {
			into[i] = &values[i]
		}
		if err := rows.Scan(into...); err != nil {
			return err
		}
		var n int64
		if at := slices.Index(names, "rows"); at >= 0 && values[at] != nil {
			if _, err := fmt.Sscan(string(values[at]), &n); err != nil {
				return err
			}
			s.PublishedEstimate = max(0, n-int64(s.Pending+s.Parked))
		}
		return nil
	})
}
