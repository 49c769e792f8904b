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
	insertInstancesSQL = `
INSERT INTO saga_instances
       (id, type, version, correlation_id, status, direction, current_step, attempt, command_id,
        payload, plan, trace_id, awaited_since)
VALUES`

	instanceTuple = "(?, ?, ?, ?, ?, ?, 0, 1, ?, ?, ?, ?, NOW(6))"

	// Locking, because the caller's snapshot may be older than the row. The INSERT that found
	// the duplicate has this lock already.
	selectByCorrelationSQL = `SELECT id FROM saga_instances WHERE type = ? AND correlation_id = ? LOCK IN SHARE MODE`
)

// Beginning is what a saga starts with.
type Beginning struct {
	Context       context.Context // whose trace the saga becomes a part of
	CorrelationID string          // any bytes, 1 to 255, unique among sagas of its type
	Input         any             // what the definition's steps take
}

// Start begins a saga of definition d in the caller's transaction: instance and first command
// commit with it. It is idempotent by type and correlation id: if there is one already its id
// is returned, and started is false. correlationID is any bytes, 1 to 255, and input is what
// the definition's steps take.
func Start(ctx context.Context, tx *sqltx.Tx, d *Definition, correlationID string, input any) (id string, started bool, err error) {
	in, err := d.begin(Beginning{ctx, correlationID, input})
	if err != nil {
		return "", false, err
	}
	command := in.first(ctx)
	err = insertInstances(ctx, tx, []*instance{in})
	if sqltx.Classify(err) == sqltx.Duplicate {
		var existing []byte
		if err := tx.QueryRow(ctx, selectByCorrelationSQL, []any{[]byte(d.Type), []byte(correlationID)}, &existing); err != nil {
			return "", false, fmt.Errorf("start saga %s: find the one of correlation id %q: %w", d.Type, correlationID, err)
		}
		return string(existing), false, nil
	}
	if err != nil {
		return "", false, err
	}
	return in.id, true, outbox.Add(ctx, tx, command)
}

// StartAll begins many sagas, none of which may be there already: then the error is a duplicate,
// and what has been written has to be undone. Commands and events are added to the outbox by one
// statement, commands first.
func StartAll(ctx context.Context, tx *sqltx.Tx, d *Definition, beginnings []Beginning, events ...message.Message) error {
	instances := make([]*instance, len(beginnings))
	msgs := make([]message.Message, len(beginnings), len(beginnings)+len(events))
	for i, b := range beginnings {
		in, err := d.begin(b)
		if err != nil {
			return err
		}
		instances[i], msgs[i] = in, in.first(b.Context)
	}
	if err := insertInstances(ctx, tx, instances); err != nil {
		return err
	}
	return outbox.Add(ctx, tx, append(msgs, events...)...)
}

// begin makes an instance that is not in the database yet.
func (d *Definition) begin(b Beginning) (*instance, error) {
	if b.CorrelationID == "" || len(b.CorrelationID) > message.MaxIDBytes {
		return nil, fmt.Errorf("start saga %s: a correlation id of %d bytes", d.Type, len(b.CorrelationID))
	}
	payload, err := json.Marshal(b.Input)
	if err == nil {
		_, err = d.decode(payload) // or its first command would be parked
	}
	if err != nil {
		return nil, fmt.Errorf("start saga %s: input: %w", d.Type, err)
	}
	return &instance{
		id: message.NewID(), typ: d.Type, version: d.Version, correlationID: b.CorrelationID, traceID: tracing.TraceID(b.Context),
		status: Running, direction: Execute, attempt: 1, payload: payload, plan: d.plan, def: d,
	}, nil
}

// first makes the first command.
func (in *instance) first(ctx context.Context) message.Message {
	m := in.command("")
	tracing.Carry(ctx, &m)
	return m
}

func insertInstances(ctx context.Context, tx *sqltx.Tx, instances []*instance) error {
	rows := sqltx.Insert{Head: insertInstancesSQL, Tuple: instanceTuple}
	for _, in := range instances {
		rows.Append([]byte(in.id), []byte(in.typ), in.version, []byte(in.correlationID), string(in.status),
			string(in.direction), []byte(in.commandID), in.payload, []byte(in.plan), []byte(in.traceID))
	}
	if err := rows.Exec(ctx, tx); err != nil {
		return fmt.Errorf("start %d sagas of type %s: %w", len(instances), instances[0].typ, err)
	}
	return nil
}
