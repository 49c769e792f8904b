package saga

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"backstep/internal/sqltx"
)

// The pulse is beaten once a second while the database answers and some worker has its session
// with the broker. A gap of more than maxGap was an outage, and is added to the downtime. Deadlines
// are by NOW(6) less the downtime, a clock that stood still meanwhile: no row of a saga has to be
// touched for it. A clock that is set forward looks like an outage, one that is set back delays
// deadlines by as much: neither lets one fire early, which could not be made good.
const (
	maxGap    = 10 * time.Second
	minBeat   = 700 * time.Millisecond // whoever finds it beaten so lately does nothing
	freshBeat = 5 * time.Second        // else nobody knows whether all is up
)

const readPulseSQL = `
SELECT NOW(6), beat_at, up_since, downtime_us
  FROM saga_pulse
 WHERE id = 1`

// One statement, under the lock of the row. Assignments are made from left to right: beat_at is
// still the last beat for those before it.
const beatSQL = `
INSERT INTO saga_pulse (id, beat_at, up_since, downtime_us)
VALUES (1, NOW(6), NOW(6), 0)
    ON DUPLICATE KEY UPDATE
       downtime_us = downtime_us + IF(beat_at < NOW(6) - INTERVAL ? MICROSECOND, TIMESTAMPDIFF(MICROSECOND, beat_at, NOW(6)), 0),
       up_since = IF(ABS(TIMESTAMPDIFF(MICROSECOND, beat_at, NOW(6))) > ?, NOW(6), up_since),
       beat_at = IF(ABS(TIMESTAMPDIFF(MICROSECOND, beat_at, NOW(6))) < ?, beat_at, NOW(6))`

// pulse is the row, and when it was read by the same clock. The zero value: there never was a beat.
type pulse struct {
	now, beat, up time.Time
	downtime      time.Duration
}

// fresh reports whether somebody keeps it: what is up is known.
func (p pulse) fresh() bool { return !p.beat.IsZero() && p.now.Sub(p.beat).Abs() < freshBeat }

// virtual returns the time by the clock that deadlines are by.
func (p pulse) virtual() time.Time { return p.now.Add(-p.downtime) }

func readPulse(ctx context.Context, q sqltx.Querier) (p pulse, err error) {
	var us int64
	err = q.QueryRowContext(ctx, readPulseSQL).Scan(&p.now, &p.beat, &p.up, &us)
	if errors.Is(err, sql.ErrNoRows) {
		return pulse{}, nil
	}
	if err != nil {
		return pulse{}, fmt.Errorf("read the pulse: %w", err)
	}
	p.downtime = time.Duration(us) * time.Microsecond
	return p, nil
}

// beatOnce writes down how far the process has come, and keeps the pulse if all is up and nobody
// else has just done so.
func (k *Keeper) beatOnce(ctx context.Context) error {
	if err := k.tell(ctx); err != nil {
		return err
	}
	p, err := readPulse(ctx, k.db)
	if err != nil {
		return err
	}
	if !k.cfg.Ready() || !p.beat.IsZero() && p.now.Sub(p.beat).Abs() < minBeat {
		return nil
	}
	return k.beat(ctx, p)
}

func (k *Keeper) beat(ctx context.Context, before pulse) error {
	_, err := k.db.ExecContext(ctx, beatSQL, maxGap.Microseconds(), maxGap.Microseconds(), minBeat.Microseconds())
	if err != nil {
		return fmt.Errorf("keep the pulse: %w", err)
	}
	k.beaten.Store(true)
	if gap := before.now.Sub(before.beat); !before.beat.IsZero() && gap > maxGap {
		k.cfg.Log.Info("database, broker and workers are up again; deadlines stood still meanwhile", "gap", gap.Round(time.Millisecond))
	}
	return nil
}
