package saga

import (
	"context"

	"backstep/internal/sqltx"
)

// Hooks are nil if the definition does not have them.
type (
	hook       func(ctx context.Context, tx *sqltx.Tx, in any) error
	reasonHook func(ctx context.Context, tx *sqltx.Tx, in any, reason string) error
	statusHook func(ctx context.Context, tx *sqltx.Tx, in any, status Status, reason string) error
	hooks      struct {
		completed, resumed        hook
		compensated, manualAction reasonHook
		endedByHand               statusHook
	}
)

// OnCompleted runs in the transaction that completes the saga.
func OnCompleted[In any](hook func(ctx context.Context, tx *sqltx.Tx, in In) error) Part[In] {
	return func(d *Definition) { setHook(d, &d.hooks.completed, "OnCompleted", hook) }
}

// OnCompensated runs in the transaction that ends a compensated saga; reason is the failure
// that started it.
func OnCompensated[In any](hook func(ctx context.Context, tx *sqltx.Tx, in In, reason string) error) Part[In] {
	return func(d *Definition) { setReasonHook(d, &d.hooks.compensated, "OnCompensated", hook) }
}

// OnManualAction runs in the transaction that stops a saga for an operator. If it fails the
// saga is stopped all the same, and the reason says so.
func OnManualAction[In any](hook func(ctx context.Context, tx *sqltx.Tx, in In, reason string) error) Part[In] {
	return func(d *Definition) { setReasonHook(d, &d.hooks.manualAction, "OnManualAction", hook) }
}

// OnResumed runs in the transaction in which a saga leaves MANUAL_ACTION, or in which an operator
// has one undone that had completed.
func OnResumed[In any](hook func(ctx context.Context, tx *sqltx.Tx, in In) error) Part[In] {
	return func(d *Definition) { setHook(d, &d.hooks.resumed, "OnResumed", hook) }
}

// OnEndedByHand runs in the transaction in which an operator ends a saga, by resolve or by skipping
// what was last, after OnCompleted or OnCompensated: its steps have not made it what status says.
// An error made by Fail refuses that; reason is that of OnCompensated.
func OnEndedByHand[In any](hook func(ctx context.Context, tx *sqltx.Tx, in In, status Status, reason string) error) Part[In] {
	return func(d *Definition) {
		if hook == nil || d.hooks.endedByHand != nil {
			d.mistake("OnEndedByHand needs one function")
		}
		d.hooks.endedByHand = func(ctx context.Context, tx *sqltx.Tx, in any, status Status, reason string) error {
			return hook(ctx, tx, as[In](in), status, reason)
		}
	}
}

func setHook[In any](d *Definition, slot *hook, name string, f func(context.Context, *sqltx.Tx, In) error) {
	if f == nil || *slot != nil {
		d.mistake("%s needs one function", name)
	}
	*slot = func(ctx context.Context, tx *sqltx.Tx, in any) error { return f(ctx, tx, as[In](in)) }
}

func setReasonHook[In any](d *Definition, slot *reasonHook, name string, f func(context.Context, *sqltx.Tx, In, string) error) {
	if f == nil || *slot != nil {
		d.mistake("%s needs one function", name)
	}
	*slot = func(ctx context.Context, tx *sqltx.Tx, in any, reason string) error {
		return f(ctx, tx, as[In](in), reason)
	}
}
