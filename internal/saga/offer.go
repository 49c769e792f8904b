package saga

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"backstep/internal/attempt"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

// ErrInHand means that somebody has a saga locked, most likely a worker that runs its step.
var ErrInHand = errors.New("saga: somebody has it in hand")

// Offer is an operation that would change a saga as it is now, or that only its definition is against.
type Offer struct {
	Operation       // without By; Step and Direction are those the saga is at
	Against   error // what the definition's hooks have against it, a RefusedError, HookError or outbox.ErrInvalid; nil: it would be done
}

// candidates are what can be asked for of a saga where it is, the mildest first; of the ends, the one that
// fits where it is going.
func (in *instance) candidates() []Operation {
	at := Operation{Step: in.stepName(), Direction: in.direction}
	ends := []Status{Completed, Compensated}
	if in.direction == Compensate {
		slices.Reverse(ends)
	}
	var list []Operation
	for _, v := range []Verb{VerbRetry, VerbSkip, VerbCancel, VerbCompensate} {
		op := at
		op.Verb = v
		list = append(list, op)
	}
	for _, as := range ends {
		op := at
		op.Verb, op.As = VerbResolve, as
		list = append(list, op)
	}
	return list
}

// Offers returns what an operator can do to a saga as it is now. It asks Operate: each is done in a transaction
// that is rolled back, of which no span tells, and what changes nothing or is refused is not offered. A
// RefusedError says why nothing is, ErrInHand that it cannot be tried now; it waits for nobody who has the saga.
func (e *Engine) Offers(ctx context.Context, db *sql.DB, id string) (offers []Offer, err error) {
	var watch sqltx.Watch
	var found []Offer // these two belong to the transaction until it has ended
	var failure error
	left := watch.Run(ctx, offerGrace, func() {
		attempt.Catch("panic", &failure, func() error {
			return sqltx.WithTx(tracing.Unrecorded(ctx), db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
				watch.Enter(tx)
				defer watch.Leave()
				if found, err = e.tryAll(ctx, tx, id); err != nil {
					return err
				}
				return errRehearsed
			})
		})
	})
	switch {
	case left != nil:
		return nil, fmt.Errorf("hook of saga %s %w", id, left)
	case errors.Is(failure, errRehearsed):
		return found, nil
	}
	return nil, failure
}

// offerGrace is how long a hook has to return when the time of Offers is over; the saga is locked meanwhile.
const offerGrace = 500 * time.Millisecond

func (e *Engine) tryAll(ctx context.Context, tx *sqltx.Tx, id string) (offers []Offer, err error) {
	in, err := lockFree(ctx, tx, id)
	if err != nil {
		return nil, err
	}
	out := e.find(in)
	for _, op := range in.candidates() {
		if err := in.unfit(out, op.Verb); err != nil {
			if op.Verb == VerbResolve {
				return nil, err // it is the last that is
			}
			continue
		}
		if offers, err = e.try(ctx, tx, id, op, offers); err != nil {
			return nil, err
		}
	}
	return offers, nil
}

// try adds an operation to the offers if it would be done.
func (e *Engine) try(ctx context.Context, tx *sqltx.Tx, id string, op Operation, offers []Offer) ([]Offer, error) {
	var eff Effect
	err := apart(ctx, tx, func() (err error) {
		b := &batch{Engine: e, tx: tx}
		if eff, err = b.operate(ctx, id, op); err != nil {
			return err
		}
		return cmp.Or(b.write(ctx), errRehearsed)
	})
	refused, no := errors.AsType[*RefusedError](err)
	_, hook := errors.AsType[*HookError](err)
	switch {
	case tx.Err() != nil:
		return nil, err
	case errors.Is(err, errRehearsed):
		if eff.Changed {
			offers = append(offers, Offer{Operation: op})
		}
	case hook, no && refused.byHook, errors.Is(err, outbox.ErrInvalid): // what it emits is no message
		offers = append(offers, Offer{op, err})
	case !no:
		return nil, err
	}
	return offers, nil
}

// Served by the primary key.
const lockFreeSQL = `
SELECT id
  FROM saga_instances
 WHERE id = ?
   FOR UPDATE SKIP LOCKED`

