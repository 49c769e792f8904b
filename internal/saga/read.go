package saga

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"backstep/internal/sqltx"
)

// Filter chooses instances. Zero fields choose all.
type Filter struct {
	Type      string
	Status    Status
	At        []Position    // the live ones at one of these steps
	Direction Direction     // of what they are at, or were when they ended
	Error     string        // a part of last_error, or of why the step is tried again, in upper or lower case
	OlderThan time.Duration // nothing has happened to them for so long
	Limit     int           // default 50

	scan  int       // instead of maxScan
	until time.Time // of updated_at, where looking ends; zero: at the end
}

// Summary is an instance at a glance.
type Summary struct {
	ID            string        `json:"id"`
	Type          string        `json:"type"`
	Version       int           `json:"version"`
	CorrelationID string        `json:"correlation_id"`
	Status        Status        `json:"status"`
	Direction     Direction     `json:"direction"`
	CurrentStep   int           `json:"current_step"` // index into the definition's steps
	Attempt       int           `json:"attempt"`      // of the command that is awaited
	LastError     string        `json:"last_error,omitempty"`
	StepError     string        `json:"step_error,omitempty"`    // RUNNING, COMPENSATING: why the step it is at is tried again
	CancelReason  string        `json:"cancel_reason,omitempty"` // why it is to be undone though nothing failed; RUNNING: when its open call is resolved
	CreatedAt     time.Time     `json:"created_at"`
	UpdatedAt     time.Time     `json:"updated_at"`
	FinishedAt    time.Time     `json:"finished_at,omitzero"`
	Unchanged     time.Duration `json:"-"` // since UpdatedAt, by the database's clock
}

// Detail is an instance with all that is known about it.
type Detail struct {
	Summary
	CommandID    string          `json:"command_id,omitempty"` // the message it awaits
	AwaitedSince time.Time       `json:"awaited_since,omitzero"`
	Rescues      int             `json:"rescues,omitempty"`
	DeadlineAt   time.Time       `json:"deadline_at,omitzero"`      // the next, of the step or of the saga, by the wall clock
	SagaDeadline time.Time       `json:"saga_deadline_at,omitzero"` // of the whole saga, likewise
	UntilDue     time.Duration   `json:"-"`                         // from now to DeadlineAt by the database's clock
	CallOpen     bool            `json:"call_open,omitempty"`       // its step made a call whose outcome is not known
	TraceID      string          `json:"trace_id,omitempty"`
	Plan         string          `json:"-"` // the steps it started with; "": not known
	LeftOut      uint64          `json:"-"` // steps whose action is not to be undone: bit i is step i
	Payload      json.RawMessage `json:"payload"`
	Steps        []StepState     `json:"steps"` // those that have a row; the others are PENDING
	Calls        []ExternalCall  `json:"calls,omitempty"`
	Actions      []Action        `json:"actions,omitempty"`
}

// StepState is what a step did so far.
type StepState struct {
	Order     int             `json:"order"` // index into the definition's steps
	Name      string          `json:"name"`
	Status    StepStatus      `json:"status"`
	Attempts  int             `json:"attempts"`
	Result    json.RawMessage `json:"result,omitempty"`
	Error     string          `json:"error,omitempty"`
	StartedAt time.Time       `json:"started_at,omitzero"`
	UpdatedAt time.Time       `json:"updated_at,omitzero"`
}

const (
	// Served by the primary key, one look for each instance.
	stepErrorSQL = `(SELECT s.error FROM saga_steps AS s WHERE s.saga_id = saga_instances.id AND s.step_order = saga_instances.current_step)`

	summaryColumnsSQL = `
SELECT id, type, version, correlation_id, status, direction, current_step, attempt, last_error, cancel_reason,
       CASE WHEN status IN ('RUNNING', 'COMPENSATING') THEN ` + stepErrorSQL + ` END,
       created_at, updated_at, finished_at, TIMESTAMPDIFF(MICROSECOND, updated_at, NOW(6))`

	// Served by ix_saga_status (status, updated_at, and the id behind them): no filesort, and
	// with a limit no more is read than is wanted. One such query for each status. What else a
	// filter says is compared row by row; how far is bounded by maxScan.
	listSQL = summaryColumnsSQL + `
  FROM saga_instances FORCE INDEX (ix_saga_status)
 WHERE status = ?`
	listOlderSQL = ` AND updated_at <= NOW(6) - INTERVAL ? MICROSECOND`
	oldestSQL    = ` ORDER BY updated_at, id LIMIT ?`
	newestSQL    = ` ORDER BY updated_at DESC, id DESC LIMIT ?`
)

