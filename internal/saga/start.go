package saga

import (
	"context"
	"fmt"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

const (
	insertInstancesSQL = `
INSERT INTO saga_instances
       (id, type, version, correlation_id, status, direction, current_step, attempt, command_id,
        payload, plan, trace_id, awaited_since, deadline_at, saga_deadline_at, again_at)
VALUES`

	instanceTuple = "(?, ?, ?, ?, ?, ?, 0, 1, ?, ?, ?, ?, NOW(6), " +
		"NOW(6) + INTERVAL ? MICROSECOND, NOW(6) + INTERVAL ? MICROSECOND, NOW(6) + INTERVAL ? MICROSECOND)"

	// Locking, because the caller's snapshot may be older than the row. The INSERT that found
	// the duplicate has this lock already.
	selectByCorrelationSQL = `SELECT id FROM saga_instances WHERE type = ? AND correlation_id = ? LOCK IN SHARE MODE`
)

// Beginning is what a saga starts with.
type Beginning struct {
	Context       context.Context // whose trace the saga becomes a part of
	CorrelationID string          // any bytes, 1 to 255, unique among sagas of its type
	Input         any             // what the definition's steps take
	ID            string          // of the saga, if the caller has to know it: a new message.NewID. "": it is made
}

// Start begins a saga of definition d in the caller's transaction: instance and first command
// commit with it. An input that no worker would take in a command is a permanent error (MaxBody).
// It is idempotent by type and correlation id: if there is one already its id is returned, and
// started is false. correlationID is any bytes, 1 to 255, and input is what the definition's steps take.
func Start(ctx context.Context, tx *sqltx.Tx, d *Definition, correlationID string, input any) (id string, started bool, err error) {
	in, err := d.begin(Beginning{Context: ctx, CorrelationID: correlationID, Input: input})
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
	if err := firstSteps(ctx, tx, []*instance{in}); err != nil {
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
	if err := firstSteps(ctx, tx, instances); err != nil {
		return err
	}
	return outbox.Add(ctx, tx, append(msgs, events...)...)
}

// begin makes an instance that is not in the database yet.
func (d *Definition) begin(b Beginning) (*instance, error) {
	if b.CorrelationID == "" || len(b.CorrelationID) > message.MaxIDBytes {
		return nil, fmt.Errorf("start saga %s: a correlation id of %d bytes", d.Type, len(b.CorrelationID))
	}
	payload, err := message.EncodeJSON(b.Input)
	if err == nil {
		_, err = d.decode(payload) // or its first command would be parked
	}
	if err != nil {
		return nil, fmt.Errorf("start saga %s: input: %w", d.Type, err)
	}
	if b.ID == "" {
		b.ID = message.NewID()
	}
	in := &instance{
		id: b.ID, typ: d.Type, version: d.Version, correlationID: b.CorrelationID, traceID: tracing.TraceID(b.Context),
		status: Running, direction: Execute, attempt: 1, payload: payload, plan: d.plan, def: d,
	}
	if n := in.largestBody(); n > d.maxBody {
		return nil, Fail("start saga %s: its input is too large: a command would have %d bytes, and %d is the limit", d.Type, n, d.maxBody)
	}
	return in, nil
}

// largestBody returns how large the bodies of its commands are at most, in bytes.
func (in *instance) largestBody() (n int) {
	for _, s := range in.def.steps {
		n = max(n, len(in.body(s, nil)))
		if s.remote {
			break // the others have what this one has, or less
		}
	}
	return n
}

// first makes the first command.
func (in *instance) first(ctx context.Context) message.Message {
	in.awaitNew()
	m := in.command("", nil)
	tracing.Carry(ctx, &m)
	return m
}

func insertInstances(ctx context.Context, tx *sqltx.Tx, instances []*instance) error {
	d := instances[0].def
	step, whole := d.steps[0].deadline, d.within
	var down time.Duration
	if step > 0 || whole > 0 {
		var err error
		if down, err = downtime(ctx, tx); err != nil {
			return err
		}
	}
	first := step
	if first == 0 || whole > 0 && whole < first {
		first = whole
	}
	var again time.Duration
	if d.steps[0].remote {
		again = d.steps[0].half()
	}
	rows := sqltx.Insert{Head: insertInstancesSQL, Tuple: instanceTuple}
	for _, in := range instances {
		rows.Append([]byte(in.id), []byte(in.typ), in.version, []byte(in.correlationID), string(in.status),
			string(in.direction), []byte(in.commandID), in.payload, []byte(in.plan), []byte(in.traceID),
			deadlineIn(first, down), deadlineIn(whole, down), deadlineIn(again, down))
	}
	if err := rows.Exec(ctx, tx); err != nil {
		return fmt.Errorf("start %d sagas of type %s: %w", len(instances), d.Type, err)
	}
	return nil
}

// deadlineIn returns in how many microseconds a deadline is, by the clock of deadlines; nil: never.
func deadlineIn(d, down time.Duration) any {
	if d == 0 {
		return nil
	}
	return (d - down).Microseconds()
}

// firstSteps notes that remote first steps wait for their replies.
func firstSteps(ctx context.Context, tx *sqltx.Tx, instances []*instance) error {
	if !instances[0].step().remote {
		return nil
	}
	rows := make([]stepRow, len(instances))
	for i, in := range instances {
		rows[i] = stepRow{sagaID: in.id, name: in.stepName(), status: rules[Running][EvStepSent].step, attempts: 1, chain: in.chainColumn(in.commandID)}
	}
	return upsertSteps(ctx, tx, rows)
}
