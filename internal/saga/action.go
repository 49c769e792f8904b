package saga

import (
	"context"
	"fmt"
	"strings"

	"backstep/internal/sqltx"
)

// action is a row of saga_actions: what somebody did to a saga, or wanted to.
type action struct {
	sagaID, action, actor, reason string
	before, after                 []byte // JSON
}

const insertActionsSQL = `INSERT INTO saga_actions (saga_id, action, actor, reason, before_json, after_json) VALUES`

// maxActor is what the column holds, in characters; bytes are no fewer.
const maxActor = 255

func insertActions(ctx context.Context, tx *sqltx.Tx, actions []action) error {
	in := sqltx.Insert{Head: insertActionsSQL, Tuple: sqltx.Tuples(1, 6)}
	for _, a := range actions {
		in.Append([]byte(a.sagaID), []byte(a.action), strings.ToValidUTF8(a.actor[:min(len(a.actor), maxActor)], ""), a.reason, a.before, a.after)
	}
	if err := in.Exec(ctx, tx); err != nil {
		return fmt.Errorf("write %d saga actions: %w", len(actions), err)
	}
	return nil
}

// brief is where an instance is, as it stands in an action.
func (in *instance) brief() []byte {
	return mustJSON(map[string]any{
		"status": in.status, "direction": in.direction, "step": in.stepName(), "attempt": in.attempt,
		"command_id": in.commandID, "last_error": in.lastError,
	})
}
