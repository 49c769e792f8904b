package saga

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"backstep/internal/sqltx"
)

// Version is a version of a saga type that has live instances, or that the engine knows.
type Version struct {
	Type    string         `json:"type"`
	Version int            `json:"version"`
	Known   bool           `json:"known"` // to this engine
	Live    map[Status]int `json:"live"`  // how many have not ended, by status
	Oldest  time.Time      `json:"oldest,omitzero"`
}

// Count returns how many instances have not ended.
func (v *Version) Count() (n int) {
	for _, k := range v.Live {
		n += k
	}
	return n
}

// Reads the live instances and no others: served by ix_saga_status.
const countVersionsSQL = `
SELECT type, version, COUNT(*), MIN(created_at)
  FROM saga_instances FORCE INDEX (ix_saga_status)
 WHERE status = ?
 GROUP BY type, version`

// Versions returns the versions that have live instances and those that e knows, by type and
// version. One that is known and has none can be taken out of the workers.
func (e *Engine) Versions(ctx context.Context, q sqltx.Querier) ([]Version, error) {
	list := []Version{}
	at := map[string]int{}
	version := func(typ string, number int) *Version {
		key := fmt.Sprintf("%d %s", number, typ)
		i, ok := at[key]
		if !ok {
			i = len(list)
			at[key] = i
			list = append(list, Version{Type: typ, Version: number, Known: e.defs[typ][number] != nil, Live: map[Status]int{}})
		}
		return &list[i]
	}
	for _, d := range e.Definitions() {
		version(d.Type, d.Version)
	}
	for _, s := range Live {
		if err := countVersions(ctx, q, s, version); err != nil {
			return nil, fmt.Errorf("count sagas by version: %w", err)
		}
	}
	slices.SortFunc(list, func(a, b Version) int {
		return cmp.Or(strings.Compare(a.Type, b.Type), a.Version-b.Version)
	})
	return list, nil
}

func countVersions(ctx context.Context, q sqltx.Querier, s Status, version func(typ string, number int) *Version) error {
	rows, err := q.QueryContext(ctx, countVersionsSQL, string(s))
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var typ []byte
		var number, n int
		var oldest time.Time
		if err := rows.Scan(&typ, &number, &n, &oldest); err != nil {
			return err
		}
		v := version(string(typ), number)
		v.Live[s] = n
		if v.Oldest.IsZero() || oldest.Before(v.Oldest) {
			v.Oldest = oldest
		}
	}
	return rows.Err()
}
