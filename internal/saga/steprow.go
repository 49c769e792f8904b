package saga

import (
	"context"
	"fmt"

	"backstep/internal/sqltx"
)

// stepRow is a row of saga_steps to write.
type stepRow struct {
	sagaID   string
	order    int
	name     string
	status   StepStatus
	attempts int
	result   []byte // nil: keep what is there
	err      string

	chain string // direction and first id of the attempts at it; "": keep what is there
}

const (
	upsertStepsSQL = `INSERT INTO saga_steps (saga_id, step_order, name, status, attempts, result, error, request_id) VALUES`

	onStepThereSQL = `
    ON DUPLICATE KEY UPDATE status = VALUES(status), attempts = VALUES(attempts),
       result = COALESCE(VALUES(result), result), error = VALUES(error),
       request_id = COALESCE(VALUES(request_id), request_id), updated_at = NOW(6)`
)

func upsertSteps(ctx context.Context, tx *sqltx.Tx, rows []stepRow) error {
	in := sqltx.Insert{Head: upsertStepsSQL, Tuple: sqltx.Tuples(1, 8), Tail: onStepThereSQL}
	for _, r := range rows {
		in.Append([]byte(r.sagaID), r.order, []byte(r.name), string(r.status), r.attempts, r.result, nullText(r.err), nullable(r.chain))
	}
	if err := in.Exec(ctx, tx); err != nil {
		return fmt.Errorf("write %d saga steps: %w", len(rows), err)
	}
	return nil
}
