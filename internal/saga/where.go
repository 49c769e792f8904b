package saga

import (
	"context"
	"fmt"

	"backstep/internal/sqltx"
)

// State is where a saga is.
type State struct {
	Status      Status    `json:"status"`
	Direction   Direction `json:"direction"`
	CurrentStep int       `json:"current_step"` // index into the definition's steps
	Attempt     int       `json:"attempt"`
}

// Served by the primary key.
const statesSQL = `
SELECT id, status, direction, current_step, attempt
  FROM saga_instances
 WHERE id IN (%s)`

// States returns where the sagas with these ids are, sqltx.MaxIn at most.
func States(ctx context.Context, q sqltx.Querier, ids []string) (map[string]State, error) {
	out := make(map[string]State, len(ids))
	if len(ids) == 0 {
		return out, nil
	}
	rows, err := q.QueryContext(ctx, fmt.Sprintf(statesSQL, sqltx.Placeholders(len(ids))), sqltx.Binary(ids)...)
	if err != nil {
		return nil, fmt.Errorf("look where %d sagas are: %w", len(ids), err)
	}
	defer rows.Close()
	for rows.Next() {
		var id []byte
		var s State
		if err := rows.Scan(&id, &s.Status, &s.Direction, &s.CurrentStep, &s.Attempt); err != nil {
			return nil, fmt.Errorf("look where %d sagas are: %w", len(ids), err)
		}
		out[string(id)] = s
	}
	return out, rows.Err()
}
