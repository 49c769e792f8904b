package saga

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"time"

	"backstep/internal/sqltx"
)

// Definition is a saga's steps and hooks. An instance stays on the version it started with,
// so a definition in use is not edited: a changed one gets the next version and is registered
// beside it.
type Definition struct {
	Type    string
	Version int

	steps  []*step
	hooks  hooks
	decode func(payload []byte) (any, error)
}

type step struct {
	name       string
	queue      string
	action     func(ctx context.Context, tx *sqltx.Tx, in any) (result []byte, err error)
	compensate func(ctx context.Context, tx *sqltx.Tx, in any, result []byte) error // nil: nothing to undo
	retry      retryPolicy
	lock       *lock
}

type hooks struct {
	completed, resumed        func(ctx context.Context, tx *sqltx.Tx, in any) error
	compensated, manualAction func(ctx context.Context, tx *sqltx.Tx, in any, reason string) error
}

// Part is a step or a hook of a definition for sagas with input In.
type Part[In any] func(d *Definition)

// Queue is the queue whose workers run a step.
type Queue string

// Define makes a definition of its parts: steps in the order they run, and hooks. It panics
// on what is a programmer's mistake: no steps, or two of one name.
func Define[In any](typ string, version int, parts ...Part[In]) *Definition {
	d := &Definition{Type: typ, Version: version, decode: func(b []byte) (any, error) {
		var in In
		err := json.Unmarshal(b, &in)
		return in, err
	}}
	for _, p := range parts {
		p(d)
	}
	if typ == "" || version < 1 || len(d.steps) == 0 {
		panic(fmt.Sprintf("saga.Define(%q, %d): a definition needs a type, a version from 1 and a step", typ, version))
	}
	names := map[string]bool{}
	for _, s := range d.steps {
		if s.name == "" || s.queue == "" || names[s.name] {
			panic(fmt.Sprintf("saga.Define(%q, %d): step %q needs a name of its own and a queue", typ, version, s.name))
		}
		names[s.name] = true
	}
	return d
}

// Step is a local step: action runs in a transaction on queue's workers, and what it returns
// is stored and handed to compensation should the saga have to be undone. A nil compensation
// means there is nothing to undo. Either may add events to the outbox and must touch nothing
// but tx. An error made by Fail is final; any other is retried.
func Step[In, Result any](
	name string, queue Queue,
	action func(ctx context.Context, tx *sqltx.Tx, in In) (Result, error),
	compensation func(ctx context.Context, tx *sqltx.Tx, in In, done Result) error,
	options ...StepOption,
) Part[In] {
	s := &step{name: name, queue: string(queue), retry: defaultRetry}
	s.action = func(ctx context.Context, tx *sqltx.Tx, in any) ([]byte, error) {
		res, err := action(ctx, tx, in.(In))
		if err != nil {
			return nil, err
		}
		return json.Marshal(res)
	}
	if compensation != nil {
		s.compensate = func(ctx context.Context, tx *sqltx.Tx, in any, result []byte) error {
			var done Result
			if err := json.Unmarshal(result, &done); err != nil {
				return fmt.Errorf("result of step %s: %w", name, err)
			}
			return compensation(ctx, tx, in.(In), done)
		}
	}
	for _, o := range options {
		o(s)
	}
	return func(d *Definition) { d.steps = append(d.steps, s) }
}

// StepOption changes how a step runs.
type StepOption func(*step)

type retryPolicy struct {
	attempts  int
	base, cap time.Duration
}

var defaultRetry = retryPolicy{attempts: 5, base: time.Second, cap: 5 * time.Minute}

// Retry sets how often a step, and its compensation, is tried in all, and the base of the
// back-off between tries. Default 5 and 1 s.
func Retry(attempts int, base time.Duration) StepOption {
	return func(s *step) { s.retry.attempts, s.retry.base = attempts, base }
}

// delay returns how long to wait after attempt n failed, n ≥ 1: uniformly random in
// [0, min(cap, base·2ⁿ⁻¹)), the "full jitter" of Brooker, "Exponential Backoff and Jitter"
// (2015).
func (p retryPolicy) delay(n int) time.Duration {
	limit := p.cap
	if shift := n - 1; shift < 30 {
		limit = min(limit, p.base<<shift)
	}
	if limit <= 0 {
		return 0
	}
	return rand.N(limit)
}

type lock struct {
	keys func(in any) []string
	take func(ctx context.Context, tx *sqltx.Tx, keys []string) error
}

// Locks says which business rows a step, and its compensation, works on. Before a batch runs
// take is called once with the sorted union of its messages' keys, so that batches cannot
// deadlock on them. Steps that lock the same kind of rows name the same take.
func Locks[In any](keys func(in In) []string, take func(ctx context.Context, tx *sqltx.Tx, keys []string) error) StepOption {
	return func(s *step) { s.lock = &lock{keys: func(in any) []string { return keys(in.(In)) }, take: take} }
}

// OnCompleted runs in the transaction that completes the saga.
func OnCompleted[In any](hook func(ctx context.Context, tx *sqltx.Tx, in In) error) Part[In] {
	return func(d *Definition) {
		d.hooks.completed = func(ctx context.Context, tx *sqltx.Tx, in any) error { return hook(ctx, tx, in.(In)) }
	}
}

// OnCompensated runs in the transaction that ends a compensated saga; reason is the failure
// that started it.
func OnCompensated[In any](hook func(ctx context.Context, tx *sqltx.Tx, in In, reason string) error) Part[In] {
	return func(d *Definition) {
		d.hooks.compensated = func(ctx context.Context, tx *sqltx.Tx, in any, reason string) error {
			return hook(ctx, tx, in.(In), reason)
		}
	}
}

// OnManualAction runs in the transaction that stops a saga for an operator.
func OnManualAction[In any](hook func(ctx context.Context, tx *sqltx.Tx, in In, reason string) error) Part[In] {
	return func(d *Definition) {
		d.hooks.manualAction = func(ctx context.Context, tx *sqltx.Tx, in any, reason string) error {
			return hook(ctx, tx, in.(In), reason)
		}
	}
}

// OnResumed runs in the transaction in which a saga leaves MANUAL_ACTION.
func OnResumed[In any](hook func(ctx context.Context, tx *sqltx.Tx, in In) error) Part[In] {
	return func(d *Definition) {
		d.hooks.resumed = func(ctx context.Context, tx *sqltx.Tx, in any) error { return hook(ctx, tx, in.(In)) }
	}
}

// undoBefore returns the index of the last step before i that has a compensation, or -1.
func (d *Definition) undoBefore(i int) int {
	for i--; i >= 0; i-- {
		if d.steps[i].compensate != nil {
			return i
		}
	}
	return -1
}

// StepNames returns the steps' names in order.
func (d *Definition) StepNames() []string {
	names := make([]string, len(d.steps))
	for i, s := range d.steps {
		names[i] = s.name
	}
	return names
}

// Info is what a step function may know about the saga it runs in.
type Info struct {
	SagaID    string
	Step      string
	Direction Direction
	Attempt   int
}

// IdempotencyKey is the same for every attempt of this step in this direction.
func (i Info) IdempotencyKey() string {
	return i.SagaID + ":" + i.Step + ":" + string(i.Direction)
}

type infoKey struct{}

// InfoFrom returns the Info of the step that ctx belongs to.
func InfoFrom(ctx context.Context) Info {
	info, _ := ctx.Value(infoKey{}).(Info)
	return info
}
