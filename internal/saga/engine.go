package saga

import (
	"context"
	"fmt"
	"log/slog"

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
	in.def = e.defs[in.typ][in.version]
	if in.def != nil {
		if in.input, err = in.def.decode(in.payload); err != nil {
			in.def = nil // no hook can be called, but the saga must not be stuck
		}
	}
	b := &batch{Engine: e, tx: tx}
	if err := b.stop(ctx, in, EvCommandParked, "command parked: "+reason); err != nil {
		return err
	}
	return b.write(ctx)
}