// List returns the instances that f chooses: those that changed last come first. With
// OlderThan it is the other way round, because the one that waits longest needs us most.
// partial means that it did not look at all that could fit: see maxScan.
func List(ctx context.Context, q sqltx.Querier, f Filter) (list []Summary, partial bool, err error) {
	if f.Limit <= 0 {
		f.Limit = 50
	}
	for _, s := range f.statuses() {
		some, bounded, err := listStatus(ctx, q, s, f)
		if err != nil {
			return nil, false, fmt.Errorf("list sagas: %w", err)
		}
		list, partial = append(list, some...), partial || bounded && len(some) < f.Limit
	}
	slices.SortFunc(list, func(a, b Summary) int {
		order := a.UpdatedAt.Compare(b.UpdatedAt)
		if order == 0 {
			order = strings.Compare(a.ID, b.ID)
		}
		if f.OlderThan > 0 {
			return order
		}
		return -order
	})
	return list[:min(len(list), f.Limit)], partial, nil
}

func (f Filter) query(s Status) (query string, args []any) {
	query, args = listSQL, []any{string(s)}
	order := newestSQL
	if f.OlderThan > 0 {
		query, args = query+listOlderSQL, append(args, f.OlderThan.Microseconds())
		order = oldestSQL
	}
	where, more := f.compared()
	return query + where + order, append(append(args, more...), f.Limit)
}

func listStatus(ctx context.Context, q sqltx.Querier, s Status, f Filter) (list []Summary, bounded bool, err error) {
	end, bounded, err := f.end(ctx, q, s)
	if err != nil {
		return nil, false, err
	}
	f.until = end
	query, args := f.query(s)
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, false, err
	}
	defer rows.Close()
	for rows.Next() {
		var s Summary
		if err := s.scan(rows.Scan); err != nil {
			return nil, false, err
		}
		list = append(list, s)
	}
	return list, bounded, rows.Err()
}

// scan reads the columns of summaryColumnsSQL and then those of more.
func (s *Summary) scan(scan func(...any) error, more ...any) error {
	var id, typ, correlation []byte
	var lastError, cancelReason, stepError sql.NullString
	var finished sql.NullTime
	var unchanged int64
	if err := scan(append([]any{
		&id, &typ, &s.Version, &correlation, &s.Status, &s.Direction, &s.CurrentStep, &s.Attempt, &lastError, &cancelReason, &stepError,
		&s.CreatedAt, &s.UpdatedAt, &finished, &unchanged,
	}, more...)...); err != nil {
		return err
	}
	s.ID, s.Type, s.CorrelationID = string(id), string(typ), string(correlation)
	s.LastError, s.CancelReason, s.StepError, s.FinishedAt = lastError.String, cancelReason.String, stepError.String, finished.Time
	s.Unchanged = time.Duration(unchanged) * time.Microsecond
	return nil
}

const (
	// Deadlines are kept by a clock that stands still during outages.
	getSQL = summaryColumnsSQL + `,
       command_id, awaited_since, rescues, trace_id, plan, skipped, payload, call_open,
       deadline_at + INTERVAL p.downtime_us MICROSECOND, saga_deadline_at + INTERVAL p.downtime_us MICROSECOND,
       TIMESTAMPDIFF(MICROSECOND, NOW(6), deadline_at + INTERVAL p.downtime_us MICROSECOND)
  FROM saga_instances
       CROSS JOIN (SELECT COALESCE(MAX(downtime_us), 0) AS downtime_us FROM saga_pulse WHERE id = 1) AS p
 WHERE id = ?`

	getStepsSQL = `
SELECT step_order, name, status, attempts, result, error, started_at, updated_at
  FROM saga_steps
 WHERE saga_id = ?
 ORDER BY step_order`
)

// Served by uq_saga_correlation.
const findSQL = `SELECT id FROM saga_instances WHERE type = ? AND correlation_id = ?`

