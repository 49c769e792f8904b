package saga

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"backstep/internal/sqltx"
)

const duePage = 200 // sagas that one statement reads whose time has come

// Served by the index of the column (and the id behind it), which is forced: no filesort, and no row
// is read whose time has not come.
const selectDueSQL = `
SELECT id, type, version, plan, current_step, command_id, attempt, rescues, awaited_since, deadline_at, again_at,
       COALESCE(saga_deadline_at <= ?, FALSE)
  FROM saga_instances FORCE INDEX (%[2]s)
 WHERE %[1]s >= ?
   AND %[1]s <= ?
   AND (%[1]s > ? OR id > ?)
   %[3]s
 ORDER BY %[1]s, id
 LIMIT ?`

var (
	selectAtDeadlineSQL = fmt.Sprintf(selectDueSQL, "deadline_at", "ix_saga_deadline", "AND status IN ('RUNNING', 'COMPENSATING')")
	selectUnansweredSQL = fmt.Sprintf(selectDueSQL, "again_at", "ix_saga_again", "") // see staleAgain
)

// A step's deadline runs from the publish of its command, and was written when that was added to
// the outbox: the time in between comes on top, once, since from then on it is awaited.
const putOffSQL = `
UPDATE saga_instances FORCE INDEX (PRIMARY)
   SET deadline_at = LEAST(deadline_at + INTERVAL TIMESTAMPDIFF(MICROSECOND, awaited_since, ?) MICROSECOND,
                           COALESCE(saga_deadline_at, '9999-12-31')),
       awaited_since = ?
 WHERE id = ?
   AND command_id = ?
   AND awaited_since = ?`

// dueSaga is a saga whose time has come by the clock that deadlines are by.
type dueSaga struct {
	waiting
	step              *step
	attempt           int
	since, due, again time.Time // awaited_since, deadline_at, again_at; zero: NULL
	whole             bool      // the saga's own deadline has passed, not only the step's
}

// scanDeadlines looks at what has come to its time, if the time has been fair: all has been up for a
// while, and what was published before has been delivered.
func (k *Keeper) scanDeadlines(ctx context.Context) error {
	p, err := readPulse(ctx, k.db)
	if err != nil || !p.fresh() || p.now.Sub(p.up) < k.cfg.Settle {
		return err
	}
	all, err := consumers(ctx, k.db)
	if err != nil {
		return err
	}
	workedOff := func(queue string) bool {
		return workedOff(all[queue], p.up, p.now, p.now.Sub(p.up) >= k.cfg.RescueAnyway)
	}
	return errors.Join(k.askAgain(ctx, p, workedOff), k.endOverdue(ctx, p, workedOff), k.tellOfStrangers(ctx, p))
}

// endOverdue ends what has come to its deadline, a page at a time. What has not been published yet,
// or was later than thought, gets the time that it lacks.
func (k *Keeper) endOverdue(ctx context.Context, p pulse, workedOff func(queue string) bool) error {
	due, _, err := k.nextDue(ctx, selectAtDeadlineSQL, &k.due, p)
	if err != nil {
		return err
	}
	due = slices.DeleteFunc(due, func(d *dueSaga) bool {
		if _, err := k.engine.Definition(d.typ, d.version); err != nil { // another worker knows it
			return true
		}
		d.queue = RepliesQueue // which says what became of a remote step
		if d.step != nil && !d.step.remote {
			d.queue = d.step.queue
		}
		return !workedOff(d.queue)
	})
	if len(due) == 0 {
		return nil
	}
	var passed []string
	err = sqltx.WithTx(ctx, k.db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		passed, err = putOff(ctx, tx, due, p)
		return err
	})
	if err != nil {
		return fmt.Errorf("put off deadlines: %w", err)
	}
	if len(passed) == 0 {
		return nil
	}
	return k.expire(ctx, passed)
}

// expire ends sagas at their deadlines, together, or, if that fails, one by one: a hook that fails, or
// takes too long, is its own saga's trouble.
func (k *Keeper) expire(ctx context.Context, ids []string) error {
	err := k.inTime(ctx, func(ctx context.Context, tx *sqltx.Tx) error { return k.engine.deadlinePassed(ctx, tx, ids) })
	switch {
	case err == nil:
		for _, id := range ids {
			delete(k.broke, id)
		}
		return nil
	case ctx.Err() != nil:
		return err
	case len(ids) == 1:
		return errors.Join(fmt.Errorf("end saga %s at its deadline: %w", ids[0], err), k.unended(ctx, ids[0], err))
	}
	var errs []error
	for i := range ids {
		errs = append(errs, k.expire(ctx, ids[i:i+1]))
	}
	return errors.Join(errs...)
}

