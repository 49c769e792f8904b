package saga

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// instance is a row of saga_instances while its transaction works on it.
type instance struct {
	id, typ       string
	version       int
	correlationID string
	traceID       string // when it starts
	status        Status
	direction     Direction
	current       int // index of the step whose command is awaited
	attempt       int
	commandID     string // "": nothing is awaited
	payload       []byte
	plan          string // of the definition it started with; "": not known
	lastError     string

	def   *Definition // nil: not known yet, or not at all
	input any
	dirty bool
}

// step returns the step whose command is awaited. The definition must be known.
func (in *instance) step() *step { return in.def.steps[in.current] }

// stepName is for people.
func (in *instance) stepName() string {
	if in.def == nil || in.current >= len(in.def.steps) {
		return fmt.Sprintf("number %d", in.current)
	}
	return in.step().name
}

// withReason makes a hook of one that is told the reason.
func (in *instance) withReason(f reasonHook) hook {
	if f == nil {
		return nil
	}
	return func(ctx context.Context, tx *sqltx.Tx, input any) error { return f(ctx, tx, input, in.lastError) }
}

// Served by the primary key, which is also the order of the locks.
const lockInstancesSQL = `
SELECT id, type, version, correlation_id, status, direction, current_step, attempt, command_id, payload, plan, last_error
  FROM saga_instances
 WHERE id IN (%s)
 ORDER BY id
   FOR UPDATE`

// lockInstances returns the instances with these ids, locked, in id order.
func lockInstances(ctx context.Context, tx *sqltx.Tx, ids []string) (map[string]*instance, error) {
	out := make(map[string]*instance, len(ids))
	if len(ids) == 0 {
		return out, nil
	}
	rows, err := tx.Query(ctx, fmt.Sprintf(lockInstancesSQL, sqltx.Placeholders(len(ids))), sqltx.Binary(ids)...)
	if err != nil {
		return nil, fmt.Errorf("lock %d sagas: %w", len(ids), err)
	}
	defer rows.Close()
	for rows.Next() {
		var in instance
		var id, typ, correlation, command, plan []byte
		var lastError sql.NullString
		if err := rows.Scan(&id, &typ, &in.version, &correlation, &in.status, &in.direction,
			&in.current, &in.attempt, &command, &in.payload, &plan, &lastError); err != nil {
			return nil, fmt.Errorf("lock sagas: %w", err)
		}
		in.id, in.typ, in.correlationID, in.commandID = string(id), string(typ), string(correlation), string(command)
		in.plan, in.lastError = string(plan), lastError.String
		out[in.id] = &in
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("lock sagas: %w", err)
	}
	return out, nil
}

// nullable returns s as VARBINARY, NULL if empty.
func nullable(s string) []byte {
	if s == "" {
		return nil
	}
	return []byte(s)
}