// Find returns the id of the instance of a type with this correlation id, or ErrNotFound.
func Find(ctx context.Context, q sqltx.Querier, typ, correlationID string) (string, error) {
	var id []byte
	err := q.QueryRowContext(ctx, findSQL, []byte(typ), []byte(correlationID)).Scan(&id)
	if errors.Is(err, sql.ErrNoRows) {
		return "", fmt.Errorf("%w: type %s, correlation id %q", ErrNotFound, typ, correlationID)
	}
	if err != nil {
		return "", fmt.Errorf("find saga of %q: %w", correlationID, err)
	}
	return string(id), nil
}

// Get returns one instance. ErrNotFound means there is none with that id.
func Get(ctx context.Context, q sqltx.Querier, id string) (Detail, error) {
	var d Detail
	var command, trace, plan, payload []byte
	var awaited, deadline, sagaDeadline sql.NullTime
	var untilDue sql.NullInt64
	err := d.scan(q.QueryRowContext(ctx, getSQL, []byte(id)).Scan,
		&command, &awaited, &d.Rescues, &trace, &plan, &d.LeftOut, &payload, &d.CallOpen, &deadline, &sagaDeadline, &untilDue)
	if errors.Is(err, sql.ErrNoRows) {
		return Detail{}, fmt.Errorf("%w: %q", ErrNotFound, id)
	}
	if err != nil {
		return Detail{}, fmt.Errorf("read saga %q: %w", id, err)
	}
	d.CommandID, d.TraceID, d.Plan, d.Payload = string(command), string(trace), string(plan), rawJSON(payload)
	d.AwaitedSince, d.DeadlineAt, d.SagaDeadline = awaited.Time, deadline.Time, sagaDeadline.Time
	d.UntilDue = time.Duration(untilDue.Int64) * time.Microsecond
	if d.Steps, err = getSteps(ctx, q, id); err != nil {
		return Detail{}, fmt.Errorf("read steps of saga %q: %w", id, err)
	}
	if d.Calls, err = journal(ctx, q, id); err != nil {
		return Detail{}, fmt.Errorf("read calls of saga %q: %w", id, err)
	}
	if d.Actions, err = Actions(ctx, q, id); err != nil {
		return Detail{}, err
	}
	return d, nil
}

func getSteps(ctx context.Context, q sqltx.Querier, id string) ([]StepState, error) {
	rows, err := q.QueryContext(ctx, getStepsSQL, []byte(id))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var steps []StepState
	for rows.Next() {
		var s StepState
		var name, result []byte
		var failure sql.NullString
		if err := rows.Scan(&s.Order, &name, &s.Status, &s.Attempts, &result, &failure, &s.StartedAt, &s.UpdatedAt); err != nil {
			return nil, err
		}
		s.Name, s.Error, s.Result = string(name), failure.String, rawJSON(result)
		steps = append(steps, s)
	}
	return steps, rows.Err()
}

// rawJSON returns b as it is, or as a JSON text if somebody put something else there.
func rawJSON(b []byte) json.RawMessage {
	if len(b) == 0 || json.Valid(b) {
		return b
	}
	return mustJSON(string(b))
}

// Counts returns how many instances have each status.
func Counts(ctx context.Context, q sqltx.Querier) (map[Status]int, error) {
	// Reads the whole of ix_saga_status and no row.
	return sqltx.Count[Status](ctx, q, "sagas", `SELECT status, COUNT(*) FROM saga_instances GROUP BY status`)
}

// MaxViolations is the most violations of one rule that Verify reports.
const MaxViolations = 1000

// Served by ix_saga_status.
const openSQL = `
SELECT id, CONCAT(status, ', unchanged for ', TIMESTAMPDIFF(SECOND, updated_at, NOW(6)), ' s')
  FROM saga_instances FORCE INDEX (ix_saga_status)
 WHERE status = ?
 ORDER BY updated_at
 LIMIT ?`

// Verify checks at a moment of rest that every saga has ended. MANUAL_ACTION is an end.
func Verify(ctx context.Context, q sqltx.Querier) ([]sqltx.Violation, error) {
	var all []sqltx.Violation
	for _, s := range []Status{Running, Compensating} {
		v, err := sqltx.Check(ctx, q, "every saga has ended", openSQL, string(s), MaxViolations)
		if err != nil {
			return nil, err
		}
		all = append(all, v...)
	}
	return all, nil
}
