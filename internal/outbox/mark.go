package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"backstep/internal/sqltx"
)

// A mark is guarded by generation, so that it does not undo what an operator did meanwhile. It
// is not guarded by the lease, and takes rows that somebody parked under this generation as
// well: what was confirmed was confirmed. The primary key is forced: by an index on status it
// would wait for rows others are inserting.
const markPublishedSQL = `
UPDATE outbox_events FORCE INDEX (PRIMARY)
   SET status = 'PUBLISHED', published_at = NOW(6), last_error = NULL, next_attempt_at = NULL
 WHERE status IN ('PENDING', 'PARKED')
   AND generation = ?
   AND `

// Without a retention the row goes at once. The join is what lets the index be forced.
const deletePublishedSQL = `
DELETE e
  FROM outbox_events e FORCE INDEX (PRIMARY)
 WHERE e.status IN ('PENDING', 'PARKED')
   AND e.generation = ?
   AND `

// markPublished marks rows, or deletes them, with one statement for up to sqltx.MaxIn of a
// generation; there is one generation unless an operator has requeued something. Each is a transaction of its own: that is one
// round trip instead of four, and ctx can end it wherever it is. Repeating it is harmless,
// whatever became of it: the guard makes it a no-op.
func (r *Relay) markPublished(ctx context.Context, rows []*row) error {
	query := markPublishedSQL
	if r.cfg.DeletePublished {
		query = deletePublishedSQL
	}
	byGeneration := map[uint32][]uint64{}
	for _, row := range rows {
		byGeneration[row.generation] = append(byGeneration[row.generation], row.id)
	}
	for generation, all := range byGeneration {
		slices.Sort(all)
		for ids := range slices.Chunk(all, sqltx.MaxIn) {
			condition, args := among(ids)
			if _, err := r.db.ExecContext(ctx, query+condition, append([]any{generation}, args...)...); err != nil {
				return fmt.Errorf("mark %d outbox rows published: %w", len(ids), err)
			}
		}
	}
	return nil
}

// longRun is how many ids in a row are worth a range.
const longRun = 8

// among returns the condition that a row is one of ids, which are sorted. Ids that follow each
// other without a gap become a range: the server walks along it instead of searching for each,
// a fifth less work for a mark. A gap is never covered, a row may yet commit in it.
func among(ids []uint64) (condition string, args []any) {
	var ranges string
	var single []any
	for len(ids) > 0 {
		n := 1
		for n < len(ids) && ids[n] == ids[n-1]+1 {
			n++
		}
		run := ids[:n]
		ids = ids[n:]
		if n >= longRun {
			ranges += "id BETWEEN ? AND ? OR "
			args = append(args, run[0], run[n-1])
			continue
		}
		for _, id := range run {
			single = append(single, id)
		}
	}
	if len(single) == 0 {
		return "(" + strings.TrimSuffix(ranges, " OR ") + ")", args
	}
	return "(" + ranges + "id IN (" + sqltx.Placeholders(len(single)) + "))", append(args, single...)
}

// Refusals and parks are decisions of the shard's owner alone: the lease's epoch is checked
// in the same statement.
const (
	refuseSQL = `
UPDATE outbox_events e
  JOIN outbox_shards s ON s.shard = e.shard AND s.owner = ? AND s.epoch = ?
   SET e.attempts = e.attempts + ?, e.last_error = ?, e.next_attempt_at = NOW(6) + INTERVAL ? MICROSECOND
 WHERE e.id = ?
   AND e.status = 'PENDING'
   AND e.generation = ?`

	parkSQL = `
UPDATE outbox_events e
  JOIN outbox_shards s ON s.shard = e.shard AND s.owner = ? AND s.epoch = ?
   SET e.status = 'PARKED', e.last_error = ?, e.next_attempt_at = NULL
 WHERE e.id = ?
   AND e.status = 'PENDING'
   AND e.generation = ?`
)

// refusal is a row the broker did not take.
type refusal struct {
	row    *row
	reason string
	wait   time.Duration // until the next attempt
	times  int           // it was refused since it was last charged for it
}

// charge counts refusals. Those of rows or shards that have changed hands count for nothing.
func (r *Relay) charge(ctx context.Context, refusals []*refusal) error {
	if len(refusals) == 0 {
		return nil
	}
	err := sqltx.WithTx(ctx, r.db, func(ctx context.Context, tx *sqltx.Tx) error {
		for _, f := range refusals {
			if _, err := tx.Exec(ctx, refuseSQL, []byte(r.cfg.ID), f.row.epoch, f.times, words(f.reason),
				f.wait.Microseconds(), f.row.id, f.row.generation); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("record refusals of %d outbox rows: %w", len(refusals), err)
	}
	return nil
}

// errNotOurs means the row or its shard changed hands, so there is nothing to decide here.
var errNotOurs = errors.New("outbox: row or lease changed")

// park writes a row off, and tells whoever waits for it.
func (r *Relay) park(ctx context.Context, f refusal) error {
	reason := words(f.reason)
	err := sqltx.WithTx(ctx, r.db, func(ctx context.Context, tx *sqltx.Tx) error {
		res, err := tx.Exec(ctx, parkSQL, []byte(r.cfg.ID), f.row.epoch, reason, f.row.id, f.row.generation)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(errNotOurs, err)
		}
		return r.cfg.Parked(ctx, tx, &f.row.msg, reason)
	})
	if err != nil {
		return fmt.Errorf("park outbox row %d: %w", f.row.id, err)
	}
	r.cfg.Log.Info("outbox row parked", "row", f.row.id, "message_id", f.row.msg.MessageID,
		"exchange", f.row.dest.exchange, "routing_key", f.row.dest.routingKey, "reason", f.reason)
	return nil
}
