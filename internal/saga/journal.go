package saga

import (
	"context"
	"fmt"

	"backstep/internal/sqltx"
)

// The statuses of a row of saga_calls.
const (
	callOpen    = "OPEN"    // made, or about to be; what became of it is not known
	callDone    = "DONE"    // its outcome is in the row
	callRefused = "REFUSED" // the system said no
)

// callRow is a row of saga_calls to write.
type callRow struct {
	in        *instance
	step      int
	direction Direction
	status    string
	calls     int // more than there were
	outcome   []byte
	err       string
}

const (
	upsertCallsSQL = `INSERT INTO saga_calls (saga_id, step_order, direction, status, calls, outcome, error) VALUES`

	onCallThereSQL = `
    ON DUPLICATE KEY UPDATE status = VALUES(status), calls = calls + VALUES(calls), outcome = VALUES(outcome),
       error = IF(VALUES(status) = 'DONE', NULL, COALESCE(VALUES(error), error)), updated_at = NOW(6)`

	// Served by the primary key.
	selectCallsSQL = `
SELECT saga_id, outcome
  FROM saga_calls
 WHERE (saga_id, step_order, direction) IN (%s)
   AND status = 'DONE'`
)

func upsertCalls(ctx context.Context, tx *sqltx.Tx, rows []callRow) error {
	in := sqltx.Insert{Head: upsertCallsSQL, Tuple: sqltx.Tuples(1, 7), Tail: onCallThereSQL}
	for _, r := range rows {
		in.Append([]byte(r.in.id), r.step, string(r.direction), r.status, r.calls, r.outcome, nullText(r.err))
	}
	if err := in.Exec(ctx, tx); err != nil {
		return fmt.Errorf("write %d calls: %w", len(rows), err)
	}
	return nil
}

// loadCalls gives commands whose call was made the outcome of it, if that is known. What was refused
// is not looked for: its step has failed, and if somebody wants it tried again, so is the call.
func (b *batch) loadCalls(ctx context.Context, todo []*command) error {
	var args []any
	made := map[string]*command{}
	for _, c := range todo {
		if c.in.callOpen && c.Answer == nil && c.reply == nil {
			made[c.in.id] = c
			args = append(args, []byte(c.in.id), c.in.current, string(c.in.direction))
		}
	}
	if len(made) == 0 {
		return nil
	}
	rows, err := b.tx.Query(ctx, fmt.Sprintf(selectCallsSQL, sqltx.Tuples(len(made), 3)), args...)
	if err != nil {
		return fmt.Errorf("read outcomes of calls: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var id, outcome []byte
		if err := rows.Scan(&id, &outcome); err != nil {
			return fmt.Errorf("read outcomes of calls: %w", err)
		}
		made[string(id)].answer = &callOutcome{outcome: outcome}
	}
	return rows.Err()
}
