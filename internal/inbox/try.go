package inbox

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel/trace"

	"backstep/internal/attempt"
	"backstep/internal/crash"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// try is one transaction of a lane. It may be left behind, with the handler.
type try struct {
	lane     *Lane
	watch    sqltx.Watch
	spans    []trace.Span
	shards   uint16
	outcomes []message.Outcome
	err      error
}

// once tries todo in one transaction. errDuplicate means that at least one has been processed
// before.
func (l *Lane) once(ctx context.Context, g *group, todo []*message.Delivery) ([]message.Outcome, error) {
	t := &try{lane: l, spans: make([]trace.Span, len(todo))}
	if err := t.watch.Run(ctx, l.cfg.Grace, func() { t.run(ctx, g, todo) }); err != nil {
		return nil, fmt.Errorf("handler %w: it has not returned %s after the end of its time (%s), and may run on until the worker is restarted",
			err, l.cfg.Grace, l.cfg.Timeout)
	}
	g.shards |= t.shards
	return t.outcomes, t.err
}

func (t *try) run(ctx context.Context, g *group, todo []*message.Delivery) {
	defer func() { endSpans(t.spans, t.outcomes, t.err) }()
	attempt.Catch("panic in handler", &t.err, func() error {
		return sqltx.Once(outbox.NoteShards(ctx, &t.shards), t.lane.db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
			defer t.watch.Leave()
			crash.Point("worker.begun")
			t.outcomes, err = t.handle(ctx, tx, g, todo)
			crash.Point("worker.before-commit")
			return err
		})
	})
}

// call calls the handler. If it returns after its time, nothing that belongs to the lane may be
// touched any more.
func (t *try) call(ctx context.Context, tx *sqltx.Tx, msgs []message.Message) []message.Outcome {
	t.watch.Enter(tx)
	for i := range msgs {
		crash.Message(msgs[i].MessageID)
	}
	return t.lane.cfg.Handler.HandleBatch(ctx, tx, msgs)
}
