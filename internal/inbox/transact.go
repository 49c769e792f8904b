package inbox

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"
	"time"

	"backstep/internal/crash"
	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// transact runs a group in one transaction; nil means it is committed, or was before.
func (l *Lane) transact(ctx context.Context, g *group) error {
	todo := l.distinct(g)
	for range sqltx.MaxTries {
		var outcomes []message.Outcome
		err := sqltx.Once(ctx, l.db, func(ctx context.Context, tx *sqltx.Tx) error {
			crash.Point("worker.begun")
			var err error
			outcomes, err = l.handle(ctx, tx, g, todo)
			crash.Point("worker.before-commit")
			return err
		})
		if !errors.Is(err, errDuplicate) {
			if err == nil {
				l.count(todo, outcomes)
			}
			return err
		}
		if todo, err = l.withoutDuplicates(ctx, todo); err != nil {
			return err
		}
		if len(todo) == 0 {
			return nil
		}
	}
	return fmt.Errorf("inbox rows of %d messages come and go", len(todo))
}

// distinct drops repeats within the group: they are settled with the first copy.
func (l *Lane) distinct(g *group) []*message.Delivery {
	seen := make(map[string]bool, len(g.ds))
	todo := make([]*message.Delivery, 0, len(g.ds))
	for i := range g.ds {
		d := &g.ds[i]
		if d.MessageID != "" && seen[d.MessageID] {
			l.stats.Duplicates.Add(1)
			continue
		}
		seen[d.MessageID] = true
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
		if d.MessageID != "" && seen[d.MessageID] {
			l.stats.Duplicates.Add(1)
			l.cfg.Log.Debug("duplicate", "message_id", d.MessageID)
			continue
		}
		fresh = append(fresh, d)
	}
	return fresh, nil
}

// handle is the body of the transaction: record, work, follow up.
func (l *Lane) handle(ctx context.Context, tx *sqltx.Tx, g *group, todo []*message.Delivery) ([]message.Outcome, error) {
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
		ids = append(ids, d.MessageID)
		msgs = append(msgs, d.Message)
		at = append(at, i)
	}
	if err := record(ctx, tx, l.cfg.Queue, ids); err != nil {
		return nil, err
	}
	crash.Point("worker.recorded")
	if len(msgs) > 0 {
		got, err := l.call(ctx, tx, msgs)
		if err != nil {
			return nil, err
		}
		for k, o := range got {
			outcomes[at[k]] = o
		}
	}
	return outcomes, l.follow(ctx, tx, todo, outcomes)
}

// call runs the handler and turns a panic into an error with its stack.
func (l *Lane) call(ctx context.Context, tx *sqltx.Tx, msgs []message.Message) (out []message.Outcome, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: %v\n%s", errPanic, r, debug.Stack())
		}
	}()
	out = l.cfg.Handler.HandleBatch(ctx, tx, msgs)
	if err := tx.Err(); err != nil {
		return nil, err
	}
	if len(out) != len(msgs) {
		panic(fmt.Sprintf("handler gave %d outcomes for %d messages", len(out), len(msgs)))
	}
	return out, nil
}

// unfit says why a delivery cannot be processed whatever it contains, or "".
func (l *Lane) unfit(d *message.Delivery) string {
	switch {
	case d.MessageID == "":
		return "no message_id"
	case len(d.MessageID) > message.MaxIDBytes:
		return "message_id of " + strconv.Itoa(len(d.MessageID)) + " bytes"
	case len(d.Body) > l.cfg.MaxBody:
		return fmt.Sprintf("body of %d bytes; %d is the limit", len(d.Body), l.cfg.MaxBody)
	}
	if made := d.Time(); !made.IsZero() && time.Since(made) > l.cfg.Retention {
		return fmt.Sprintf("made at %s, longer ago than duplicates are known (%s); it may have been processed before",
			made.Format(time.RFC3339), l.cfg.Retention)
	}
	return ""
}

func (l *Lane) count(ds []*message.Delivery, outcomes []message.Outcome) {
	l.stats.Batches.Add(1)
	for i, o := range outcomes {
		switch o.Kind {
		case message.Done:
			l.stats.Done.Add(1)
		case message.Stale:
			l.stats.Stale.Add(1)
			l.cfg.Log.Info("stale message", "message_id", ds[i].MessageID, "reason", o.Reason)
		case message.Parked:
			l.stats.Parked.Add(1)
			l.cfg.Log.Info("message parked", "message_id", ds[i].MessageID, "reason", o.Reason)
		case message.Deferred:
			l.stats.Deferred.Add(1)
		case message.Retry:
			l.stats.Retried.Add(1)
			l.cfg.Log.Warn("message will be retried", "message_id", ds[i].MessageID, "attempt", ds[i].Attempt(), "error", o.Reason)
		}
	}
}

func quoteBase64(b []byte) string { return `"` + base64.StdEncoding.EncodeToString(b) + `"` }
