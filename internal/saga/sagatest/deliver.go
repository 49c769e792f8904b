package sagatest

import (
	"context"
	"errors"
	"fmt"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// errCrash is what ends the transaction of a worker that crashes before it commits.
var errCrash = errors.New("the worker has crashed")

// What package inbox does for lanes, in statements.
const (
	recordSQL = `INSERT INTO inbox_messages (consumer, message_id) VALUES (?, ?)`
	forgetSQL = `DELETE FROM inbox_messages WHERE consumer = ? AND message_id = ?`
)

// duplicate is what became of a message that has been processed before.
const duplicate = "a duplicate"

// engineGets delivers m to the engine, as a lane does, and returns what became of it. What fails is
// delivered once more with the failure, so that it counts as an attempt; if that fails too, the test
// does.
func (w *World) engineGets(m message.Message) string {
	w.t.Helper()
	for range 3 { // the last two with the answer of a call
		out, err := w.attempt(m, nil)
		switch {
		case err == nil && out.Call != nil:
			m.Answer = w.call(out)
		case err == nil:
			return words(out)
		case m.Failure != "":
			w.t.Fatalf("sagatest: message %s to queue %s cannot be handled: %v", m.Type, m.RoutingKey, err)
		default:
			m.Failure = err.Error()
		}
	}
	w.t.Fatalf("sagatest: message %s to queue %s leads to a call again and again", m.Type, m.RoutingKey)
	return ""
}

// engineCrashes delivers m to an engine that crashes before it commits.
func (w *World) engineCrashes(m message.Message) {
	w.t.Helper()
	if _, err := w.attempt(m, errCrash); err != nil && !errors.Is(err, errCrash) {
		w.t.Logf("sagatest: %v", err) // it would have failed anyway; it is delivered again
	}
}

// engineCalls delivers m to an engine that makes a call, and crashes before it has written down the
// answer.
func (w *World) engineCalls(m message.Message) {
	w.t.Helper()
	out, err := w.attempt(m, nil)
	if err != nil {
		w.t.Logf("sagatest: %v", err) // likewise
	}
	if out.Call != nil {
		w.call(out)
	}
}

// call makes the call of an outcome, in no transaction.
func (w *World) call(out message.Outcome) any {
	ctx := w.t.Context()
	if out.Limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, out.Limit)
		defer cancel()
	}
	return out.Call(ctx)
}

// attempt is one transaction; it ends with the error end.
func (w *World) attempt(m message.Message, end error) (out message.Outcome, err error) {
	err = sqltx.WithTx(w.t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		w.running = nil
		_, err := tx.Exec(ctx, recordSQL, []byte(m.RoutingKey), []byte(m.MessageID))
		if sqltx.Classify(err) == sqltx.Duplicate {
			out = message.Outcome{Kind: message.Stale, Reason: duplicate}
			return nil
		}
		if err != nil {
			return err
		}
		if out, err = w.handle(ctx, tx, m); err != nil {
			return err
		}
		if err := w.follow(ctx, tx, m, out); err != nil {
			return err
		}
		return end
	})
	w.worked = err == nil && len(w.running) > 0
	if err == nil {
		for _, key := range w.running {
			w.ran[key]++
		}
		if out.Kind == message.Parked {
			w.parked = append(w.parked, m.Type+": "+out.Reason)
		}
	}
	w.running = nil
	return out, err
}

// handle calls the engine. A panic in a step is an error, as in a lane.
func (w *World) handle(ctx context.Context, tx *sqltx.Tx, m message.Message) (out message.Outcome, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	all := w.engine.HandleBatch(ctx, tx, []message.Message{m})
	if tx.Err() != nil {
		return out, tx.Err()
	}
	return all[0], nil
}

// follow does what follows from an outcome.
func (w *World) follow(ctx context.Context, tx *sqltx.Tx, m message.Message, out message.Outcome) error {
	switch out.Kind {
	case message.Done, message.Stale:
		return nil
	case message.Parked, message.Outside:
		if _, err := tx.Exec(ctx, forgetSQL, []byte(m.RoutingKey), []byte(m.MessageID)); err != nil {
			return err
		}
		if out.Kind == message.Outside {
			return nil
		}
		return w.engine.CommandParked(ctx, tx, &m, out.Reason)
	}
	return fmt.Errorf("it is %s: %s; give sagatest.New every definition", out.Kind, out.Reason)
}

// words says what became of a delivery.
func words(out message.Outcome) string {
	switch {
	case out.Kind == message.Parked:
		return "parked: " + out.Reason
	case out.Reason == duplicate:
		return duplicate
	}
	return out.Kind.String()
}

// forget makes a message one that was processed longer ago than the inbox knows.
func (w *World) forget(m message.Message) {
	w.t.Helper()
	w.Exec(forgetSQL, []byte(m.RoutingKey), []byte(m.MessageID))
}
