package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime"
	"strings"
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
	plan   string // what must not change under an instance: the steps, and which can be undone
	hooks  hooks
	decode func(payload []byte) (any, error)
}

type step struct {
	name       string
	queue      string
	action     function
	compensate function // nil: nothing to undo
	retry      retryPolicy
	lock       *lock
}

// Hooks are nil if the definition does not have them.
type (
	hook       func(ctx context.Context, tx *sqltx.Tx, in any) error
	reasonHook func(ctx context.Context, tx *sqltx.Tx, in any, reason string) error
	hooks      struct {
		completed, resumed        hook
		compensated, manualAction reasonHook
	}
)

// Part is a step or a hook of a definition for sagas with input In.
type Part[In any] func(d *Definition)

// Queue is the queue whose workers run a step.
type Queue string

// maxName is the longest name of a type or a step: both and a dot are a message's type, which
// has 255 bytes at most.
const maxName = 127

// Define makes a definition of its parts: steps in the order they run, and hooks. It panics
// on what is a programmer's mistake, such as no steps, or two of one name; so does Step.
func Define[In any](typ string, version int, parts ...Part[In]) *Definition {
	d := &Definition{Type: typ, Version: version, decode: func(b []byte) (any, error) {
		var in In
		err := json.Unmarshal(b, &in)
		return in, err
	}}
	for _, p := range parts {
		p(d)
	}
	switch {
	case typ == "" || len(typ) > maxName:
		d.mistake("its type must have 1 to %d bytes", maxName)
	case version < 1:
		d.mistake("its version must be 1 or more")
	case len(d.steps) == 0:
		d.mistake("it needs a step")
	case !encodes[In]():
		d.mistake("JSON cannot say its input %s", reflect.TypeFor[In]())
	}
	names := map[string]bool{}
	for _, s := range d.steps {
		if names[s.name] {
			d.mistake("two steps have the name %q", s.name)
		}
		names[s.name] = true
	}
	d.plan = d.describe()
	return d
}

func (d *Definition) mistake(format string, args ...any) {
	panic(fmt.Sprintf("saga.Define(%q, %d): ", d.Type, d.Version) + fmt.Sprintf(format, args...))
}

func (d *Definition) describe() string {
	steps := make([]string, len(d.steps))
	for i, s := range d.steps {
		if steps[i] = s.name; s.compensate != nil {
			steps[i] += " (undoable)"
		}
	}
	return strings.Join(steps, ", ")
}

// encodes reports whether JSON can say values of type T.
func encodes[T any]() bool {
	var zero T
	_, err := json.Marshal(zero)
	_, unsupported := errors.AsType[*json.UnsupportedTypeError](err)
	return !unsupported
}

func (s *step) mistake(format string, args ...any) {
	panic(fmt.Sprintf("saga.Step(%q, %q): ", s.name, s.queue) + fmt.Sprintf(format, args...))
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
// (2015). It never overflows.
func (p retryPolicy) delay(n int) time.Duration {
	limit := p.cap
	if shift := n - 1; p.base <= limit>>shift {
		limit = p.base << shift
	}
	return rand.N(limit)
}

type lock struct {
	kind  string // of rows
	input reflect.Type
	keys  func(in any) []string
	take  func(ctx context.Context, tx *sqltx.Tx, keys []string) error
}

// Locks says which business rows a step, and its compensation, works on. Before a batch runs
// take is called once with the sorted union of its messages' keys, so that batches cannot
// deadlock on them. Steps that lock the same kind of rows name the same take: functions are
// told apart by their names, so two closures made by the same code are one kind.
func Locks[In any](keys func(in In) []string, take func(ctx context.Context, tx *sqltx.Tx, keys []string) error) StepOption {
	if keys == nil || take == nil {
		panic("saga.Locks needs two functions")
	}
	l := &lock{
		kind:  runtime.FuncForPC(reflect.ValueOf(take).Pointer()).Name(),
		input: reflect.TypeFor[In](),
		keys:  func(in any) []string { return keys(in.(In)) },
		take:  take,
	}
	return func(s *step) { s.lock = l }
}

// OnCompleted runs in the transaction that completes the saga.
func OnCompleted[In any](hook func(ctx context.Context, tx *sqltx.Tx, in In) error) Part[In] {
	return func(d *Definition) { setHook(d, &d.hooks.completed, "OnCompleted", hook) }
}

// OnCompensated runs in the transaction that ends a compensated saga; reason is the failure
// that started it.
func OnCompensated[In any](hook func(ctx context.Context, tx *sqltx.Tx, in In, reason string) error) Part[In] {
	return func(d *Definition) { setReasonHook(d, &d.hooks.compensated, "OnCompensated", hook) }
}

// OnManualAction runs in the transaction that stops a saga for an operator. If it fails the
// saga is stopped all the same, and the reason says so.
func OnManualAction[In any](hook func(ctx context.Context, tx *sqltx.Tx, in In, reason string) error) Part[In] {
	return func(d *Definition) { setReasonHook(d, &d.hooks.manualAction, "OnManualAction", hook) }
}

// OnResumed runs in the transaction in which a saga leaves MANUAL_ACTION.
func OnResumed[In any](hook func(ctx context.Context, tx *sqltx.Tx, in In) error) Part[In] {
	return func(d *Definition) { setHook(d, &d.hooks.resumed, "OnResumed", hook) }
}

func setHook[In any](d *Definition, slot *hook, name string, f func(context.Context, *sqltx.Tx, In) error) {
	if f == nil || *slot != nil {
		d.mistake("%s needs one function", name)
	}
	*slot = func(ctx context.Context, tx *sqltx.Tx, in any) error { return f(ctx, tx, in.(In)) }
}

func setReasonHook[In any](d *Definition, slot *reasonHook, name string, f func(context.Context, *sqltx.Tx, In, string) error) {
	if f == nil || *slot != nil {
		d.mistake("%s needs one function", name)
	}
	*slot = func(ctx context.Context, tx *sqltx.Tx, in any, reason string) error {
		return f(ctx, tx, in.(In), reason)
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
