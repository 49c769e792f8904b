package saga

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

// Rehearsal is what an operation would do.
type Rehearsal struct {
	Effect
	Doing
	Run *Run `json:"step_run,omitempty"` // of the step that it leads to; nil: none
}

// Doing is what was written and sent, in order.
type Doing struct {
	Writes   []Written `json:"writes"`
	Messages []Sent    `json:"messages"`
}

// Written is a statement that wrote.
type Written struct {
	Verb  string `json:"verb"`
	Table string `json:"table"`
	Rows  int64  `json:"rows"` // affected; -1: not known
}

// Sent is a message that would be sent.
type Sent struct {
	Type       string        `json:"type"`
	Exchange   string        `json:"exchange"`
	RoutingKey string        `json:"routing_key"`
	After      time.Duration `json:"after_ns,omitempty"` // from now
}

// Run is what a step's function did.
type Run struct {
	Step      string    `json:"step"`
	Queue     string    `json:"queue"` // the step's
	Direction Direction `json:"direction"`
	NotRun    string    `json:"not_run,omitempty"` // why it was not
	Doing
	Error  string `json:"error,omitempty"` // with which it failed; what it wrote is taken back then
	Status Status `json:"status"`          // of the saga, afterwards
}

var errRehearsed = errors.New("saga: rehearsed")

// Rehearse does an operation, and runs the step that it leads to, in a transaction that is rolled back:
// behind a step that is left out, say, one may fail that reads its result. It calls no other system, and no span tells of it. A RefusedError
// is as for Operate.
func (e *Engine) Rehearse(ctx context.Context, db *sql.DB, id string, op Operation) (r Rehearsal, err error) {
	err = sqltx.WithTx(tracing.Unrecorded(ctx), db, func(ctx context.Context, tx *sqltx.Tx) error {
		if r, err = e.rehearse(ctx, tx, id, op); err != nil {
			return err
		}
		return errRehearsed
	})
	if errors.Is(err, errRehearsed) {
		err = nil
	}
	return r, err
}

func (e *Engine) rehearse(ctx context.Context, tx *sqltx.Tx, id string, op Operation) (r Rehearsal, err error) {
	b := &batch{Engine: e, tx: tx}
	if r.Effect, err = b.operate(ctx, id, op); err != nil {
		return r, err
	}
	if err := b.write(ctx); err != nil {
		return r, err
	}
	r.Doing = b.doing(0)
	if !r.Changed || r.Status != Running && r.Status != Compensating {
		return r, nil
	}
	r.Run, err = e.tryStep(ctx, tx, id)
	return r, err
}

// doing tells what the batch wrote, from the given statement of its transaction on, and what it sends.
func (b *batch) doing(from int) Doing {
	d := Doing{Writes: []Written{}, Messages: []Sent{}}
	for _, w := range b.tx.Writes()[from:] {
		d.Writes = append(d.Writes, Written{w.Verb(), w.Table(), w.Affected})
	}
	for _, m := range append(b.commands, b.events...) {
		d.Messages = append(d.Messages, Sent{Type: m.Type, Exchange: m.Exchange, RoutingKey: m.RoutingKey})
	}
	for _, l := range b.later {
		d.Messages = append(d.Messages, Sent{l.Type, l.Exchange, l.RoutingKey, l.After})
	}
	return d
}

// tryStep runs the step that a saga awaits, if that can be done here.
func (e *Engine) tryStep(ctx context.Context, tx *sqltx.Tx, id string) (*Run, error) {
	found, err := lockInstances(ctx, tx, []string{id})
	if err != nil {
		return nil, err
	}
	b, in, from := &batch{Engine: e, tx: tx}, found[id], len(tx.Writes())
	if b.find(in).Kind != message.Done {
		return nil, fmt.Errorf("saga %s: its definition is not known any more", id)
	}
	r := &Run{Step: in.stepName(), Queue: in.step().queue, Direction: in.direction, Status: in.status, Doing: b.doing(from)}
	if in.step().remote {
		r.NotRun = "it is a participant's: its command goes to queue " + in.step().queue
		return r, nil
	}
	info := Info{SagaID: in.id, Step: r.Step, Direction: in.direction}
	m := message.Message{
		Properties: message.Properties{MessageID: in.commandID},
		Headers:    message.Headers{message.HeaderSagaID: in.id},
	}
	var out []message.Outcome
	err = guarded(func() (err error) { out, err = b.run(ctx, []message.Message{m}); return err })
	switch {
	case err != nil && IsPermanent(err), err != nil && tx.Err() == nil:
		r.Error = err.Error() // a hook's, say: a worker would try again and again
		return r, nil
	case err != nil:
		return nil, err
	case out[0].Kind != message.Done:
		// A step that calls another system is sent back to the lane for that, without a reason.
		r.NotRun = cmp.Or(out[0].Reason, "it would call another system first, with the idempotency key "+info.IdempotencyKey()+
			"; nobody knows what that will say")
		return r, nil
	}
	r.Doing = b.doing(from)
	for _, s := range b.steps {
		if s.name == r.Step && s.err != "" {
			r.Error = s.err
		}
	}
	for _, t := range b.touched {
		r.Status = t.status
	}
	return r, nil
}
