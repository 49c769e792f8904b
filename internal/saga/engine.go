package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

// Engine runs the commands of the definitions it knows. It is the inbox's handler for saga
// messages, and safe for concurrent use.
type Engine struct {
	defs map[string]map[int]*Definition
	log  *slog.Logger
}

// NewEngine returns an engine that knows defs; several versions of one type may be among them.
func NewEngine(log *slog.Logger, defs ...*Definition) *Engine {
	e := &Engine{defs: map[string]map[int]*Definition{}, log: log}
	for _, d := range defs {
		if e.defs[d.Type] == nil {
			e.defs[d.Type] = map[int]*Definition{}
		}
		e.defs[d.Type][d.Version] = d
	}
	return e
}

// Definition returns the definition of a type and version.
func (e *Engine) Definition(typ string, version int) (*Definition, error) {
	if d := e.defs[typ][version]; d != nil {
		return d, nil
	}
	return nil, fmt.Errorf("%w: %s version %d", ErrUnknownDefinition, typ, version)
}

// deferFor is how long a command of an unknown version stays away.
const deferFor = 5 * time.Second

// batch is one call of HandleBatch: what was read, and what is to be written.
type batch struct {
	*Engine
	tx        *sqltx.Tx
	instances map[string]*instance
	results   map[string][]byte // of the steps to compensate, by saga
	steps     []stepRow
	touched   []*instance
	commands  []message.Message
	later     []outbox.Delayed
}

// HandleBatch runs the commands among msgs that are awaited, and records what follows:
// steps, instances and next commands in one statement each. The others are stale.
func (e *Engine) HandleBatch(ctx context.Context, tx *sqltx.Tx, msgs []message.Message) []message.Outcome {
	b := &batch{Engine: e, tx: tx}
	out, err := b.run(ctx, msgs)
	if err != nil {
		tx.Fail(err) // the lane runs the batch again, or its messages one by one
	}
	return out
}

func (b *batch) run(ctx context.Context, msgs []message.Message) ([]message.Outcome, error) {
	out := make([]message.Outcome, len(msgs))
	var ids []string
	for i := range msgs {
		ids = append(ids, msgs[i].Headers.String(message.HeaderSagaID))
	}
	slices.Sort(ids)
	var err error
	if b.instances, err = lockInstances(ctx, b.tx, slices.Compact(ids)); err != nil {
		return nil, err
	}
	todo := make([]bool, len(msgs))
	for i := range msgs {
		out[i], todo[i] = b.check(&msgs[i])
	}
	if err := b.lockRows(ctx, msgs, todo); err != nil {
		return nil, err
	}
	if err := b.loadResults(ctx, msgs, todo); err != nil {
		return nil, err
	}
	for i := range msgs {
		if !todo[i] {
			continue
		}
		in := b.instanceOf(&msgs[i])
		if in.commandID != msgs[i].MessageID {
			out[i] = message.Outcome{Kind: message.Stale, Reason: "another copy in the same batch"}
			continue
		}
		if err := b.handle(ctx, in, &msgs[i]); err != nil {
			return nil, err
		}
	}
	return out, b.write(ctx)
}

func (b *batch) instanceOf(m *message.Message) *instance {
	return b.instances[m.Headers.String(message.HeaderSagaID)]
}

// check decides whether a command is to be run; if not, the outcome says why.
func (b *batch) check(m *message.Message) (message.Outcome, bool) {
	in := b.instanceOf(m)
	switch {
	case in == nil:
		return message.Park("no saga with id %q", m.Headers.String(message.HeaderSagaID)), false
	case in.commandID != m.MessageID:
		return message.Outcome{Kind: message.Stale, Reason: fmt.Sprintf("saga %s is %s and awaits %q", in.id, in.status, in.commandID)}, false
	case len(m.Body) > 0 && !json.Valid(m.Body):
		return message.Park("body is not JSON"), false
	}
	if in.def == nil {
		versions, known := b.defs[in.typ]
		if !known {
			return message.Park("no definition of saga type %q", in.typ), false
		}
		if in.def = versions[in.version]; in.def == nil {
			return message.Outcome{Kind: message.Deferred, After: deferFor,
				Reason: fmt.Sprintf("this worker does not know version %d of saga type %q", in.version, in.typ)}, false
		}
		if in.current >= len(in.def.steps) {
			return message.Park("saga %s is at step %d; its definition has %d", in.id, in.current, len(in.def.steps)), false
		}
		var err error
		if in.input, err = in.def.decode(in.payload); err != nil {
			return message.Park("input of saga %s: %v", in.id, err), false
		}
	}
	return message.Outcome{Kind: message.Done}, true
}