// lockFree locks an instance if nobody else has.
func lockFree(ctx context.Context, tx *sqltx.Tx, id string) (*instance, error) {
	var found []byte
	err := tx.QueryRow(ctx, lockFreeSQL, []any{[]byte(id)}, &found)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, inHand(ctx, tx, id)
	}
	if err != nil {
		return nil, fmt.Errorf("lock saga %q if it is free: %w", id, err)
	}
	locked, err := lockInstances(ctx, tx, []string{id})
	return locked[id], err
}

// inHand says why an instance cannot be locked now.
func inHand(ctx context.Context, tx *sqltx.Tx, id string) error {
	var n int
	if err := tx.QueryRow(ctx, `SELECT COUNT(*) FROM saga_instances WHERE id = ?`, []any{[]byte(id)}, &n); err != nil {
		return fmt.Errorf("look for saga %q: %w", id, err)
	}
	if n == 0 {
		return fmt.Errorf("%w: %q", ErrNotFound, id)
	}
	return ErrInHand
}

// unfit says why a verb cannot be done here to a saga of which find said out.
func (in *instance) unfit(out message.Outcome, v Verb) error {
	if out.Kind == message.Done || v == VerbResolve && in.onlyUnread() {
		return nil
	}
	instead := "use the backstep of the release that knows it"
	if in.onlyUnread() {
		instead += ", or put it right by hand and resolve the saga"
	}
	return refuse(instead, "%s", out.Reason)
}

// Allowed returns what the state of a saga allows, the mildest first, as far as that can be told without its lock:
// what is on its way may make a retry change nothing, and hooks may be against the rest.
func (e *Engine) Allowed(d Detail) []Operation {
	in := d.instance()
	out := e.find(in)
	if out.Kind != message.Done && !in.onlyUnread() {
		return nil
	}
	rows := d.rows()
	if in.status == Completed {
		in.nothing = in.absent(rows, d.called())
	}
	kept := in.keptIn(rows)
	return slices.DeleteFunc(in.candidates(), func(op Operation) bool { return in.unfit(out, op.Verb) != nil || in.check(op, kept) != nil })
}

// Kept returns what the participant said of the step that a saga awaits, if its reply has come and could not be handled:
// COMPLETED or COMPENSATED, so that a retry goes on without asking it, or FAILED, for it refused. "": nothing is known.
func (e *Engine) Kept(d Detail) StepStatus {
	in := d.instance()
	if e.find(in); in.def == nil || d.Status == Completed || d.Status == Compensated || !in.def.fits(in.plan, in.current) {
		return ""
	}
	return in.keptIn(d.rows())
}

// instance makes of a detail what can be asked of an instance without its lock.
func (d Detail) instance() *instance {
	return &instance{
		id: d.ID, typ: d.Type, version: d.Version, status: d.Status, direction: d.Direction, current: d.CurrentStep,
		attempt: d.Attempt, commandID: d.CommandID, payload: d.Payload, callOpen: d.CallOpen, cancelReason: d.CancelReason,
		plan: d.Plan, skipped: d.LeftOut,
	}
}

// rows are the rows of its steps by their order.
func (d Detail) rows() map[int]StepState {
	rows := map[int]StepState{}
	for _, s := range d.Steps {
		rows[s.Order] = s
	}
	return rows
}

// called is called where the calls are known.
func (d Detail) called() (steps uint64) {
	for _, c := range d.Calls {
		if c.Direction == Execute && c.Status != callRefused {
			steps |= 1 << c.Step
		}
	}
	return steps
}

// DefinitionOf returns the definition that an instance runs by. That of its version may have been edited: it is
// ErrUnknownDefinition then too.
func (e *Engine) DefinitionOf(d Detail) (*Definition, error) {
	def, err := e.Definition(d.Type, d.Version)
	if err == nil && !def.fits(d.Plan, 0) {
		return nil, fmt.Errorf("%w: %s version %d with the steps %s", ErrUnknownDefinition, d.Type, d.Version, d.Plan)
	}
	return def, err
}

// StepNames returns the names of an instance's steps, in order; none if this engine does not know them.
func (e *Engine) StepNames(d Detail) []string {
	if def, err := e.DefinitionOf(d); err == nil {
		return def.StepNames()
	}
	return planned(d.Plan)
}
