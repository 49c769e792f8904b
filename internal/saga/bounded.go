package saga

import (
	"context"
	"errors"
	"fmt"

	"backstep/internal/attempt"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// inTx is sqltx.WithTx. Whoever publishes what it added is woken.
func (k *Keeper) inTx(ctx context.Context, fn func(ctx context.Context, tx *sqltx.Tx) error) error {
	var shards uint16
	err := sqltx.WithTx(outbox.NoteShards(ctx, &shards), k.db, func(ctx context.Context, tx *sqltx.Tx) error {
		shards = 0
		return fn(ctx, tx)
	})
	if err == nil {
		k.cfg.Committed(shards)
	}
	return err
}

// inTime is inTx for what calls hooks. It takes no longer than one saga may hold up the others:
// the hook's statements end then, and a hook that does not heed that is left behind (sqltx.ErrLeftBehind).
// So fn must touch nothing of the keeper's once it has called a hook.
func (k *Keeper) inTime(ctx context.Context, fn func(ctx context.Context, tx *sqltx.Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, k.endLimit)
	defer cancel()
	var watch sqltx.Watch
	var err error
	left := watch.Run(ctx, k.grace, func() {
		attempt.Catch("panic", &err, func() error {
			return k.inTx(ctx, func(ctx context.Context, tx *sqltx.Tx) error {
				watch.Enter(tx)
				defer watch.Leave()
				return fn(ctx, tx)
			})
		})
	})
	if left != nil {
		return fmt.Errorf("hook %w: it has not returned %s after the end of its time (%s), and may run on until the worker is restarted", left, k.grace, k.endLimit)
	}
	return err
}

// stopping is inTime for leaving a saga to an operator, which OnManualAction cannot prevent: if that takes
// too long, it is done once more, silently, also if that is the end of the look's time.
func (k *Keeper) stopping(ctx context.Context, fn func(ctx context.Context, tx *sqltx.Tx, silent bool) error) error {
	err := k.inTime(ctx, func(ctx context.Context, tx *sqltx.Tx) error { return fn(ctx, tx, false) })
	if !errors.Is(ctx.Err(), context.Canceled) && (errors.Is(err, sqltx.ErrLeftBehind) || sqltx.Classify(err) == sqltx.Canceled) {
		err = k.inTime(context.WithoutCancel(ctx), func(ctx context.Context, tx *sqltx.Tx) error { return fn(ctx, tx, true) })
	}
	return err
}

// stopFor is stop. If silent, no hook is called, as of a saga whose input does not decode.
func (b *batch) stopFor(ctx context.Context, in *instance, ev Event, reason string, silent bool) error {
	if silent {
		in.unread, reason = true, reason+"; then OnManualAction did not return in time"
	}
	return b.stop(ctx, in, ev, reason)
}
