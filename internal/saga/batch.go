package saga

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// batch is one call of HandleBatch: what was read, and what is to be written.
type batch struct {
	*Engine
	tx *sqltx.Tx

	steps    []stepRow
	touched  []*instance
	commands []message.Message
	events   []message.Message
	later    []outbox.Delayed
}

// command is a message of the batch whose saga awaits it.
type command struct {
	*message.Message
	ctx  context.Context // of its span
	in   *instance
	done []byte // in a compensation: what the action returned
}

func (b *batch) run(ctx context.Context, msgs []message.Message) ([]message.Outcome, error) {
	instances, err := lockInstances(ctx, b.tx, sagaIDs(msgs))
	if err != nil {
		return nil, err
	}
	out := make([]message.Outcome, len(msgs))
	var todo []*command
	taken := map[*instance]bool{}
	for i := range msgs {
		c := &command{Message: &msgs[i], in: instances[msgs[i].Headers.String(message.HeaderSagaID)]}
		switch out[i] = b.check(c); {
		case out[i].Kind != message.Done:
		case taken[c.in]:
			out[i] = stale("another copy in the same batch")
		default:
			taken[c.in] = true
			todo = append(todo, c)
		}
	}
	if err := b.lockRows(ctx, todo); err != nil {
		return nil, err
	}
	if err := b.loadResults(ctx, todo); err != nil {
		return nil, err
	}
	for _, commands := range bySteps(todo) {
		if err := b.handle(ctx, commands); err != nil {
			return nil, err
		}
	}
	return out, b.write(ctx)
}

// bySteps puts commands together that ask for the same step in the same direction, in the order
// of the first of each.
func bySteps(todo []*command) (groups [][]*command) {
	type turn struct {
		*step
		Direction
	}
	at := map[turn]int{}
	for _, c := range todo {
		t := turn{c.in.step(), c.in.direction}
		i, ok := at[t]
		if !ok {
			i = len(groups)
			at[t], groups = i, append(groups, nil)
		}
		groups[i] = append(groups[i], c)
	}
	return groups
}

// sagaIDs returns the sorted ids of the sagas that msgs are for.
func sagaIDs(msgs []message.Message) []string {
	ids := make([]string, len(msgs))
	for i := range msgs {
		ids[i] = msgs[i].Headers.String(message.HeaderSagaID)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// deferFor is how long a command of an unknown version stays away.
const deferFor = 5 * time.Second

// check decides whether a command is to be run: Done. Any other outcome says why not.
func (b *batch) check(c *command) message.Outcome {
	in := c.in
	switch {
	case in == nil:
		return message.Park("no saga with id %q", c.Headers.String(message.HeaderSagaID))
	case in.commandID != c.MessageID:
		return stale("saga %s is %s and awaits %q", in.id, in.status, in.commandID)
	case len(c.Body) > 0 && !json.Valid(c.Body):
		return message.Park("body is not JSON")
	}
	versions, known := b.defs[in.typ]
	if !known {
		return message.Park("no definition of saga type %q", in.typ)
	}
	if in.def = versions[in.version]; in.def == nil {
		return message.Outcome{Kind: message.Deferred, After: deferFor,
			Reason: fmt.Sprintf("this worker does not know version %d of saga type %q", in.version, in.typ)}
	}
	if in.plan != "" && in.plan != in.def.plan {
		return message.Park("saga %s awaits step %d of %q with the steps %s, but this worker's version %d has the steps %s; "+
			"a definition that changes needs a new version", in.id, in.current+1, in.typ, in.plan, in.version, in.def.plan)
	}
	if in.current >= len(in.def.steps) {
		return message.Park("saga %s is at step %d; its definition has %d", in.id, in.current, len(in.def.steps))
	}
	var err error
	if in.input, err = in.def.decode(in.payload); err != nil {
		return message.Park("input of saga %s: %v", in.id, err)
	}
	return message.Outcome{Kind: message.Done}
}

func stale(format string, args ...any) message.Outcome {
	return message.Outcome{Kind: message.Stale, Reason: fmt.Sprintf(format, args...)}
}

// lockRows takes the business locks of the whole batch, sorted, before any step runs: kind
// after kind of rows, each once.
func (b *batch) lockRows(ctx context.Context, todo []*command) error {
	locks, keys := map[string]*lock{}, map[string][]string{}
	var kinds []string
	for _, c := range todo {
		l := c.in.step().lock
		if l == nil || c.Failure != "" { // it is not going to run
			continue
		}
		if locks[l.kind] == nil {
			locks[l.kind] = l
			kinds = append(kinds, l.kind)
		}
		keys[l.kind] = append(keys[l.kind], l.keys(c.in.input)...)
	}
	slices.Sort(kinds)
	for _, kind := range kinds {
		ks := keys[kind]
		slices.Sort(ks)
		if ks = slices.Compact(ks); len(ks) == 0 {
			continue
		}
		if err := locks[kind].take(ctx, b.tx, ks); err != nil {
			return fmt.Errorf("lock %d rows with %s: %w", len(ks), kind, err)
		}
	}
	return nil
}

// loadResults reads what the actions left whose compensations are to run.
func (b *batch) loadResults(ctx context.Context, todo []*command) error {
	var args []any
	undo := map[string]*command{}
	for _, c := range todo {
		if c.in.direction == Compensate && undo[c.in.id] == nil { // a copy will not run
			undo[c.in.id] = c
			args = append(args, []byte(c.in.id), c.in.current)
		}
	}
	if len(args) == 0 {
		return nil
	}
	rows, err := b.tx.Query(ctx, fmt.Sprintf(selectResultsSQL, sqltx.Tuples(len(undo), 2)), args...)
	if err != nil {
		return fmt.Errorf("read step results: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var id, result []byte
		if err := rows.Scan(&id, &result); err != nil {
			return fmt.Errorf("read step results: %w", err)
		}
		undo[string(id)].done = result
	}
	return rows.Err()
}

// write puts everything the batch decided into the transaction.
func (b *batch) write(ctx context.Context) error {
	if err := upsertSteps(ctx, b.tx, b.steps); err != nil {
		return err
	}
	if err := updateInstances(ctx, b.tx, b.touched); err != nil {
		return err
	}
	if err := outbox.Add(ctx, b.tx, append(b.commands, b.events...)...); err != nil {
		return err
	}
	return outbox.Schedule(ctx, b.tx, b.later...)
}
