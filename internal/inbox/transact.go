package inbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/trace"

	"backstep/internal/crash"
	"backstep/internal/message"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

// transact runs a group in one transaction; nil means it is committed, or was before.
func (l *Lane) transact(ctx context.Context, g *group) error {
	ctx, cancel := context.WithTimeout(ctx, l.cfg.Timeout)
	defer cancel()
	todo := l.distinct(g)
	for range sqltx.MaxTries {
		outcomes, err := l.once(ctx, g, todo)
		if err == nil {
			g.note(todo, outcomes)
			l.count(g, todo, outcomes)
			return nil
		}
		if errors.Is(err, errDuplicate) {
			todo, err = l.withoutDuplicates(ctx, todo)
		}
		switch {
		case errors.Is(err, sqltx.ErrLeftBehind):
			return err
		case err != nil && ctx.Err() != nil:
			return fmt.Errorf("not done within %s: %w", l.cfg.Timeout, ctx.Err())
		case err != nil:
			return err
		case len(todo) == 0:
			l.count(g, nil, nil)
			return nil
		}
	}
	return fmt.Errorf("inbox rows of %d messages come and go", len(todo))
}

// endSpans ends the spans of a try with what became of its transaction.
func endSpans(spans []trace.Span, outcomes []message.Outcome, err error) {
	for i, span := range spans {
		switch {
		case span == nil: // its delivery was not processed
		case err == nil:
			tracing.EndProcess(span, outcomes[i])
		case errors.Is(err, errDuplicate): // that is how they are found; the others are run again
			tracing.EndTry(span, "rolled back to leave out duplicates", nil)
		case errors.Is(err, sqltx.ErrOutcomeUnknown):
			tracing.EndTry(span, "unknown", err)
		default:
			tracing.EndTry(span, "rolled back", err)
		}
	}
}

// distinct drops repeats within the group: they are settled with the first copy that is fit.
func (l *Lane) distinct(g *group) []*message.Delivery {
	seen := make(map[string]bool, len(g.ds))
	todo := make([]*message.Delivery, 0, len(g.ds))
	for i := range g.ds {
		d := &g.ds[i]
		if l.unfit(d) == "" {
			if seen[d.MessageID] {
				continue
			}
			seen[d.MessageID] = true
		}
		todo = append(todo, d)
	}
	return todo
}

func (l *Lane) withoutDuplicates(ctx context.Context, ds []*message.Delivery) ([]*message.Delivery, error) {
	ids := make([]string, len(ds))
	for i, d := range ds {
		ids[i] = d.MessageID
	}
	seen, err := Recorded(ctx, l.db, l.cfg.Queue, ids)
	if err != nil {
		return nil, err
	}
	var fresh []*message.Delivery
	for _, d := range ds {
		if seen[d.MessageID] {
			l.cfg.Log.Debug("duplicate", "message_id", d.MessageID)
			continue
		}
		fresh = append(fresh, d)
	}
	return fresh, nil
}

// handle is the body of the transaction: record, work, follow up. It opens a span for each
// delivery that is processed.
func (t *try) handle(ctx context.Context, tx *sqltx.Tx, g *group, todo []*message.Delivery) ([]message.Outcome, error) {
	l := t.lane
	outcomes := make([]message.Outcome, len(todo))
	var ids []string
	var msgs []message.Message
	var at []int
	for i, d := range todo {
		if reason := l.unfit(d); reason != "" {
			outcomes[i] = message.Park("%s", reason)
			continue
		}
		if g.fails > 1 {
			outcomes[i] = message.Park("%s", d.Failure)
			continue
		}
		var m message.Message
		m, t.spans[i] = tracing.Process(ctx, d)
		ids = append(ids, d.MessageID)
		msgs = append(msgs, m)
		at = append(at, i)
	}
	if err := record(ctx, tx, l.cfg.Queue, ids); err != nil {
		return nil, err
	}
	crash.Point("worker.recorded")
	if len(msgs) > 0 {
		got := t.call(ctx, tx, msgs)
		if err := cmp.Or(ctx.Err(), tx.Err()); err != nil {
			return nil, err
		}
		if len(got) != len(msgs) {
			panic(fmt.Sprintf("%d outcomes for %d messages", len(got), len(msgs)))
		}
		for k, o := range got {
			outcomes[at[k]] = o
		}
	}
	return outcomes, l.follow(ctx, tx, todo, outcomes)
}

// maxAhead is how far in the future a message may have been made. One of next year would
// outlive its record: swept by the time it was processed, accepted by the time it was made.
const maxAhead = sweepMargin / 2

// unfit says why a delivery cannot be processed whatever it contains, or "".
func (l *Lane) unfit(d *message.Delivery) string {
	switch {
	case d.Unreadable != "":
		return d.Unreadable
	case d.MessageID == "":
		return "no message_id"
	case len(d.MessageID) > message.MaxIDBytes:
		return "message_id of " + strconv.Itoa(len(d.MessageID)) + " bytes"
	case len(d.Body) > l.cfg.MaxBody:
		return fmt.Sprintf("body of %d bytes; %d is the limit", len(d.Body), l.cfg.MaxBody)
	}
	made := d.Time()
	switch age := time.Since(made); {
	case made.IsZero(): // it does not say
	case age > l.cfg.Retention:
		return fmt.Sprintf("made at %s, longer ago than duplicates are known (%s); it may have been processed before",
			made.Format(time.RFC3339), l.cfg.Retention)
	case age < -maxAhead:
		return fmt.Sprintf("made at %s, in the future", made.Format(time.RFC3339))
	}
	return ""
}

// count counts a group that is committed. What is not in todo were duplicates.
func (l *Lane) count(g *group, todo []*message.Delivery, outcomes []message.Outcome) {
	l.stats.Duplicates.Add(int64(len(g.ds) - len(todo)))
	if len(todo) == 0 {
		return
	}
	l.stats.Batches.Add(1)
	for i, o := range outcomes {
		id := todo[i].MessageID
		switch o.Kind {
		case message.Done:
			l.stats.Done.Add(1)
		case message.Stale:
			l.stats.Stale.Add(1)
			l.cfg.Log.Info("stale message", "message_id", id, "reason", o.Reason)
		case message.Parked:
			l.stats.Parked.Add(1)
			l.cfg.Log.Info("message parked", "message_id", id, "reason", o.Reason)
		case message.Deferred:
			l.stats.Deferred.Add(1)
			l.cfg.Log.Info("message deferred", "message_id", id, "reason", o.Reason)
		case message.Outside:
			l.stats.Calls.Add(1)
		case message.Retry:
			l.stats.Retried.Add(1)
			l.cfg.Log.Warn("message will be retried", "message_id", id, "attempt", todo[i].Attempt(), "error", o.Reason)
		}
	}
}