// lockRows takes the business locks of the whole batch, sorted, before any step runs.
func (b *batch) lockRows(ctx context.Context, msgs []message.Message, todo []bool) error {
	type taker = func(context.Context, *sqltx.Tx, []string) error
	var order []string
	keys, takers := map[string][]string{}, map[string]taker{}
	for i := range msgs {
		if !todo[i] || msgs[i].Failure != "" {
			continue
		}
		in := b.instanceOf(&msgs[i])
		l := in.def.steps[in.current].lock
		if l == nil {
			continue
		}
		// Functions cannot be compared; steps of one queue lock the same kind of rows.
		queue := in.def.steps[in.current].queue
		if takers[queue] == nil {
			takers[queue] = l.take
			order = append(order, queue)
		}
		keys[queue] = append(keys[queue], l.keys(in.input)...)
	}
	slices.Sort(order)
	for _, queue := range order {
		ks := keys[queue]
		slices.Sort(ks)
		if ks = slices.Compact(ks); len(ks) == 0 {
			continue
		}
		if err := takers[queue](ctx, b.tx, ks); err != nil {
			return fmt.Errorf("lock rows for queue %s: %w", queue, err)
		}
	}
	return nil
}

// loadResults reads what the actions returned whose compensations are to run.
func (b *batch) loadResults(ctx context.Context, msgs []message.Message, todo []bool) error {
	var args []any
	for i := range msgs {
		if in := b.instanceOf(&msgs[i]); todo[i] && in.direction == Compensate {
			args = append(args, []byte(in.id), in.current)
		}
	}
	b.results = make(map[string][]byte, len(args)/2)
	if len(args) == 0 {
		return nil
	}
	rows, err := b.tx.Query(ctx, fmt.Sprintf(selectResultsSQL, sqltx.Tuples(len(args)/2, 2)), args...)
	if err != nil {
		return fmt.Errorf("read step results: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var id, result []byte
		var order int
		if err := rows.Scan(&id, &order, &result); err != nil {
			return fmt.Errorf("read step results: %w", err)
		}
		b.results[string(id)] = result
	}
	return rows.Err()
}

// handle runs the step a command asks for and moves its instance on. An error ends the batch.
func (b *batch) handle(ctx context.Context, in *instance, m *message.Message) error {
	ctx = tracing.Extract(ctx, m.Headers)
	if in.status == ManualAction {
		if err := b.resume(ctx, in); err != nil {
			return err
		}
	}
	s := in.def.steps[in.current]
	ctx, span := tracing.Step(ctx, in.id, s.name, string(in.direction), in.attempt)
	result, err := b.call(ctx, in, s, m)
	tracing.End(span, err)
	if b.tx.Err() != nil {
		return b.tx.Err()
	}
	switch {
	case err == nil && in.direction == Execute:
		return b.completed(ctx, in, result)
	case err == nil:
		return b.compensated(ctx, in)
	case !IsPermanent(err) && in.attempt < s.retry.attempts:
		return b.retry(ctx, in, m, err)
	case in.direction == Execute:
		return b.failed(ctx, in, err)
	default:
		return b.stop(ctx, in, EvCompensationFailed, fmt.Sprintf("compensation of step %s failed at attempt %d: %v", s.name, in.attempt, err))
	}
}

// call runs the step's function. If it fails, only its own writes are undone.
func (b *batch) call(ctx context.Context, in *instance, s *step, m *message.Message) ([]byte, error) {
	if m.Failure != "" {
		return nil, errors.New(m.Failure)
	}
	ctx = context.WithValue(ctx, infoKey{}, Info{SagaID: in.id, Step: s.name, Direction: in.direction, Attempt: in.attempt})
	sp := b.tx.Savepoint()
	var result []byte
	var err error
	if in.direction == Execute {
		result, err = s.action(ctx, b.tx, in.input)
	} else if s.compensate != nil {
		err = s.compensate(ctx, b.tx, in.input, b.results[in.id])
	}
	if err == nil {
		sp.Release()
		return result, nil
	}
	if b.tx.Err() == nil {
		if rerr := sp.Rollback(ctx); rerr != nil {
			return nil, rerr
		}
	}
	return nil, err
}

// move applies the state table, and remembers what to write.
func (b *batch) move(in *instance, ev Event, result []byte, reason string) error {
	r, err := next(in.status, ev)
	if err != nil {
		return fmt.Errorf("saga %s: %w", in.id, err)
	}
	if r.step != "" {
		b.steps = append(b.steps, stepRow{
			sagaID: in.id, order: in.current, name: in.def.steps[in.current].name,
			status: r.step, attempts: in.attempt, result: result, err: reason,
		})
	}
	in.status = r.to
	if !in.dirty {
		in.dirty = true
		b.touched = append(b.touched, in)
	}
	return nil
}

// await makes step i, in the given direction, what the saga waits for next.
func (b *batch) await(ctx context.Context, in *instance, i int, dir Direction) {
	in.current, in.direction, in.attempt = i, dir, 1
	m := in.command("")
	tracing.Carry(ctx, &m)
	b.commands = append(b.commands, m)
}

func (b *batch) completed(ctx context.Context, in *instance, result []byte) error {
	if in.current+1 < len(in.def.steps) {
		if err := b.move(in, EvStepCompleted, result, ""); err != nil {
			return err
		}
		b.await(ctx, in, in.current+1, Execute)
		return nil
	}
	if err := b.move(in, EvSagaCompleted, result, ""); err != nil {
		return err
	}
	in.commandID, in.lastError = "", ""
	return hook(in.def.hooks.completed)(ctx, b.tx, in)
}

func (b *batch) failed(ctx context.Context, in *instance, cause error) error {
	step := in.def.steps[in.current].name
	reason := cause.Error()
	if !IsPermanent(cause) {
		reason = fmt.Sprintf("gave up after %d attempts: %s", in.attempt, reason)
	}
	in.lastError = fmt.Sprintf("%s: %s", step, reason)
	undo := in.def.undoBefore(in.current)
	if undo < 0 {
		if err := b.move(in, EvStepFailedClean, nil, reason); err != nil {
			return err
		}
		in.commandID = ""
		return hookReason(in.def.hooks.compensated)(ctx, b.tx, in)
	}
	if err := b.move(in, EvStepFailed, nil, reason); err != nil {
		return err
	}
	b.await(ctx, in, undo, Compensate)
	return nil
}

func (b *batch) compensated(ctx context.Context, in *instance) error {
	undo := in.def.undoBefore(in.current)
	if undo < 0 {
		if err := b.move(in, EvSagaCompensated, nil, ""); err != nil {
			return err
		}
		in.commandID = ""
		return hookReason(in.def.hooks.compensated)(ctx, b.tx, in)
	}
	if err := b.move(in, EvStepCompensated, nil, ""); err != nil {
		return err
	}
	b.await(ctx, in, undo, Compensate)
	return nil
}

// retry schedules the next attempt under a new id, which the saga awaits from now on.
func (b *batch) retry(ctx context.Context, in *instance, m *message.Message, cause error) error {
	ev := EvStepRetried
	if in.direction == Compensate {
		ev = EvCompensationRetried
	}
	if err := b.move(in, ev, nil, cause.Error()); err != nil {
		return err
	}
	s := in.def.steps[in.current]
	wait := s.retry.delay(in.attempt)
	b.log.Warn("saga step will be retried", "saga_id", in.id, "step", s.name, "direction", in.direction,
		"attempt", in.attempt, "wait", wait.Round(time.Millisecond), "error", cause)
	in.attempt++
	next := in.command(m.RequestID())
	tracing.Carry(ctx, &next)
	b.later = append(b.later, outbox.Delayed{Message: next, After: wait, Reason: cause.Error()})
	return nil
}

// stop leaves the saga to an operator.
func (b *batch) stop(ctx context.Context, in *instance, ev Event, reason string) error {
	if err := b.move(in, ev, nil, reason); err != nil {
		return err
	}
	if ev == EvCompensationFailed {
		in.commandID = "" // a parked command is still awaited: its replay moves the saga on
	}
	in.lastError = reason
	b.log.Error("saga needs manual action", "saga_id", in.id, "step", in.def.steps[in.current].name, "error", reason)
	b.commands = append(b.commands, in.manualActionEvent(time.Now()))
	return hookReason(in.def.hooks.manualAction)(ctx, b.tx, in)
}

// resume moves a saga whose parked command came back to where it was.
func (b *batch) resume(ctx context.Context, in *instance) error {
	ev := EvActionReturned
	if in.direction == Compensate {
		ev = EvCompensationBack
	}
	if err := b.move(in, ev, nil, ""); err != nil {
		return err
	}
	return hook(in.def.hooks.resumed)(ctx, b.tx, in)
}

// write puts everything the batch decided into the transaction.
func (b *batch) write(ctx context.Context) error {
	if err := upsertSteps(ctx, b.tx, b.steps); err != nil {
		return err
	}
	if err := updateInstances(ctx, b.tx, b.touched); err != nil {
		return err
	}
	if err := outbox.Add(ctx, b.tx, b.commands...); err != nil {
		return err
	}
	return outbox.Schedule(ctx, b.tx, b.later...)
}

// CommandParked tells the engine, in the transaction that parks m, that nobody will run it
// now: if a saga awaits it, that saga needs an operator. A replay of m moves it on again.
func (e *Engine) CommandParked(ctx context.Context, tx *sqltx.Tx, m *message.Message, reason string) error {
	id := m.Headers.String(message.HeaderSagaID)
	if id == "" {
		return nil
	}
	found, err := lockInstances(ctx, tx, []string{id})
	if err != nil {
		return err
	}
	in := found[id]
	if in == nil || in.commandID != m.MessageID || in.status != Running && in.status != Compensating {
		return nil
	}
	b := &batch{Engine: e, tx: tx}
	if in.def = e.defs[in.typ][in.version]; in.def == nil || in.current >= len(in.def.steps) {
		in.def = &Definition{steps: unknownSteps(in.current + 1)} // no hooks to call, but it must not be stuck
	} else if in.input, err = in.def.decode(in.payload); err != nil {
		in.def = &Definition{steps: in.def.steps}
	}
	if err := b.stop(ctx, in, EvCommandParked, "command parked: "+reason); err != nil {
		return err
	}
	return b.write(ctx)
}

func unknownSteps(n int) []*step {
	steps := make([]*step, n)
	for i := range steps {
		steps[i] = &step{name: "unknown"}
	}
	return steps
}

func hook(f func(context.Context, *sqltx.Tx, any) error) func(context.Context, *sqltx.Tx, *instance) error {
	return func(ctx context.Context, tx *sqltx.Tx, in *instance) error {
		if f == nil {
			return nil
		}
		if err := f(ctx, tx, in.input); err != nil {
			return fmt.Errorf("hook of saga %s: %w", in.id, err)
		}
		return nil
	}
}

func hookReason(f func(context.Context, *sqltx.Tx, any, string) error) func(context.Context, *sqltx.Tx, *instance) error {
	return func(ctx context.Context, tx *sqltx.Tx, in *instance) error {
		if f == nil {
			return nil
		}
		if err := f(ctx, tx, in.input, in.lastError); err != nil {
			return fmt.Errorf("hook of saga %s: %w", in.id, err)
		}
		return nil
	}
}

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // maps of strings always marshal
	}
	return b
}
