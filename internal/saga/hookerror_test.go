package saga

import (
	"context"
	"errors"
	"strings"
	"testing"

	"backstep/internal/sqltx"
)

// A hook's error is its saga's matter, unless its transaction has ended.
func TestHookError(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		hook func(ctx context.Context, tx *sqltx.Tx) error
		says string // "": it is not the hook's
	}{
		"error": {func(context.Context, *sqltx.Tx) error { return errors.New("boom") }, "boom"},
		"panic": {func(context.Context, *sqltx.Tx) error { panic("boom") }, "panic: boom"},
		"statement": {func(ctx context.Context, tx *sqltx.Tx) error {
			_, err := tx.Exec(ctx, "UPDATE effects SET nothing = 1")
			return err
		}, "Error 1054"},
		"database": {func(_ context.Context, tx *sqltx.Tx) error { tx.Fail(errors.New("gone")); return tx.Err() }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			o := newOperator(t, &s)
			s.on("compensated", tt.hook)
			id := o.start("x")
			o.park(o.command(), "why")
			_, err := o.operate(id, Operation{Verb: VerbResolve, As: Compensated})
			failed, ok := errors.AsType[*HookError](err)
			if err == nil || ok != (tt.says != "") || ok && (failed.SagaID != id || !strings.HasPrefix(failed.Err.Error(), tt.says)) {
				t.Errorf("it gave %v", err)
			}
			equal(t, "status", o.get(id).Status, ManualAction)
		})
	}
}
