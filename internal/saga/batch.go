package saga

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
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
	actions  []action
	calls    []callRow
}

// command is a message of the batch and the saga it is for.
type command struct {
	*message.Message
	ctx   context.Context // of its span
	in    *instance
	done  []byte // in a compensation: what the action returned
	reply *reply // nil: the step is to be run

	answer *callOutcome     // of the step's call to a system that is not ours; nil: it makes none
	out    *message.Outcome // what becomes of the message
}

func (b *batch) run(ctx context.Context, msgs []message.Message) ([]message.Outcome, error) {
	ids, err := b.sagaIDs(ctx, msgs)
	if err != nil {
		return nil, err
	}
	instances, err := lockInstances(ctx, b.tx, sorted(ids))
	if err != nil {
		return nil, err
	}
	out := make([]message.Outcome, len(msgs))
	todo, cancels, err := b.sort(ctx, msgs, ids, instances, out)
	if err != nil {
		return nil, err
	}
	if err := b.lockRows(ctx, todo); err != nil {
		return nil, err
	}
	if err := b.loadResults(ctx, todo); err != nil {
		return nil, err
	}
	if todo, err = b.begin(ctx, todo); err != nil {
		return nil, err
	}
	for _, commands := range bySteps(todo) {
		if err := b.handle(ctx, commands); err != nil {
			return nil, err
		}
	}
	for _, i := range slices.Sorted(maps.Keys(cancels)) {
		c := cancels[i]
		if out[i], err = b.cancelAsked(tracing.Extract(ctx, c.Headers), c); err != nil {
			return nil, err
		}
	}
	return out, b.write(ctx)
}

// sort finds out which messages are to be handled: those that their sagas await, one for each, and, by where
// they stand, wishes to cancel, which come behind them. Of the others out says what becomes of them.
func (b *batch) sort(ctx context.Context, msgs []message.Message, ids []string, instances map[string]*instance, out []message.Outcome,
) (todo []*command, cancels map[int]*command, err error) {
	taken := map[*instance]bool{}
	cancels = map[int]*command{}
	for i := range msgs {
		c := &command{Message: &msgs[i], in: instances[ids[i]], out: &out[i]}
		switch c.Type {
		case CancelType:
			cancels[i] = c
			continue
		case ReplyType:
			if out[i], err = b.checkReply(ctx, c); err != nil {
				return nil, nil, err
			}
		default:
			out[i] = b.check(c)
		}
		switch {
		case out[i].Kind != message.Done:
		case taken[c.in] && c.reply != nil:
			out[i] = b.late(c, c.reply)
		case c.reply != nil && c.Failure != "":
			taken[c.in] = true
			out[i] = b.unhandled(c)
		case taken[c.in]:
			out[i] = stale("another copy in the same batch")
		default:
			taken[c.in] = true
			if c.reply == nil || c.Attempt() == c.in.attempt { // it is here
				c.in.waits = ""
			}
			todo = append(todo, c)
		}
	}
	return todo, cancels, nil
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

// sagaIDs returns the id of the saga that each message is for; "": it names none that there is.
func (b *batch) sagaIDs(ctx context.Context, msgs []message.Message) ([]string, error) {
	ids := make([]string, len(msgs))
	named := map[name][]int{}
	for i := range msgs {
		ids[i] = msgs[i].Headers.String(message.HeaderSagaID)
		if ids[i] == "" && msgs[i].Type == CancelType {
			if n := nameIn(&msgs[i]); n.Type != "" && n.CorrelationID != "" {
				named[n] = append(named[n], i)
			}
		}
	}
	if len(named) == 0 {
		return ids, nil
	}
	found, err := findNamed(ctx, b.tx, slices.Collect(maps.Keys(named)))
	if err != nil {
		return nil, err
	}
	for n, at := range named {
		for _, i := range at {
			ids[i] = found[n]
		}
	}
	return ids, nil
}

// sorted returns the ids there are, each once, in the order in which sagas are locked.
func sorted(ids []string) []string {
	ids = slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return id == "" })
	slices.Sort(ids)
	return slices.Compact(ids)
}

// deferFor is how long a message stays away that another worker may be able to handle.
const deferFor = 5 * time.Second

// check decides whether a command is to be run: Done. Any other outcome says why not.
func (b *batch) check(c *command) message.Outcome {
	in := c.in
	switch {
	case in != nil && in.commandID != c.MessageID:
		return stale("saga %s is %s and awaits %q", in.id, in.status, in.commandID)
	case len(c.Body) > 0 && !json.Valid(c.Body):
		return message.Park("body is not JSON")
	}
	if out := b.findFor(c); out.Kind != message.Done {
		return out
	}
	if in.step().remote {
		return message.Park("step %s of saga type %q is remote; queue %s is not ours to consume", in.stepName(), in.typ, in.step().queue)
	}
	return message.Outcome{Kind: message.Done}
}

// findFor is find for the saga that a message is for.
func (b *batch) findFor(c *command) message.Outcome {
	if c.in == nil {
		return message.Park("%s", missing(c.Message))
	}
	return b.find(c.in)
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
		leaves := c.in.step().external(c.in.direction) != nil && c.Answer == nil && !c.in.callOpen
		if l == nil || c.Failure != "" || c.reply != nil || leaves { // it is not going to run
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

const selectResultsSQL = `
SELECT saga_id, result
  FROM saga_steps
 WHERE (saga_id, step_order) IN (%s)`

// loadResults reads what the actions left whose compensations are to run.
func (b *batch) loadResults(ctx context.Context, todo []*command) error {
	var args []any
	undo := map[string]*command{}
	for _, c := range todo {
		if c.in.direction == Compensate && c.reply == nil {
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
	if err := b.unschedule(ctx); err != nil {
		return err
	}
	if err := upsertSteps(ctx, b.tx, b.steps); err != nil {
		return err
	}
	if err := updateInstances(ctx, b.tx, b.touched); err != nil {
		return err
	}
	if err := upsertCalls(ctx, b.tx, b.calls); err != nil {
		return err
	}
	if err := insertActions(ctx, b.tx, b.actions); err != nil {
		return err
	}
	if err := outbox.Add(ctx, b.tx, append(b.commands, b.events...)...); err != nil {
		return err
	}
	return outbox.Schedule(ctx, b.tx, b.later...)
}

// unschedule takes back what waits for its time and is not awaited any more. What is in the outbox
// already, or a queue, comes to nothing when it arrives, where there is a barrier.
// One by one: for many ids a server may scan a table that is small, and lock what is not ours.
func (b *batch) unschedule(ctx context.Context) error {
	for _, in := range b.touched {
		if in.waits == "" || in.waits == in.commandID {
			continue
		}
		if err := outbox.Unschedule(ctx, b.tx, in.waits); err != nil {
			return err
		}
	}
	return nil
}
