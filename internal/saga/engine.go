package saga

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Engine runs the commands of the definitions it knows. It is the inbox's handler for saga
// messages, and safe for concurrent use.
type Engine struct {
	defs map[string]map[int]*Definition
	log  *slog.Logger
}

// NewEngine returns an engine that knows defs; several versions of one type may be among
// them. It panics if two are the same version.
func NewEngine(log *slog.Logger, defs ...*Definition) *Engine {
	e := &Engine{defs: map[string]map[int]*Definition{}, log: log}
	for _, d := range defs {
		if e.defs[d.Type] == nil {
			e.defs[d.Type] = map[int]*Definition{}
		}
		if e.defs[d.Type][d.Version] != nil {
			panic(fmt.Sprintf("saga.NewEngine: two definitions of %s version %d", d.Type, d.Version))
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

// Takes returns an error unless workers that know duplicates for retention take the commands of every
// step, however long they wait between two attempts: half of it is for queues and outages.
func (e *Engine) Takes(retention time.Duration) error {
	var errs []error
	for _, versions := range e.defs {
		for _, d := range versions {
			for i, s := range d.steps {
				// What a participant takes is its own affair.
				if wait := s.retry.longest(i > d.pivot); !s.remote && wait > retention/2 {
					errs = append(errs, fmt.Errorf("step %s of %s version %d may wait %s until it is tried again, but messages older than %s are refused: that must be twice as long",
						s.name, d.Type, d.Version, wait, retention))
				}
			}
		}
	}
	return errors.Join(errs...)
}

// stepOf returns the step of an instance that it awaits, nil if this engine does not know it.
func (e *Engine) stepOf(typ string, version, current int) *step {
	d := e.defs[typ][version]
	if d == nil || current >= len(d.steps) {
		return nil
	}
	return d.steps[current]
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

// CommandParked tells the engine, in the transaction that parks m, that nobody will run it
// now, nor handle it if it is a reply: if a saga awaits it, that saga needs an operator. A replay of
// m moves it on again.
func (e *Engine) CommandParked(ctx context.Context, tx *sqltx.Tx, m *message.Message, reason string) error {
	id := m.Headers.String(message.HeaderSagaID)
	if id == "" {
		return nil
	}
	found, err := lockInstances(ctx, tx, []string{id})
	if err != nil {
		return err
	}
	b, in, what := &batch{Engine: e, tx: tx}, found[id], "command"
	if in == nil || in.status != Running && in.status != Compensating {
		return nil
	}
	if in.commandID == m.MessageID {
		e.find(in)
	} else if unhandled, err := b.keepUnhandled(ctx, &command{Message: m, in: in}); err != nil || !unhandled {
		return err
	} else {
		what = "reply"
	}
	if err := b.stop(ctx, in, EvCommandParked, what+" parked: "+reason); err != nil {
		return err
	}
	return b.write(ctx)
}

// find completes what is known about an instance. Any outcome but Done says why it cannot be moved on
// here, or now: its definition is set all the same if there is one, for a saga must not be stuck.
func (e *Engine) find(in *instance) message.Outcome {
	// Somebody has started it, so there is, or was, a worker that knows it: this one may be older or newer.
	if in.def = e.defs[in.typ][in.version]; in.def == nil && e.defs[in.typ] == nil {
		return deferred("this worker does not know saga type %q", in.typ)
	}
	if in.def == nil {
		return deferred("this worker does not know version %d of saga type %q", in.version, in.typ)
	}
	var err error
	in.input, err = in.def.decode(in.payload)
	in.unread = err != nil
	switch {
	case in.plan != "" && in.plan != in.def.plan:
		return message.Park("saga %s awaits step %d of %q with the steps %s, but this worker's version %d has the steps %s; "+
			"a definition that changes needs a new version", in.id, in.current+1, in.typ, in.plan, in.version, in.def.plan)
	case in.current >= len(in.def.steps):
		return message.Park("saga %s is at step %d; its definition has %d", in.id, in.current, len(in.def.steps))
	case in.unread:
		return message.Park("input of saga %s: %v", in.id, err)
	}
	return message.Outcome{Kind: message.Done}
}
