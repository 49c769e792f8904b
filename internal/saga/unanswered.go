package saga

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"time"

	"backstep/internal/sqltx"
)

// The command of another service's step that has had no reply by half of its deadline is emitted once
// more, with the id it had: it may be lost, and so may the reply, which comes again then. Nobody here
// can tell that from a participant that is slow, so it happens once for each attempt; again_at says
// when, and is NULL afterwards.
const (
	// They are locked.
	selectAgainSQL = `
SELECT id, again_at
  FROM saga_instances FORCE INDEX (PRIMARY)
 WHERE id IN (%s)
   AND again_at IS NOT NULL`

	// The deadline is counted from the publish, of the first copy: from now on it does not move.
	writeAgainSQL = `
UPDATE saga_instances FORCE INDEX (PRIMARY)
   SET again_at = ?, rescues = rescues + ?, awaited_since = ?,
       deadline_at = GREATEST(deadline_at, LEAST(CAST(? AS DATETIME(6)), COALESCE(saga_deadline_at, CAST('9999-12-31' AS DATETIME(6)))))
 WHERE id = ?`
)

// A worker of an earlier release that moves a saga on leaves the column as it is.
const clearAgainSQL = `UPDATE saga_instances SET again_at = NULL WHERE id = ?`

// staleAgain reports whether nothing is to be asked: what an instance awaits is not a participant's, nor awaited
// by the saga's doing any more, or its reply is here, and could not be handled yet.
func (b *batch) staleAgain(ctx context.Context, in *instance, d *dueSaga) (bool, error) {
	if in.status != Running && in.status != Compensating || !d.step.remote {
		return true, nil
	}
	b.find(in) // that its input decodes does not matter
	kept, err := b.kept(ctx, in)
	return kept != "", err
}

// askAgain emits those commands again, as many as one look may read. workedOff says whether a queue
// is, of what was published in the last outage: a reply may be in it.
func (k *Keeper) askAgain(ctx context.Context, p pulse, workedOff func(queue string) bool) error {
	if !workedOff(RepliesQueue) {
		return nil
	}
	for range maxOpen / duePage {
		page, more, err := k.nextDue(ctx, selectUnansweredSQL, &k.asked, p)
		if err != nil {
			return err
		}
		page = slices.DeleteFunc(page, func(d *dueSaga) bool { return !k.engine.fits(&d.waiting) }) // another worker knows it
		for some := range slices.Chunk(page, rescueBatch) {
			if err := k.askAgainSome(ctx, some, p); err != nil {
				return fmt.Errorf("emit commands without a reply once more: %w", err)
			}
		}
		if !more {
			return nil
		}
	}
	return nil
}

func (k *Keeper) askAgainSome(ctx context.Context, some []*dueSaga, p pulse) error {
	var emitted []*dueSaga
	err := k.inTx(ctx, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		emitted, err = k.askAgainTx(ctx, tx, slices.Clone(some), p)
		return err
	})
	if err != nil {
		return err
	}
	for _, d := range emitted {
		k.cfg.Log.Warn("no reply by half of the deadline; command emitted once more",
			"saga_id", d.id, "message_id", d.command, "queue", d.step.queue, "step", d.step.name, "attempt", d.attempt)
	}
	return nil
}

func (k *Keeper) askAgainTx(ctx context.Context, tx *sqltx.Tx, some []*dueSaga, p pulse) (emitted []*dueSaga, err error) {
	ids, sagas := make([]string, len(some)), make([]*waiting, len(some))
	for i, d := range some {
		ids[i], sagas[i] = d.id, &d.waiting
	}
	instances, err := awaited(ctx, tx, sagas)
	if err != nil {
		return nil, err
	}
	if some, err = unchanged(ctx, tx, some, ids, instances); err != nil {
		return nil, err
	}
	b := &batch{Engine: k.engine, tx: tx}
	var now []*waiting
	due := map[string]*dueSaga{} // by command
	for _, d := range some {
		stale, err := b.staleAgain(ctx, instances[d.id], d)
		if err != nil {
			return nil, err
		}
		switch half := d.published(p).Add(d.step.half()); {
		case stale:
			_, err = tx.Exec(ctx, clearAgainSQL, []byte(d.id))
		case half.After(p.virtual()):
			err = d.write(ctx, tx, p, half, 0)
		case d.due.After(p.virtual()): // else it is too late
			now, due[d.command] = append(now, &d.waiting), d
		}
		if err != nil {
			return nil, err
		}
	}
	sent, err := b.emitSame(ctx, instances, now, "no reply by half of the step's deadline")
	if err != nil {
		return nil, err
	}
	for _, w := range sent {
		d := due[w.command]
		if err := d.write(ctx, tx, p, time.Time{}, 1); err != nil {
			return nil, err
		}
		emitted = append(emitted, d)
	}
	return emitted, b.write(ctx)
}

// unchanged returns those that are as they were read, now that they are locked.
func unchanged(ctx context.Context, tx *sqltx.Tx, some []*dueSaga, ids []string, instances map[string]*instance) ([]*dueSaga, error) {
	rows, err := tx.Query(ctx, fmt.Sprintf(selectAgainSQL, sqltx.Placeholders(len(ids))), sqltx.Binary(ids)...)
	if err != nil {
		return nil, fmt.Errorf("read %d sagas again: %w", len(ids), err)
	}
	defer rows.Close()
	again := map[string]time.Time{}
	for rows.Next() {
		var id []byte
		var at time.Time
		if err := rows.Scan(&id, &at); err != nil {
			return nil, fmt.Errorf("read %d sagas again: %w", len(ids), err)
		}
		again[string(id)] = at
	}
	return slices.DeleteFunc(some, func(d *dueSaga) bool {
		in, at := instances[d.id], again[d.id]
		return in == nil || at.IsZero() || !at.Equal(d.again) || in.commandID != d.command
	}), rows.Err()
}

// published returns when the command was published, by the clock of deadlines. What is still to be is
// as if it were now.
func (d *dueSaga) published(p pulse) time.Time {
	thought := d.again.Add(-d.step.half())
	at := thought
	switch published := d.where.PublishedAt; {
	case d.where.Waits():
		at = p.virtual()
	case published.IsZero(): // swept
	case !published.Before(p.up):
		at = published.Add(-p.downtime)
	case d.attempt == 1: // nobody knows how much of the downtime is from before
		at = thought.Add(published.Sub(d.since))
	}
	if at.After(p.virtual()) {
		at = p.virtual()
	}
	if at.Before(thought) {
		at = thought
	}
	return at
}

// write writes when its command is to be emitted again, zero for never, that it was more times, and
// that its deadline is not before what it has from the publish.
func (d *dueSaga) write(ctx context.Context, tx *sqltx.Tx, p pulse, again time.Time, more int) error {
	since := d.since
	switch {
	case d.where.Waits():
		since = p.now
	case d.where.PublishedAt.After(since):
		since = d.where.PublishedAt
	}
	_, err := tx.Exec(ctx, writeAgainSQL, nullTime(again), more, nullTime(since), d.published(p).Add(d.step.deadline), []byte(d.id))
	return err
}

func nullTime(t time.Time) sql.NullTime { return sql.NullTime{Time: t, Valid: !t.IsZero()} }
