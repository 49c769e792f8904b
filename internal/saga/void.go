package saga

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"backstep/internal/sqltx"
)

const (
	// Served by the primary key.
	awaitedSQL = `
SELECT id, command_id
  FROM saga_instances
 WHERE id IN (%s)`

	// Served by ix_actions_saga.
	movedSQL = `
SELECT before_json, after_json
  FROM saga_actions
 WHERE saga_id IN (%s)
   AND before_json IS NOT NULL
   AND after_json IS NOT NULL`
)

// Void returns which commands nobody waits for any more, sqltx.MaxIn at most, each given with its saga:
// somebody has moved that on without it, by hand or by a wish to cancel, a deadline has, or it is kept no longer. One that
// its saga has passed with nobody's doing is not void: it must have been processed.
func Void(ctx context.Context, q sqltx.Querier, sagaOf map[string]string) (map[string]bool, error) {
	void := map[string]bool{}
	if len(sagaOf) == 0 {
		return void, nil
	}
	ids := slices.Compact(slices.Sorted(maps.Values(sagaOf)))
	awaited, err := pairs(ctx, q, awaitedSQL, ids)
	if err != nil {
		return nil, fmt.Errorf("look what %d sagas await: %w", len(ids), err)
	}
	kept := map[string]bool{}
	for _, a := range awaited {
		kept[string(a[0])] = true
	}
	for command, id := range sagaOf {
		void[command] = !kept[id]
	}
	moves, err := pairs(ctx, q, movedSQL, ids)
	if err != nil {
		return nil, fmt.Errorf("look what moved %d sagas: %w", len(ids), err)
	}
	for _, m := range moves {
		if before, after := commandIn(m[0]), commandIn(m[1]); before != after {
			void[before] = true
		}
	}
	for _, a := range awaited {
		void[string(a[1])] = false
	}
	return void, nil
}

// commandIn returns the id of the command that a saga awaited when it was audited.
func commandIn(brief []byte) string {
	var b struct {
		CommandID string `json:"command_id"`
	}
	_ = json.Unmarshal(brief, &b) // what is not ours names none
	return b.CommandID
}

// pairs reads the rows of two columns that a query gives of sagas.
func pairs(ctx context.Context, q sqltx.Querier, query string, ids []string) (list [][2][]byte, err error) {
	rows, err := q.QueryContext(ctx, fmt.Sprintf(query, sqltx.Placeholders(len(ids))), sqltx.Binary(ids)...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var p [2][]byte
		if err := rows.Scan(&p[0], &p[1]); err != nil {
			return nil, err
		}
		list = append(list, p)
	}
	return list, rows.Err()
}
