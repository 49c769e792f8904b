package outbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"backstep/internal/sqltx"
)

// Operator is who changes rows, and why. What they do is written to outbox_actions in the
// transaction that does it.
type Operator struct{ Actor, Reason string }

// The actions. A drop of a pending row withdraws it first.
const (
	actionRequeue   = "requeue"
	actionRepublish = "republish"
	actionWithdraw  = "withdraw"
	actionDrop      = "drop"
	actionRescue    = "rescue" // no operator's: a saga's command was lost
)

// Action is one thing an operator did to a row.
type Action struct {
	RowID     uint64          `json:"row_id"`
	MessageID string          `json:"message_id"`
	Action    string          `json:"action"`
	Actor     string          `json:"actor"`
	Reason    string          `json:"reason"`
	Before    json.RawMessage `json:"before,omitempty"` // the row as it was; of a dropped one, all of it
	At        time.Time       `json:"at"`
}

const insertActionsSQL = `
INSERT INTO outbox_actions (row_id, message_id, action, actor, reason, before_json)
VALUES `

// record writes what is about to be done to items; before gives the row as it is.
func (o Operator) record(ctx context.Context, tx *sqltx.Tx, action string, items []Item, before func(Item) any) error {
	var args []any
	for _, i := range items {
		row, err := json.Marshal(before(i))
		if err != nil {
			return fmt.Errorf("audit of outbox row %d: %w", i.ID, err)
		}
		args = append(args, i.ID, []byte(i.MessageID), []byte(action), clip(o.Actor, 255), words(o.Reason), row)
	}
	if _, err := tx.Exec(ctx, insertActionsSQL+sqltx.Tuples(len(items), 6), args...); err != nil {
		return fmt.Errorf("audit of %s of %d outbox rows: %w", action, len(items), err)
	}
	return nil
}

// itself is what most actions keep of a row.
func itself(i Item) any { return i }

const (
	selectActionSQL = `
SELECT row_id, message_id, action, actor, reason, before_json, created_at
  FROM outbox_actions`

	actionsOfRowSQL     = selectActionSQL + ` WHERE row_id = ? ORDER BY id`     // served by ix_outbox_actions_row
	actionsOfMessageSQL = selectActionSQL + ` WHERE message_id = ? ORDER BY id` // served by ix_outbox_actions_message
	lastActionSQL       = `SELECT action, actor FROM outbox_actions WHERE row_id = ? ORDER BY id DESC LIMIT 1`
)

// Actions returns what operators did to a row, in order.
func Actions(ctx context.Context, q sqltx.Querier, rowID uint64) ([]Action, error) {
	return actions(ctx, q, actionsOfRowSQL, rowID)
}

// ActionsOn returns what operators did to all rows of a message, in order.
func ActionsOn(ctx context.Context, q sqltx.Querier, messageID string) ([]Action, error) {
	return actions(ctx, q, actionsOfMessageSQL, []byte(messageID))
}

func actions(ctx context.Context, q sqltx.Querier, query string, args ...any) (list []Action, err error) {
	err = scan(ctx, q, query, func(rows *sql.Rows) error {
		var a Action
		var id, action, before []byte
		if err := rows.Scan(&a.RowID, &id, &action, &a.Actor, &a.Reason, &before, &a.At); err != nil {
			return err
		}
		a.MessageID, a.Action, a.Before = string(id), string(action), before
		list = append(list, a)
		return nil
	}, args...)
	if err != nil {
		return nil, fmt.Errorf("read outbox actions: %w", err)
	}
	return list, nil
}

// lastAction returns what was last done to a row, and by whom; "" if nothing was.
func lastAction(ctx context.Context, tx *sqltx.Tx, rowID uint64) (action, actor string, err error) {
	var a []byte
	err = tx.QueryRow(ctx, lastActionSQL, []any{rowID}, &a, &actor)
	if errors.Is(err, sql.ErrNoRows) {
		return "", "", nil
	}
	return string(a), actor, err
}
