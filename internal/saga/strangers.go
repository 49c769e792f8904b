package saga

import (
	"context"
	"fmt"
	"time"
)

const warnPause = 10 * time.Minute

// Served by ix_saga_status and ix_saga_deadline, which are forced: what is read is what is overdue.
// The oldest is found by its time, which has its id behind it.
const (
	oldestAt = len("2006-01-02 15:04:05.000000 ")

	strangersSQL = `
SELECT type, version, plan, COUNT(*), MIN(CONCAT(updated_at, ' ', id))
  FROM saga_instances FORCE INDEX (%s)
 WHERE %s
 GROUP BY type, version, plan`

	waitingLongSQL  = `status = ? AND updated_at < ?`
	pastDeadlineSQL = `deadline_at < ? AND updated_at >= ? AND status IN ('RUNNING', 'COMPENSATING')`
)

// stranger is a definition that this process does not have, of sagas that are overdue.
type stranger struct {
	typ     string
	version int
	plan    string
	n       int
	oldest  string // when it has changed, and its id
}

// tellOfStrangers warns of sagas that have not ended in time and that this process cannot help, since
// it does not know their definition. Another one may; if none does, they wait until a command of theirs
// comes, and is parked, or, if only their steps differ, for their deadline: some for ever.
func (k *Keeper) tellOfStrangers(ctx context.Context, p pulse) error {
	if !k.warned.IsZero() && time.Since(k.warned) < warnPause {
		return nil
	}
	found, err := k.strangers(ctx, p)
	if err != nil {
		return fmt.Errorf("look for sagas that nobody here knows: %w", err)
	}
	k.warned = time.Now()
	for _, s := range found {
		k.cfg.Log.Warn("sagas are overdue that this worker cannot move on: it does not have their definition, with these steps; "+
			"unless another worker has, they stop, or wait for ever: run a worker of the release that has it until they have ended (backstep saga versions counts them)",
			"saga_type", s.typ, "saga_version", s.version, "steps", s.plan, "sagas", s.n, "oldest_saga_id", s.oldest[oldestAt:])
	}
	return nil
}

// strangers returns the definitions of sagas that are overdue, but for those that are known here.
func (k *Keeper) strangers(ctx context.Context, p pulse) (list []*stranger, err error) {
	old := p.now.Add(-k.cfg.RescueAnyway)
	at := map[string]*stranger{}
	for _, look := range []struct {
		index, where string
		args         []any
	}{
		{"ix_saga_status", waitingLongSQL, []any{string(Running), old}},
		{"ix_saga_status", waitingLongSQL, []any{string(Compensating), old}},
		{"ix_saga_deadline", pastDeadlineSQL, []any{p.virtual().Add(-time.Minute), old}}, // who knows it looks every second
	} {
		counted, err := k.countStrangers(ctx, fmt.Sprintf(strangersSQL, look.index, look.where), look.args)
		if err != nil {
			return nil, err
		}
		for _, s := range counted {
			key := fmt.Sprintf("%d %s %s", s.version, s.plan, s.typ)
			if there := at[key]; there != nil {
				there.n, there.oldest = there.n+s.n, min(there.oldest, s.oldest)
				continue
			}
			at[key], list = s, append(list, s)
		}
	}
	return list, nil
}

func (k *Keeper) countStrangers(ctx context.Context, query string, args []any) (list []*stranger, err error) {
	rows, err := k.db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var typ, plan, oldest []byte
		var s stranger
		if err := rows.Scan(&typ, &s.version, &plan, &s.n, &oldest); err != nil {
			return nil, err
		}
		s.typ, s.plan, s.oldest = string(typ), string(plan), string(oldest)
		if d := k.engine.defs[s.typ][s.version]; d == nil || s.plan != "" && s.plan != d.plan {
			list = append(list, &s)
		}
	}
	return list, rows.Err()
}
