package inbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"backstep/internal/attempt"
	"backstep/internal/crash"
	"backstep/internal/message"
)

// call makes the call of o and gives d what it returned, or the failure that it did not return.
func (l *Lane) call(ctx context.Context, d *message.Delivery, o message.Outcome) {
	limit := cmp.Or(o.Limit, l.cfg.CallTimeout)
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	ended := make(chan struct{})
	var answer any // belongs to the call until it has ended
	var failure error
	go func() {
		defer close(ended)
		attempt.Catch("panic in call", &failure, func() error { answer = o.Call(ctx); return nil })
	}()
	log := l.cfg.Log.With("message_id", d.MessageID)
	if !l.ends(ctx, ended) {
		d.Failure = fmt.Sprintf("the call does not heed its context: it has not returned %s after the end of its time (%s), and may run on until the worker is restarted",
			l.cfg.Grace, limit)
		log.Error("call failed", "error", d.Failure)
		return
	}
	if panicked, ok := errors.AsType[*attempt.Panic](failure); ok {
		d.Failure = clip(panicked.Error())
		log.Error("call failed", "error", d.Failure, "stack", string(panicked.Stack))
		return
	}
	d.Answer = answer
	crash.Point("call.answered")
}

// ends waits until ended is closed, and some time longer than ctx at most.
func (l *Lane) ends(ctx context.Context, ended <-chan struct{}) bool {
	select {
	case <-ended:
		return true
	case <-ctx.Done():
	}
	patience := time.NewTimer(l.cfg.Grace)
	defer patience.Stop()
	select {
	case <-ended:
		return true
	case <-patience.C:
		return false
	}
}
