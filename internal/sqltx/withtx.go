package sqltx

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// MaxTries is how often WithTx runs a transaction that conflicts with others.
const MaxTries = 8

// WithTx runs fn in a transaction, READ COMMITTED in a pool of ours, and commits it. If InnoDB chose the
// transaction as a deadlock victim (1213), or it gave up waiting for a lock (1205, which
// undoes only the statement), or a record changed (1020), WithTx rolls back, waits with
// jitter, and calls fn again, MaxTries times in all. So fn touches nothing but tx and values
// it sets on every call. ErrOutcomeUnknown means the connection was lost during COMMIT.
func WithTx(ctx context.Context, db *sql.DB, fn func(ctx context.Context, tx *Tx) error) error {
	for try := 1; ; try++ {
		err := Once(ctx, db, fn)
		if Classify(err) != Conflict || try == MaxTries {
			return err
		}
		if err := Pause(ctx, try); err != nil {
			return err
		}
	}
}

// Once is WithTx without the repeats.
func Once(ctx context.Context, db *sql.DB, fn func(ctx context.Context, tx *Tx) error) (err error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return fmt.Errorf("%w: connect to MySQL: %w", ErrNotBegun, err)
	}
	defer conn.Close() //nolint:errcheck // hands it back to the pool; a broken one is dropped there
	// The statements of fn end with ctx; the transaction itself does not, or database/sql would
	// roll it back behind our back and COMMIT could not be told from it.
	// Only to begin may it not take longer: a server may not answer.
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	stop := context.AfterFunc(ctx, end)
	tx, err := conn.BeginTx(life, nil)
	if err == nil && !stop() {
		err = errors.Join(ctx.Err(), tx.Rollback())
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotBegun, err)
	}
	done := false
	defer func() {
		if !done { // fn failed or panicked
			if rerr := tx.Rollback(); rerr != nil && err != nil && Classify(rerr) != Lost && !errors.Is(rerr, sql.ErrTxDone) {
				err = errors.Join(err, fmt.Errorf("roll back: %w", rerr))
			}
		}
	}()
	t := &Tx{tx: tx, conn: conn}
	if err := fn(ctx, t); err != nil {
		return err
	}
	if t.err != nil {
		return t.err // fn swallowed an error that ended the transaction
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	done = true
	if err := tx.Commit(); err != nil {
		return commitError(err)
	}
	return nil
}

// commitError: with a lost connection nobody knows whether the server took the COMMIT. So too
// when it was interrupted by a KILL.
func commitError(err error) error {
	switch Classify(err) {
	case Lost, Full, Canceled, Other:
		return fmt.Errorf("%w: %w", ErrOutcomeUnknown, err)
	}
	return fmt.Errorf("commit: %w", err)
}

// Pause waits before try+1: uniformly random in [0, min(1 s, 10 ms·2^try)), the "full
// jitter" of Brooker, "Exponential Backoff and Jitter" (2015).
func Pause(ctx context.Context, try int) error {
	limit := min(time.Second, 10*time.Millisecond<<min(try, 10))
	t := time.NewTimer(rand.N(limit))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// MaxIn is how many values go into one IN (…). From 1000 on MariaDB makes a table of them and
// joins it (in_predicate_conversion_threshold): by a full scan, which reads, locks or waits for
// rows that nobody asked for.
const MaxIn = 900

// Binary makes arguments for VARBINARY columns.
func Binary(ss []string) []any {
	args := make([]any, len(ss))
	for i, s := range ss {
		args[i] = []byte(s)
	}
	return args
}

// Placeholders returns "?, ?, …" for n values.
func Placeholders(n int) string { return repeat("?", n) }

// Tuples returns "(?, …), (?, …), …" for rows tuples of width values.
func Tuples(rows, width int) string { return repeat("("+repeat("?", width)+")", rows) }

func repeat(s string, n int) string {
	if n == 0 {
		return ""
	}
	b := make([]byte, 0, n*(len(s)+2))
	for i := range n {
		if i > 0 {
			b = append(b, ", "...)
		}
		b = append(b, s...)
	}
	return string(b)
}
