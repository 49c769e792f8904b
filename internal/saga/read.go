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

// Statuses are all statuses of an instance, in the order of its life.
var Statuses = []Status{Running, Completed, Compensating, Compensated, ManualAction}

// Filter chooses instances. Zero fields choose all.
type Filter struct {
	Type      string
	Status    Status
	OlderThan time.Duration // nothing has happened to them for so long
	Limit     int           // default 50
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
	DeadlineAt   time.Time       `json:"deadline_at,omitzero"`
	TraceID      string          `json:"trace_id,omitempty"`
	Payload      json.RawMessage `json:"payload"`
	Steps        []StepState     `json:"steps"` // those that have a row; the others are PENDING
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
	summaryColumnsSQL = `
SELECT id, type, version, correlation_id, status, direction, current_step, attempt, last_error,
       created_at, updated_at, finished_at, TIMESTAMPDIFF(MICROSECOND, updated_at, NOW(6))`

	// Served by ix_saga_status (status, updated_at, and the id behind them): no filesort, and
	// with a limit no more is read than is wanted. One such query for each status.
	listSQL = summaryColumnsSQL + `
  FROM saga_instances FORCE INDEX (ix_saga_status)
 WHERE status = ?`
	listTypeSQL  = ` AND type = ?`
	listOlderSQL = ` AND updated_at <= NOW(6) - INTERVAL ? MICROSECOND`
	oldestSQL    = ` ORDER BY updated_at, id LIMIT ?`
	newestSQL    = ` ORDER BY updated_at DESC, id DESC LIMIT ?`
)

// List returns the instances that f chooses: those that changed last come first. With
// OlderThan it is the other way round, because the one that waits longest needs us most.
func List(ctx context.Context, q sqltx.Querier, f Filter) ([]Summary, error) {
	if f.Limit <= 0 {
		f.Limit = 50
	}
	statuses := Statuses
	if f.Status != "" {
		statuses = []Status{f.Status}
	}
	var list []Summary
	for _, s := range statuses {
		some, err := listStatus(ctx, q, s, f)
		if err != nil {
			return nil, fmt.Errorf("list sagas: %w", err)
		}
		list = append(list, some...)
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
	return list[:min(len(list), f.Limit)], nil
}

func (f Filter) query(s Status) (query string, args []any) {
	query, args = listSQL, []any{string(s)}
	order := newestSQL
	if f.Type != "" {
		query, args = query+listTypeSQL, append(args, []byte(f.Type))
	}
	if f.OlderThan > 0 {
		query, args = query+listOlderSQL, append(args, f.OlderThan.Microseconds())
		order = oldestSQL
	}
	return query + order, append(args, f.Limit)
}

func listStatus(ctx context.Context, q sqltx.Querier, s Status, f Filter) ([]Summary, error) {
	query, args := f.query(s)
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var list []Summary
	for rows.Next() {
		var s Summary
		if err := s.scan(rows.Scan); err != nil {
			return nil, err
		}
		list = append(list, s)
	}
	return list, rows.Err()
}

// scan reads the columns of summaryColumnsSQL and then those of more.
func (s *Summary) scan(scan func(...any) error, more ...any) error {
	var id, typ, correlation []byte
	var lastError sql.NullString
	var finished sql.NullTime
	var unchanged int64
	if err := scan(append([]any{
		&id, &typ, &s.Version, &correlation, &s.Status, &s.Direction, &s.CurrentStep, &s.Attempt, &lastError,
		&s.CreatedAt, &s.UpdatedAt, &finished, &unchanged,
	}, more...)...); err != nil {
		return err
	}
	s.ID, s.Type, s.CorrelationID = string(id), string(typ), string(correlation)
	s.LastError, s.FinishedAt = lastError.String, finished.Time
	s.Unchanged = time.Duration(unchanged) * time.Microsecond
	return nil
}

const (
	getSQL = summaryColumnsSQL + `,
       command_id, awaited_since, rescues, deadline_at, trace_id, payload
  FROM saga_instances
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
	var command, trace, payload []byte
	var awaited, deadline sql.NullTime
	err := d.scan(q.QueryRowContext(ctx, getSQL, []byte(id)).Scan,
		&command, &awaited, &d.Rescues, &deadline, &trace, &payload)
	if errors.Is(err, sql.ErrNoRows) {
		return Detail{}, fmt.Errorf("%w: %q", ErrNotFound, id)
	}
	if err != nil {
		return Detail{}, fmt.Errorf("read saga %q: %w", id, err)
	}
	d.CommandID, d.TraceID, d.Payload = string(command), string(trace), rawJSON(payload)
	d.AwaitedSince, d.DeadlineAt = awaited.Time, deadline.Time
	if d.Steps, err = getSteps(ctx, q, id); err != nil {
		return Detail{}, fmt.Errorf("read steps of saga %q: %w", id, err)
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
	rows, err := q.QueryContext(ctx, `SELECT status, COUNT(*) FROM saga_instances GROUP BY status`)
	if err != nil {
		return nil, fmt.Errorf("count sagas: %w", err)
	}
	defer rows.Close()
	counts := map[Status]int{}
	for rows.Next() {
		var s Status
		var n int
		if err := rows.Scan(&s, &n); err != nil {
			return nil, fmt.Errorf("count sagas: %w", err)
		}
		counts[s] = n
	}
	return counts, rows.Err()
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
