package saga

import (
	"context"
	"encoding/json"
	"fmt"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

const (
	insertInstanceSQL = `
INSERT INTO saga_instances
       (id, type, version, correlation_id, status, direction, current_step, attempt, command_id,
        awaited_since, payload, plan, trace_id)
VALUES (?, ?, ?, ?, ?, ?, 0, 1, ?, NOW(6), ?, ?, ?)`

	// Locking, because the caller's snapshot may be older than the row. The INSERT that found
	// the duplicate has this lock already.
	selectByCorrelationSQL = `SELECT id FROM saga_instances WHERE type = ? AND correlation_id = ? LOCK IN SHARE MODE`
)

// Start begins a saga of definition d in the caller's transaction: instance and first command
// commit with it. It is idempotent by type and correlation id: if there is one already its id
// is returned, and started is false. correlationID is any bytes, 1 to 255, and input is what
// the definition's steps take.
func Start(ctx context.Context, tx *sqltx.Tx, d *Definition, correlationID string, input any) (id string, started bool, err error) {
	if correlationID == "" || len(correlationID) > message.MaxIDBytes {
		return "", false, fmt.Errorf("start saga %s: a correlation id of %d bytes", d.Type, len(correlationID))
	}
	payload, err := json.Marshal(input)
	if err == nil {
		_, err = d.decode(payload) // or its first command would be parked
	}
	if err != nil {
		return "", false, fmt.Errorf("start saga %s: input: %w", d.Type, err)
	}
	in := &instance{
		id: message.NewID(), typ: d.Type, version: d.Version, correlationID: correlationID,
		status: Running, direction: Execute, attempt: 1, payload: payload, def: d,
	}
	command := in.command("")
	tracing.Carry(ctx, &command)
	_, err = tx.Exec(ctx, insertInstanceSQL, []byte(in.id), []byte(in.typ), in.version, []byte(correlationID),
		string(in.status), string(in.direction), []byte(in.commandID), payload, []byte(d.plan), []byte(tracing.TraceID(ctx)))
	if sqltx.Classify(err) == sqltx.Duplicate {
		var existing []byte
		if err := tx.QueryRow(ctx, selectByCorrelationSQL, []any{[]byte(d.Type), []byte(correlationID)}, &existing); err != nil {
			return "", false, fmt.Errorf("start saga %s: find the one of correlation id %q: %w", d.Type, correlationID, err)
		}
		return string(existing), false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("start saga %s: %w", d.Type, err)
	}
	return in.id, true, outbox.Add(ctx, tx, command)
}
