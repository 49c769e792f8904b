package saga

import (
	"context"
	"database/sql"
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
	traceID       string
	status        Status
	direction     Direction
	current       int // index of the step whose command is awaited
	attempt       int
	commandID     string // "": nothing is awaited
	waits         string // the command that it awaited before, if that may wait for its time yet; "": none
	rescues       int    // of the command that is awaited
	payload       []byte
	plan          string // of the definition it started with; "": not known
	lastError     string
	undoReason    string // why it was being undone when it stopped
	skipped       uint64 // steps whose action is not to be undone: an operator left it out, or it never ran. Bit i is step i
	cancelReason  string // why it is to be undone, though nothing failed; RUNNING: as soon as its call is resolved
	callOpen      bool   // its step made a call whose outcome is not known

	rows map[int]StepState // of its steps, as they are in the database; nil: not read yet. See stepRows

	def      *Definition // nil: not known yet, or not at all
	input    any
	unread   bool // its input does not decode here: no hook can be called
	dirty    bool
	wide     bool // it has, or had, more than most instances have: see updateWide
	deadline stepDeadline

	nothing   uint64 // COMPLETED: the steps of which nothing stands; see known
	unlimited bool   // the saga's own deadline cannot undo it any more
}

// step returns the step whose command is awaited. The definition must be known.
func (in *instance) step() *step { return in.def.steps[in.current] }

// onlyUnread reports whether nothing but its input is what keeps an instance from being moved on here.
func (in *instance) onlyUnread() bool { return in.unread && in.def.fits(in.plan, in.current) }

// pastPivot reports whether there is no way back.
func (in *instance) pastPivot() bool {
	return in.def != nil && in.direction == Execute && in.current > in.def.pivot
}

// stepName is for people. What a definition is not here to say stands in the plan.
func (in *instance) stepName() string {
	if in.def != nil && in.current < len(in.def.steps) {
		return in.step().name
	}
	if names := planned(in.plan); in.current < len(names) {
		return names[in.current]
	}
	return fmt.Sprintf("number %d", in.current+1)
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
SELECT id, type, version, correlation_id, trace_id, status, direction, current_step, attempt, command_id, payload, plan,
       last_error, undo_reason, skipped, cancel_reason, call_open, rescues, deadline_at IS NOT NULL OR saga_deadline_at IS NOT NULL
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
		var id, typ, correlation, traceID, command, plan []byte
		var lastError, undoReason, cancelReason sql.NullString
		var deadline bool
		if err := rows.Scan(&id, &typ, &in.version, &correlation, &traceID, &in.status, &in.direction,
			&in.current, &in.attempt, &command, &in.payload, &plan, &lastError, &undoReason,
			&in.skipped, &cancelReason, &in.callOpen, &in.rescues, &deadline); err != nil {
			return nil, fmt.Errorf("lock sagas: %w", err)
		}
		in.id, in.typ, in.correlationID, in.commandID = string(id), string(typ), string(correlation), string(command)
		in.waits = in.commandID
		in.traceID, in.plan = string(traceID), string(plan)
		in.lastError, in.undoReason, in.cancelReason = lastError.String, undoReason.String, cancelReason.String
		in.wide = in.skipped != 0 || cancelReason.Valid || in.callOpen || deadline
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
	b, err := message.EncodeJSON(v)
	if err != nil {
		panic(err) // maps of strings always marshal
	}
	return b
}
