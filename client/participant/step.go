package participant

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Step is what the service does for a step of sagas. Both functions work in tx, which is committed
// together with the answer, and must neither commit it nor roll it back. They return errors of the
// database as they are, or wrapped.
type Step[In, Result any] struct {
	// Execute is the action. What it returns is the answer, and Compensate gets it. An error made by
	// Refuse says no for good; any other that it may pass, so the saga tries again. Of neither a
	// write is left.
	Execute func(ctx context.Context, tx *sql.Tx, info Info, in In) (Result, error)
	// Compensate undoes what Execute did, and is called only if it did. Nil: nothing to undo.
	Compensate func(ctx context.Context, tx *sql.Tx, info Info, in In, done Result) error
}

type refusal struct{ reason string }

func (r refusal) Error() string { return r.reason }

// Refuse makes an error that no repetition can cure. Of an action it means that the saga
// is compensated; of a compensation, that an operator has to look at it.
func Refuse(format string, args ...any) error { return refusal{clip(fmt.Sprintf(format, args...))} }

// Handle handles one copy of a command in a transaction of its own and returns what to answer. An
// error means that there is no answer now: ErrNoCommand never will; after any other (the database
// cannot be reached, say, or ctx ended) call Handle again after a moment, without an ack, for a
// broker counts how often it gets a message back. What the transaction did is then found out.
func (s Step[In, Result]) Handle(ctx context.Context, db *sql.DB, c Command) (Reply, error) {
	p, err := parse(&c)
	if err != nil {
		return Reply{}, err
	}
	for try := 1; ; try++ {
		a, err := s.once(ctx, db, p)
		if err == nil {
			return p.reply(a)
		}
		if conflict(err) && try < sqltx.MaxTries {
			if err = sqltx.Pause(ctx, try); err == nil {
				continue
			}
		}
		return Reply{}, fmt.Errorf("%s step %s of saga %s: %w", p.direction, p.Step, p.SagaID, err)
	}
}

// conflict reports whether the same transaction is to be run again at once.
func conflict(err error) bool {
	class := sqltx.Classify(err)
	return class == sqltx.Conflict || class == sqltx.Other && errors.Is(err, sqltx.ErrEnded)
}

// once is Handle without the repeats.
func (s Step[In, Result]) once(ctx context.Context, db *sql.DB, p *parsed) (answer, error) {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return answer{}, fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // after Commit it does nothing; else the server ends it with the connection
	b, err := lockBarrier(ctx, tx, p)
	if err != nil {
		return answer{}, err
	}
	a, err := s.decide(ctx, tx, p, b)
	if err != nil {
		return again(err)
	}
	if err := tx.Commit(); err != nil {
		return answer{}, fmt.Errorf("commit: %w", err) // perhaps it did: the next copy sees
	}
	return a, nil
}

// again makes the answer of an error that was rolled back, unless it says nothing about the work:
// then there is none.
func again(err error) (answer, error) {
	switch class := sqltx.Classify(err); {
	case conflict(err), class == sqltx.Lost, class == sqltx.ReadOnly, class == sqltx.Full, class == sqltx.Canceled:
		return answer{}, err
	}
	if r, ok := errors.AsType[refusal](err); ok {
		return refused(r.reason), nil
	}
	return failed(err), nil
}

// decide runs what is to be run and writes down what became of it. All of an error is rolled back.
func (s Step[In, Result]) decide(ctx context.Context, tx *sql.Tx, p *parsed, b barrier) (answer, error) {
	switch {
	case p.direction == execute && b.state == stateCompleted:
		return completed(b.result), nil
	case p.direction == execute && b.state == stateCompensated:
		return refused(fmt.Sprintf("step %s of saga %s has been compensated: its action comes too late", p.Step, p.SagaID)), nil
	case p.direction == execute && b.state == stateRefused && b.commandID == p.MessageID:
		return refused(b.reason), nil
	case p.direction == execute: // nothing yet, or it was refused and the saga asks again
		return s.execute(ctx, tx, p)
	case b.state == stateCompensated:
		return completed(nil), nil
	case b.state == stateCompleted && s.Compensate != nil:
		if err := s.undo(ctx, tx, p, b.result); err != nil {
			return answer{}, err
		}
	}
	return completed(nil), writeBarrier(ctx, tx, p, barrier{state: stateCompensated})
}

func (s Step[In, Result]) execute(ctx context.Context, tx *sql.Tx, p *parsed) (answer, error) {
	var result []byte
	err := apart(ctx, tx, func() error {
		var in In
		if err := json.Unmarshal(p.input, &in); err != nil {
			return Refuse("input: %v", err)
		}
		done, err := s.Execute(ctx, tx, p.Info, in)
		if err != nil {
			return err
		}
		result, err = message.EncodeJSON(done)
		return err
	})
	if r, ok := errors.AsType[refusal](err); ok {
		return refused(r.reason), writeBarrier(ctx, tx, p, barrier{state: stateRefused, reason: r.reason})
	}
	if err != nil {
		return answer{}, err
	}
	return completed(result), writeBarrier(ctx, tx, p, barrier{state: stateCompleted, result: result})
}

// undo: what it refuses is not written down. An operator mends something and has it tried again.
func (s Step[In, Result]) undo(ctx context.Context, tx *sql.Tx, p *parsed, result []byte) error {
	var in In
	var done Result
	if err := errors.Join(json.Unmarshal(p.input, &in), json.Unmarshal(result, &done)); err != nil {
		return Refuse("input or result: %v", err)
	}
	return apart(ctx, tx, func() error { return s.Compensate(ctx, tx, p.Info, in, done) })
}

// apart runs f so that a refusal of it leaves no write. It also finds out if f hid that the server
// has ended the transaction (a deadlock): the savepoint is gone then.
func apart(ctx context.Context, tx *sql.Tx, f func() error) error {
	if _, err := tx.ExecContext(ctx, "SAVEPOINT backstep_step"); err != nil {
		return err
	}
	err := f()
	end := "RELEASE SAVEPOINT backstep_step"
	if err != nil {
		end = "ROLLBACK TO SAVEPOINT backstep_step"
	}
	if _, e := tx.ExecContext(ctx, end); e != nil {
		if class := sqltx.Classify(err); class == sqltx.None || class == sqltx.Other {
			return fmt.Errorf("%w: %w", sqltx.ErrEnded, e)
		}
	}
	return err
}
