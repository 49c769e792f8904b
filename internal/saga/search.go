package saga

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"backstep/internal/sqltx"
)

// Position is a step of a definition.
type Position struct {
	Type    string
	Version int
	Step    int // index into the definition's steps
}

// Positions returns where the definitions that e knows have a step of this name.
func (e *Engine) Positions(step string) []Position {
	var list []Position
	for _, d := range e.Definitions() {
		if i := slices.Index(d.StepNames(), step); i >= 0 {
			list = append(list, Position{d.Type, d.Version, i})
		}
	}
	return list
}

// Definitions returns the definitions that e knows, by type and version.
func (e *Engine) Definitions() []*Definition {
	var list []*Definition
	for _, versions := range e.defs {
		for _, d := range versions {
			list = append(list, d)
		}
	}
	slices.SortFunc(list, func(a, b *Definition) int {
		if a.Type != b.Type {
			return strings.Compare(a.Type, b.Type)
		}
		return a.Version - b.Version
	})
	return list
}

// maxScan is how many instances of each status List compares with what no index serves, unless
// more are wanted: it is a second's work. Nobody looks for the millionth saga that has ended.
const maxScan = 100_000

const (
	typeIsSQL   = ` AND type = ?`
	errorHasSQL = `
   AND (LOCATE(LOWER(?), LOWER(last_error)) > 0
        OR status IN ('RUNNING', 'COMPENSATING') AND LOCATE(LOWER(?), LOWER(` + stepErrorSQL + `)) > 0)`
	directedSQL = ` AND direction = ?`
	atStepSQL   = ` AND (type, version, current_step) IN (%s)`

	// Bounds the index, so that the server reads no further.
	newerThanSQL = ` AND updated_at >= ?`
	untilSQL     = ` AND updated_at <= ?`
)

// compared are the conditions that no index serves.
func (f Filter) compared() (where string, args []any) {
	if f.Type != "" {
		where, args = where+typeIsSQL, append(args, []byte(f.Type))
	}
	if f.Direction != "" {
		where, args = where+directedSQL, append(args, string(f.Direction))
	}
	if f.Error != "" {
		where, args = where+errorHasSQL, append(args, f.Error, f.Error)
	}
	if len(f.At) > 0 {
		where += fmt.Sprintf(atStepSQL, sqltx.Tuples(len(f.At), 3))
		for _, p := range f.At {
			args = append(args, []byte(p.Type), p.Version, p.Step)
		}
	}
	if !f.until.IsZero() {
		bound := newerThanSQL
		if f.OlderThan > 0 {
			bound = untilSQL
		}
		where, args = where+bound, append(args, f.until)
	}
	return where, args
}

// statuses are those to look among. A saga that has ended is at no step.
func (f Filter) statuses() []Status {
	switch {
	case f.Status != "":
		return []Status{f.Status}
	case len(f.At) > 0:
		return Live
	}
	return Statuses
}

// Both read the index alone.
const (
	newestEndSQL = `
SELECT updated_at
  FROM saga_instances FORCE INDEX (ix_saga_status)
 WHERE status = ?
 ORDER BY updated_at DESC, id DESC
 LIMIT 1 OFFSET ?`

	oldestEndSQL = `
SELECT updated_at
  FROM saga_instances FORCE INDEX (ix_saga_status)
 WHERE status = ?
 ORDER BY updated_at, id
 LIMIT 1 OFFSET ?`
)

// end returns where looking among the instances of a status ends, and whether there are more.
func (f Filter) end(ctx context.Context, q sqltx.Querier, s Status) (end time.Time, bounded bool, err error) {
	if where, _ := f.compared(); where == "" {
		return end, false, nil // the limit is what ends it
	}
	query := newestEndSQL
	if f.OlderThan > 0 {
		query = oldestEndSQL
	}
	err = q.QueryRowContext(ctx, query, string(s), max(cmp.Or(f.scan, maxScan), f.Limit)).Scan(&end)
	if errors.Is(err, sql.ErrNoRows) {
		return time.Time{}, false, nil
	}
	return end, err == nil, err
}

// Served by ix_saga_status.
const chooseSQL = `
SELECT id
  FROM saga_instances FORCE INDEX (ix_saga_status)
 WHERE status = ?`

// Choose returns the ids of all instances that f chooses, of these statuses only: for each
// status in turn, the one that waits longest first. A limit of 0 is none; it looks at all.
func Choose(ctx context.Context, q sqltx.Querier, f Filter, among []Status) (ids []string, err error) {
	if f.Status != "" {
		among = []Status{f.Status}
	}
	where, compared := f.compared()
	for _, s := range among {
		query, args := chooseSQL+where, append([]any{string(s)}, compared...)
		if f.OlderThan > 0 {
			query, args = query+listOlderSQL, append(args, f.OlderThan.Microseconds())
		}
		query += ` ORDER BY updated_at, id`
		if f.Limit > 0 {
			query, args = query+` LIMIT ?`, append(args, f.Limit-len(ids))
		}
		rows, err := q.QueryContext(ctx, query, args...)
		if err != nil {
			return nil, fmt.Errorf("choose sagas: %w", err)
		}
		if ids, err = appendIDs(ids, rows); err != nil {
			return nil, fmt.Errorf("choose sagas: %w", err)
		}
		if f.Limit > 0 && len(ids) >= f.Limit {
			break
		}
	}
	return ids, nil
}

// Served by the primary key.
const stillSQL = `
SELECT COUNT(*)
  FROM saga_instances
 WHERE id = ?
   AND status IN (%s)`

// check says whether a saga that was chosen would be chosen again. tx has its lock.
func (c *Choice) check(ctx context.Context, tx *sqltx.Tx, id string) error {
	among := c.Among
	if c.Status != "" {
		among = []Status{c.Status}
	}
	args := []any{[]byte(id)}
	for _, s := range among {
		args = append(args, string(s))
	}
	where, compared := c.compared()
	query, args := fmt.Sprintf(stillSQL, sqltx.Placeholders(len(among)))+where, append(args, compared...)
	if c.OlderThan > 0 {
		query, args = query+listOlderSQL, append(args, c.OlderThan.Microseconds())
	}
	var n int
	if err := tx.QueryRow(ctx, query, args, &n); err != nil {
		return fmt.Errorf("look again at saga %s: %w", id, err)
	}
	if n == 0 {
		return ErrMovedOn
	}
	return nil
}

func appendIDs(ids []string, rows *sql.Rows) ([]string, error) {
	defer rows.Close()
	for rows.Next() {
		var id []byte
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		ids = append(ids, string(id))
	}
	return ids, rows.Err()
}
