package saga

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"backstep/internal/sqltx"
)

// TestRehearseCalls: no other system is called. What one has said already is used.
func TestRehearseCalls(t *testing.T) {
	t.Parallel()
	s := &script{}
	var calls atomic.Int32
	prepare := Prepare(func(context.Context, Info, trip) (string, error) {
		calls.Add(1)
		return "", errors.New("it was called")
	})
	o := newOperator(t, s, prepare)
	s.on("b", func(ctx context.Context, _ *sqltx.Tx) error {
		out, err := Prepared[string](ctx)
		if err == nil && out != "charged" {
			err = Fail("the outcome is %q", out)
		}
		return err
	})
	id := o.start("x")
	o.done(o.command())
	o.park(o.command(), "poison")
	r, err := o.rehearse(id, Operation{Verb: VerbRetry})
	if err != nil || r.Run == nil || !strings.Contains(r.Run.NotRun, "the idempotency key "+id+":b:execute") {
		t.Errorf("%+v, %v", r.Run, err)
	}

	// An open call: it is not known whether it has happened.
	o.exec(`UPDATE saga_instances SET call_open = 1 WHERE id = ?`, []byte(id))
	o.exec(`INSERT INTO saga_calls (saga_id, step_order, direction, calls) VALUES (?, 1, 'execute', 1)`, []byte(id))
	r, err = o.rehearse(id, Operation{Verb: VerbRetry})
	if err != nil || r.Run == nil || r.Run.NotRun == "" {
		t.Errorf("%+v, %v", r.Run, err)
	}
	o.exec(`UPDATE saga_calls SET status = 'DONE', outcome = '"charged"'`)
	r, err = o.rehearse(id, Operation{Verb: VerbRetry})
	if err != nil || r.Run == nil || r.Run.NotRun != "" || r.Run.Error != "" || r.Run.Status != Running || !strings.Contains(r.Run.said(), "trip.c to") {
		t.Errorf("%+v, %v", r.Run, err)
	}
	if n := calls.Load(); n != 0 {
		t.Errorf("called %d times", n)
	}
}