// nullText returns s for a TEXT column, NULL if empty.
func nullText(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// clip returns s as valid text of 4 KiB at most: what a person reads, and what the columns
// and bodies that hooks write it to can hold.
func clip(s string) string {
	const most = 4 << 10
	if len(s) > most {
		s = s[:most] + " …"
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// One statement for all instances of a batch. STRAIGHT_JOIN: the values come first, each
// finds its row by primary key, already locked.
const (
	updateInstancesSQL = `
UPDATE (%s) v
       STRAIGHT_JOIN saga_instances i ON i.id = v.id
   SET i.status = v.status, i.direction = v.direction, i.current_step = v.current_step,
       i.attempt = v.attempt, i.command_id = v.command_id, i.last_error = v.last_error,
       i.awaited_since = IF(v.command_id IS NULL, NULL, NOW(6)),
       i.finished_at = IF(v.status IN ('COMPLETED', 'COMPENSATED'), NOW(6), NULL),
       i.updated_at = NOW(6)`

	firstValuesSQL = `SELECT ? AS id, ? AS status, ? AS direction, ? AS current_step, ? AS attempt, ? AS command_id, ? AS last_error`
	moreValuesSQL  = ` UNION ALL SELECT ?, ?, ?, ?, ?, ?, ?`
)

func updateInstances(ctx context.Context, tx *sqltx.Tx, instances []*instance) error {
	if len(instances) == 0 {
		return nil
	}
	args := make([]any, 0, 7*len(instances))
	for _, in := range instances {
		args = append(args, []byte(in.id), string(in.status), string(in.direction), in.current, in.attempt,
			nullable(in.commandID), nullText(in.lastError))
	}
	values := firstValuesSQL + strings.Repeat(moreValuesSQL, len(instances)-1)
	if _, err := tx.Exec(ctx, fmt.Sprintf(updateInstancesSQL, values), args...); err != nil {
		return fmt.Errorf("update %d sagas: %w", len(instances), err)
	}
	return nil
}

// stepRow is a row of saga_steps to write.
type stepRow struct {
	sagaID   string
	order    int
	name     string
	status   StepStatus
	attempts int
	result   []byte // nil: keep what is there
	err      string
}

const (
	upsertStepsSQL = `INSERT INTO saga_steps (saga_id, step_order, name, status, attempts, result, error) VALUES`

	onStepThereSQL = `
    ON DUPLICATE KEY UPDATE status = VALUES(status), attempts = VALUES(attempts),
       result = COALESCE(VALUES(result), result), error = VALUES(error), updated_at = NOW(6)`
)

func upsertSteps(ctx context.Context, tx *sqltx.Tx, rows []stepRow) error {
	in := sqltx.Insert{Head: upsertStepsSQL, Tuple: sqltx.Tuples(1, 7), Tail: onStepThereSQL}
	for _, r := range rows {
		in.Append([]byte(r.sagaID), r.order, []byte(r.name), string(r.status), r.attempts, r.result, nullText(r.err))
	}
	if err := in.Exec(ctx, tx); err != nil {
		return fmt.Errorf("write %d saga steps: %w", len(rows), err)
	}
	return nil
}

const selectResultsSQL = `
SELECT saga_id, result
  FROM saga_steps
 WHERE (saga_id, step_order) IN (%s)`

// command makes the message that has step current run, in the instance's direction, and
// makes the instance await it.
func (in *instance) command(requestID string) message.Message {
	s := in.step()
	in.commandID = message.NewID()
	if requestID == "" {
		requestID = in.commandID
	}
	return message.Message{
		Properties: message.Properties{
			MessageID: in.commandID, Type: in.typ + "." + s.name, CorrelationID: in.id,
		},
		Headers: message.Headers{
			message.HeaderRequestID:   requestID,
			message.HeaderSagaID:      in.id,
			message.HeaderSagaType:    in.typ,
			message.HeaderSagaVersion: int64(in.version),
			message.HeaderStep:        s.name,
			message.HeaderDirection:   string(in.direction),
			message.HeaderAttempt:     int64(in.attempt),
		},
		Body:     in.payload,
		Exchange: message.CommandsExchange, RoutingKey: s.queue, Mandatory: true,
		OrderingKey: in.id, AggregateType: "saga", AggregateID: in.id,
	}
}

// manualActionEvent tells whoever listens that an operator is needed.
func (in *instance) manualActionEvent(now time.Time) message.Message {
	return message.Message{
		Properties: message.Properties{
			MessageID: message.NewID(), Type: "saga.manual_action", CorrelationID: in.id, Timestamp: now,
		},
		Headers: message.Headers{message.HeaderSagaID: in.id, message.HeaderSagaType: in.typ},
		Body: mustJSON(map[string]any{
			"saga_id": in.id, "saga_type": in.typ, "correlation_id": strings.ToValidUTF8(in.correlationID, "\uFFFD"),
			"step": in.stepName(), "direction": in.direction, "reason": in.lastError,
		}),
		Exchange: message.EventsExchange, RoutingKey: "saga.manual_action",
		OrderingKey: in.id, AggregateType: "saga", AggregateID: in.id,
	}
}

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // maps of strings always marshal
	}
	return b
}
