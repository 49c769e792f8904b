package saga

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"time"

	"backstep/internal/sqltx"
)

// Standing is how far this process has come with a queue.
type Standing struct {
	Subscribed bool // else it holds nothing, and nothing comes
	// Latest is a time such that nothing published before it is in our hands, and something
	// published then, or later, has been. Zero: not known.
	Latest time.Time
	Idle   time.Duration // for how long nothing has been in our hands; 0: something is
}

// told is what was last written down about a queue.
type told struct {
	Standing
	at, idleSince time.Time // by our own clock
}

const (
	tellAgain = 5 * time.Second  // also if nothing has changed
	alive     = 15 * time.Second // a consumer that was not heard of for so long holds nothing
	forgotten = time.Hour

	// A consumer that has just subscribed is idle too, until the first delivery is there.
	idleEnough = 2 * time.Second
)

const (
	tellSQL = `
INSERT INTO saga_consumers (queue, consumer, latest_at, idle_since, beat_at)
VALUES %s
    ON DUPLICATE KEY UPDATE latest_at = VALUES(latest_at), idle_since = VALUES(idle_since), beat_at = VALUES(beat_at)`

	// A publisher's clock may be ahead; nothing was published later than now.
	tellTuple = `(?, ?, LEAST(CAST(? AS DATETIME(6)), NOW(6)), NOW(6) - INTERVAL ? MICROSECOND, NOW(6))`

	// Of another queue's consumers none is looked at.
	forgetSQL = `DELETE FROM saga_consumers WHERE queue IN (%s) AND consumer = ?`
	sweepSQL  = `DELETE FROM saga_consumers WHERE beat_at < NOW(6) - INTERVAL ? SECOND`
)

// tell writes down what has changed about our queues, in one statement for all.
func (k *Keeper) tell(ctx context.Context) error {
	now := time.Now()
	var args []any
	news := map[string]told{}
	for queue, standing := range k.cfg.Queues {
		t := told{standing(), now, now}
		t.idleSince = now.Add(-t.Idle)
		if !t.Subscribed || !t.differs(k.told[queue]) {
			continue // one that is not subscribed is soon forgotten
		}
		var latest, idle any
		if !t.Latest.IsZero() {
			latest = storable(t.Latest.UTC())
		}
		if t.Idle > 0 {
			idle = t.Idle.Microseconds()
		}
		args = append(args, []byte(queue), []byte(k.cfg.Consumer), latest, idle)
		news[queue] = t
	}
	if len(news) == 0 {
		return nil
	}
	tuples := strings.Repeat(tellTuple+", ", len(news)-1) + tellTuple
	if _, err := k.db.ExecContext(ctx, fmt.Sprintf(tellSQL, tuples), args...); err != nil {
		return fmt.Errorf("write down the progress of %d queues: %w", len(news), err)
	}
	for queue, t := range news {
		k.told[queue] = t
	}
	return nil
}

// storable returns a time that the database knows: any client can say any in its messages.
func storable(at time.Time) time.Time {
	switch {
	case at.Before(beginning):
		return beginning
	case at.Year() > 9998:
		return time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	return at
}

func (t told) differs(before told) bool {
	return t.at.Sub(before.at) > tellAgain || !t.Latest.Equal(before.Latest) || (t.Idle > 0) != (before.Idle > 0) ||
		t.Idle > 0 && t.idleSince.Sub(before.idleSince).Abs() > beatPause/2
}

// forget takes back what was written down: a process that has ended is not waited for.
func (k *Keeper) forget(ctx context.Context) error {
	var args []any
	for queue := range k.cfg.Queues {
		args = append(args, []byte(queue))
	}
	if len(args) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), forgetting)
	defer cancel()
	queues := sqltx.Placeholders(len(args))
	if _, err := k.db.ExecContext(ctx, fmt.Sprintf(forgetSQL, queues), append(args, []byte(k.cfg.Consumer))...); err != nil {
		k.cfg.Log.Debug("consumer not forgotten", "error", err) // others do not count it any more in some seconds
	}
	return nil
}

const consumersSQL = `
SELECT queue, consumer, latest_at, idle_since
  FROM saga_consumers
 WHERE beat_at BETWEEN NOW(6) - INTERVAL ? SECOND AND NOW(6) + INTERVAL ? SECOND`

// consumer is a live consumer of a queue.
type consumer struct {
	id           string
	latest, idle time.Time // latest_at and idle_since; zero: NULL
}

// consumers returns the live ones by queue.
func consumers(ctx context.Context, q sqltx.Querier) (map[string][]consumer, error) {
	rows, err := q.QueryContext(ctx, consumersSQL, int(alive.Seconds()), int(alive.Seconds()))
	if err != nil {
		return nil, fmt.Errorf("read consumers: %w", err)
	}
	defer rows.Close()
	all := map[string][]consumer{}
	for rows.Next() {
		var queue, id []byte
		var latest, idle sql.NullTime
		if err := rows.Scan(&queue, &id, &latest, &idle); err != nil {
			return nil, fmt.Errorf("read consumers: %w", err)
		}
		all[string(queue)] = append(all[string(queue)], consumer{string(id), latest.Time, idle.Time})
	}
	return all, rows.Err()
}

// workedOff reports whether nothing that was published before a time can still be with one of
// these consumers, or waits for them. If nobody can tell, since there are none, or one has been given
// nothing that says when it was published, it is what others have decided.
func workedOff(of []consumer, before, now time.Time, untold bool) bool {
	for _, c := range of {
		switch {
		case !c.latest.Before(before):
		case !c.idle.IsZero() && now.Sub(c.idle) >= idleEnough:
		case c.idle.IsZero() && c.latest.IsZero() && untold:
		default:
			return false
		}
	}
	return len(of) > 0 || untold
}

// first returns the one of the consumers that does what only one has to do, "" if there is none.
func first(of []consumer) (id string) {
	for _, c := range of {
		if id == "" || c.id < id {
			id = c.id
		}
	}
	return id
}

func among(of []consumer, id string) bool {
	return slices.ContainsFunc(of, func(c consumer) bool { return c.id == id })
}

// passed returns until when whatever was published to the queue of these consumers must have been
// delivered, if it was not lost: each has since been given something published later by more than
// limit, or has had nothing at all for that long. Zero: nobody can tell.
func passed(of []consumer, now time.Time, limit time.Duration) (until time.Time) {
	for i, c := range of {
		var u time.Time
		switch {
		case !c.idle.IsZero() && !c.idle.After(now.Add(-limit)):
			u = now.Add(-limit)
		case !c.latest.IsZero():
			u = c.latest.Add(-limit)
		}
		if i == 0 || u.Before(until) {
			until = u
		}
	}
	return until
}
