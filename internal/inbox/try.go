package inbox

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"go.opentelemetry.io/otel/trace"

	"backstep/internal/crash"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// try is one transaction of a lane, in a goroutine of its own: a handler may end its goroutine
// (runtime.Goexit), and one that does not heed its context can be left behind but not ended.
type try struct {
	lane     *Lane
	calling  chan *sqltx.Tx // the handler is called
	returned chan struct{}  // closed when the transaction is about to end

	// What follows belongs to the goroutine until it has ended.
	ended    chan struct{}
	spans    []trace.Span
	shards   uint16
	outcomes []message.Outcome
	err      error
}

// errLeftBehind means that a handler was left behind. What it still does has no effect.
var errLeftBehind = errors.New("handler does not heed its context")

// once tries todo in one transaction. errDuplicate means that at least one has been processed
// before.
func (l *Lane) once(ctx context.Context, g *group, todo []*message.Delivery) ([]message.Outcome, error) {
	t := &try{
		lane: l, calling: make(chan *sqltx.Tx, 1), returned: make(chan struct{}),
		ended: make(chan struct{}), spans: make([]trace.Span, len(todo)),
	}
	go t.run(ctx, g, todo)
	if t.leftBehind(ctx) {
		return nil, fmt.Errorf("%w: it has not returned %s after the end of its time (%s), and may run on until the worker is restarted",
			errLeftBehind, l.cfg.Grace, l.cfg.Timeout)
	}
	g.shards |= t.shards
	return t.outcomes, t.err
}

// leftBehind waits for the transaction to end. It reports true if the handler has not returned
// some time after its context has ended: then the transaction is rolled back from outside.
func (t *try) leftBehind(ctx context.Context) bool {
	select {
	case <-t.ended:
		return false
	case <-ctx.Done():
	}
	patience := time.NewTimer(t.lane.cfg.Grace)
	defer patience.Stop()
	select {
	case <-t.returned:
	case <-patience.C:
		select {
		case tx := <-t.calling:
			t.abandon(tx)
			return true
		default: // it is not the handler
		}
	}
	<-t.ended // by itself: COMMIT does not heed the context either, and is not to be given up
	return false
}

// abandon rolls tx back. If that has to wait for what the handler does with it, it goes on beside.
func (t *try) abandon(tx *sqltx.Tx) {
	gone := make(chan struct{})
	go func() { defer close(gone); tx.Abandon() }()
	patience := time.NewTimer(t.lane.cfg.Grace)
	defer patience.Stop()
	select {
	case <-gone:
	case <-patience.C:
	}
}

func (t *try) run(ctx context.Context, g *group, todo []*message.Delivery) {
	defer close(t.ended)
	defer func() { endSpans(t.spans, t.outcomes, t.err) }()
	t.err = sqltx.Once(outbox.NoteShards(ctx, &t.shards), t.lane.db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		defer close(t.returned)
		done := false
		defer func() {
			switch r := recover(); {
			case r != nil:
				err = &panicError{r, debug.Stack()}
			case !done: // nobody will see err, nor what Once returns
				t.err = &panicError{"runtime.Goexit", debug.Stack()}
			}
		}()
		crash.Point("worker.begun")
		t.outcomes, err = t.handle(ctx, tx, g, todo)
		crash.Point("worker.before-commit")
		done = true
		return err
	})
}

// call calls the handler. If it returns after its time, nothing that belongs to the lane may be
// touched any more.
func (t *try) call(ctx context.Context, tx *sqltx.Tx, msgs []message.Message) []message.Outcome {
	t.calling <- tx
	for i := range msgs {
		crash.Message(msgs[i].MessageID)
	}
	return t.lane.cfg.Handler.HandleBatch(ctx, tx, msgs)
}

// panicError is what a handler panicked with.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic in handler: %v", e.value) }