// maxLost is how often the connection may be lost in ending a saga, to a database that is up, or room be missing,
// until its hook is to blame, as a message is in a lane.
const maxLost = 5

// isOutage reports whether the database is to blame for what a saga could not be ended by, or others'
// locks, and not the saga.
func (k *Keeper) isOutage(id string, cause error) bool {
	switch class := sqltx.Classify(cause); {
	case class == sqltx.Conflict, class == sqltx.ReadOnly, errors.Is(cause, sqltx.ErrNotBegun):
		return true
	case class == sqltx.Lost, class == sqltx.Full: // where there is no room, there is none for what is noted either
		k.broke[id]++
		return k.broke[id] < maxLost
	}
	return false
}

// unended notes that a saga could not be ended, unless an outage was to blame.
func (k *Keeper) unended(ctx context.Context, id string, cause error) error {
	if k.isOutage(id, cause) {
		return nil
	}
	err := k.stopping(ctx, func(ctx context.Context, tx *sqltx.Tx, silent bool) error {
		return k.engine.endFailed(ctx, tx, id, cause, silent)
	})
	if err != nil {
		return fmt.Errorf("note that saga %s could not be ended at its deadline: %w", id, err)
	}
	return nil
}

// nextDue reads the next page by one of the columns that say when, and begins again behind the last.
func (k *Keeper) nextDue(ctx context.Context, query string, from *position, p pulse) (page []*dueSaga, more bool, err error) {
	since := from.at
	if since.IsZero() {
		since = beginning
	}
	virtual := p.virtual()
	rows, err := k.db.QueryContext(ctx, query, virtual, since, virtual, since, []byte(from.id), duePage)
	if err != nil {
		return nil, false, fmt.Errorf("read sagas whose time has come: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var d dueSaga
		var id, typ, plan, command []byte
		var awaited, due, again sql.NullTime
		if err := rows.Scan(&id, &typ, &d.version, &plan, &d.current, &command, &d.attempt, &d.rescues, &awaited, &due, &again, &d.whole); err != nil {
			return nil, false, fmt.Errorf("read sagas whose time has come: %w", err)
		}
		d.id, d.typ, d.plan, d.command = string(id), string(typ), string(plan), string(command)
		d.since, d.due, d.again = awaited.Time, due.Time, again.Time
		d.step = k.engine.stepOf(d.typ, d.version, d.current)
		page = append(page, &d)
	}
	*from = position{}
	if more = len(page) == duePage; more {
		last := page[duePage-1]
		if *from = (position{last.due, last.id}); query == selectUnansweredSQL {
			from.at = last.again
		}
	}
	return page, more, rows.Err()
}

// putOff gives those time whose step's deadline has not passed when it is counted from the publish
// of the command, and returns the others, sorted. Between a step's attempts it runs on.
func putOff(ctx context.Context, tx *sqltx.Tx, due []*dueSaga, p pulse) (passed []string, err error) {
	sagas := make([]*waiting, len(due))
	for i, d := range due {
		sagas[i] = &d.waiting
	}
	if err := locate(ctx, tx, sagas); err != nil {
		return nil, err
	}
	due = slices.Clone(due)
	slices.SortFunc(due, func(a, b *dueSaga) int { return strings.Compare(a.id, b.id) }) // the order of locks
	for _, d := range due {
		from := d.since
		switch {
		case d.whole:
		case d.step != nil && d.step.remote && d.rescues > 0: // it was published before
		case d.where.Pending, d.where.Parked, d.where.Scheduled && d.attempt == 1:
			from = p.now
		case d.attempt == 1 && d.where.PublishedAt.After(from):
			from = d.where.PublishedAt
		}
		if !d.due.Add(from.Sub(d.since)).After(p.virtual()) {
			passed = append(passed, d.id)
			continue
		}
		if _, err := tx.Exec(ctx, putOffSQL, from, from, []byte(d.id), []byte(d.command), d.since); err != nil {
			return nil, err
		}
	}
	return passed, nil
}
