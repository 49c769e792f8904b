package saga

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"

	"backstep/internal/sqltx"
)

// Action is a row of saga_actions: something that was done to a saga from outside, and what it
// was before and after.
type Action struct {
	SagaID string          `json:"saga_id"`
	Action string          `json:"action"`
	Actor  string          `json:"actor"`
	Reason string          `json:"reason"`
	Before json.RawMessage `json:"before,omitempty"`
	After  json.RawMessage `json:"after,omitempty"`
	At     time.Time       `json:"at"`
}

// Served by ix_actions_saga.
const selectActionsSQL = `
SELECT action, actor, reason, before_json, after_json, created_at
  FROM saga_actions
 WHERE saga_id = ?
 ORDER BY id`

// Actions returns what was done to a saga from outside, in order.
func Actions(ctx context.Context, q sqltx.Querier, id string) (list []Action, err error) {
	rows, err := q.QueryContext(ctx, selectActionsSQL, []byte(id))
	if err != nil {
		return nil, fmt.Errorf("read actions on saga %q: %w", id, err)
	}
	defer rows.Close()
	for rows.Next() {
		a := Action{SagaID: id}
		var action, before, after []byte
		if err := rows.Scan(&action, &a.Actor, &a.Reason, &before, &after, &a.At); err != nil {
			return nil, fmt.Errorf("read actions on saga %q: %w", id, err)
		}
		a.Action, a.Before, a.After = string(action), rawJSON(before), rawJSON(after)
		list = append(list, a)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read actions on saga %q: %w", id, err)
	}
	return list, nil
}

// ExternalCall is a row of saga_calls: a call to a system that is not ours.
type ExternalCall struct {
	Step      int             `json:"step"` // index into the definition's steps
	Direction Direction       `json:"direction"`
	Status    string          `json:"status"` // OPEN: it may have happened; DONE; REFUSED
	Calls     int             `json:"calls"`  // how often it was called
	Outcome   json.RawMessage `json:"outcome,omitempty"`
	Error     string          `json:"error,omitempty"` // the last one
	OpenedAt  time.Time       `json:"opened_at"`
	UpdatedAt time.Time       `json:"updated_at"`
}

// Served by the primary key.
const selectJournalSQL = `
SELECT step_order, direction, status, calls, outcome, error, opened_at, updated_at
  FROM saga_calls
 WHERE saga_id = ?
 ORDER BY step_order, direction DESC`

func journal(ctx context.Context, q sqltx.Querier, id string) (list []ExternalCall, err error) {
	rows, err := q.QueryContext(ctx, selectJournalSQL, []byte(id))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var c ExternalCall
		var outcome []byte
		var failure sql.NullString
		if err := rows.Scan(&c.Step, &c.Direction, &c.Status, &c.Calls, &outcome, &failure, &c.OpenedAt, &c.UpdatedAt); err != nil {
			return nil, err
		}
		c.Outcome, c.Error = rawJSON(outcome), failure.String
		list = append(list, c)
	}
	return list, rows.Err()
}

// Consumer is a worker that consumes a queue, and how far it has come.
type Consumer struct {
	ID        string    `json:"id"`
	Latest    time.Time `json:"latest_at,omitzero"`  // when the newest message it was given was published
	IdleSince time.Time `json:"idle_since,omitzero"` // it has nothing in hand
}

// Consumers returns the workers that consume a queue and were heard of lately.
func Consumers(ctx context.Context, q sqltx.Querier, queue string) ([]Consumer, error) {
	all, err := consumers(ctx, q)
	if err != nil {
		return nil, err
	}
	list := []Consumer{}
	for _, c := range all[queue] {
		list = append(list, Consumer{c.id, c.latest, c.idle})
	}
	return list, nil
}
