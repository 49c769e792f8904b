package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"backstep/internal/amqp"
	"backstep/internal/handlers"
	"backstep/internal/outbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// verifier checks every invariant.
type verifier struct {
	db        *sql.DB
	broker    *broker
	retention time.Duration // messages older than this are not looked for in the inbox
}

func (v verifier) verify(ctx context.Context) (*findings, error) {
	f := &findings{Violations: []sqltx.Violation{}, Warnings: []string{}}
	for _, check := range []func(context.Context, sqltx.Querier) ([]sqltx.Violation, error){
		handlers.Verify, saga.Verify, outbox.Verify,
	} {
		found, err := check(ctx, v.db)
		if err != nil {
			return nil, err
		}
		f.Violations = append(f.Violations, found...)
	}
	for _, check := range []func(context.Context, *findings) error{v.processed, v.queues, v.counts} {
		if err := check(ctx, f); err != nil {
			return nil, err
		}
	}
	f.OK = len(f.Violations) == 0
	return f, nil
}

// queues looks for messages that no consumer has taken.
func (v verifier) queues(ctx context.Context, f *findings) error {
	f.Checked.Parked = map[string]int{}
	for _, q := range handlers.Queues {
		n, err := v.depth(ctx, q, f)
		if err != nil {
			return err
		}
		if n > 0 {
			f.Violations = append(f.Violations, sqltx.Violation{Rule: "every queue is empty", Subject: q, Detail: plural(n, "message") + " ready"})
		}
		parked := amqp.ParkedQueue(q)
		if n, err = v.depth(ctx, parked, f); err != nil {
			return err
		}
		f.Checked.Parked[parked] = n
		if n > 0 {
			f.Warnings = append(f.Warnings, plural(n, "message")+" in "+parked+"; backstep parked list says why")
		}
	}
	return nil
}

// depth returns how many messages are ready in a queue; that it is missing is a violation.
func (v verifier) depth(ctx context.Context, queue string, f *findings) (int, error) {
	s, err := v.broker.client.Session(ctx)
	if err != nil {
		return 0, err
	}
	n, err := s.Depth(ctx, queue)
	if errors.Is(err, amqp.ErrMissing) {
		f.Violations = append(f.Violations, sqltx.Violation{
			Rule: "every queue exists", Subject: queue, Detail: "it does not; run: backstep topology apply",
		})
		return 0, nil
	}
	return n, err
}

func (v verifier) counts(ctx context.Context, f *findings) (err error) {
	if f.Checked.Orders, err = handlers.Counts(ctx, v.db); err != nil {
		return err
	}
	if f.Checked.Sagas, err = saga.Counts(ctx, v.db); err != nil {
		return err
	}
	rows, err := outbox.Counts(ctx, v.db)
	if err != nil {
		return err
	}
	if n := f.Checked.Sagas[saga.ManualAction]; n > 0 {
		f.Warnings = append(f.Warnings, plural(n, "saga")+" in MANUAL_ACTION; run: backstep saga list --status MANUAL_ACTION")
	}
	if n := rows["PARKED"]; n > 0 {
		f.Warnings = append(f.Warnings, plural(n, "outbox row")+" PARKED by the relay: last_error says why")
	}
	return nil
}

// restPoll is how often it is looked whether all is at rest.
const restPoll = 200 * time.Millisecond

// await waits until nothing is in flight, for limit at most.
func (v verifier) await(ctx context.Context, limit time.Duration) error {
	return v.awaitSince(ctx, time.Now(), limit)
}

// awaitSince waits until nothing is in flight, until limit after began at most. Twice in a row,
// because what a worker has in hand is in no queue and not yet in a table. The error says what
// still moved.
func (v verifier) awaitSince(ctx context.Context, began time.Time, limit time.Duration) error {
	deadline := time.NewTimer(limit - time.Since(began))
	defer deadline.Stop()
	tick := time.NewTicker(restPoll)
	defer tick.Stop()
	for quiet := 0; ; {
		f := &findings{}
		open, err := v.open(ctx, f)
		if err != nil {
			return err
		}
		if open == "" {
			if quiet++; quiet == 2 {
				return nil
			}
		} else {
			quiet = 0
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			if open == "" {
				return nil
			}
			return fmt.Errorf("not at rest after %s: %s", short(limit), open)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// open says what is in flight, or "".
func (v verifier) open(ctx context.Context, f *findings) (string, error) {
	sagas, err := saga.Verify(ctx, v.db)
	if err != nil {
		return "", err
	}
	rows, err := outbox.Verify(ctx, v.db)
	if err != nil {
		return "", err
	}
	if err := v.queues(ctx, f); err != nil {
		return "", err
	}
	var parts []string
	if n := len(sagas); n > 0 {
		parts = append(parts, atLeast(n, saga.MaxViolations)+" not ended")
	}
	for _, x := range slices.Concat(rows, f.Violations) {
		parts = append(parts, x.Subject+": "+x.Detail)
	}
	if len(parts) > 3 {
		parts = append(parts[:3], fmt.Sprintf("and %d more", len(parts)-3))
	}
	return strings.Join(parts, "; "), nil
}

func atLeast(n, most int) string {
	s := plural(n, "saga")
	if n == most {
		return s + " or more"
	}
	return s
}
