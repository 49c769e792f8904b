package saga

import (
	"context"
	"reflect"
	"runtime"
	"time"

	"backstep/internal/attempt"
	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// StepOption changes how a step runs.
type StepOption func(*step)

type retryPolicy struct {
	attempts  int
	base, cap time.Duration
}

var defaultRetry = retryPolicy{attempts: 5, base: time.Second, cap: 5 * time.Minute}

// longest returns the longest back-off between two tries.
func (r retryPolicy) longest(unlimited bool) time.Duration {
	shift := r.attempts - 2
	switch {
	case unlimited:
		return r.cap
	case shift < 0:
		return 0
	case r.base > r.cap>>shift:
		return r.cap
	}
	return r.base << shift
}

// Retry sets how often a step, and its compensation, is tried in all, and the base of the back-off
// between tries. Default 5 and 1 s; a remote action is tried once, its compensation 5 times at
// least. An action behind the pivot is tried without limit.
func Retry(attempts int, base time.Duration) StepOption {
	return func(s *step) { s.retry.attempts, s.retry.base = attempts, base }
}

// maxWait is the longest that a command may wait. It has its id, which says when it was made, when it
// begins to: a worker refuses one that was made longer ago than it knows duplicates, 14 days by default.
const maxWait = 7 * 24 * time.Hour

// RetryCap sets the longest back-off between tries, at most 7 days. Default 5 min.
func RetryCap(limit time.Duration) StepOption { return func(s *step) { s.retry.cap = limit } }

// Pivot makes a step the one that there is no way back from: once it has completed the saga only
// goes forward. What comes behind it is tried without limit, has nothing to undo, and is neither
// cancelled nor subject to a deadline.
func Pivot() StepOption { return func(s *step) { s.pivot = true } }

// Timeout sets how long one run of a step's function, or of its compensation, may take. One that
// takes longer is a failed attempt. Default: what a transaction may take, 40 s. It bounds each call of
// a Prepare, too, whose default is 30 s: the call's context ends with it.
func Timeout(d time.Duration) StepOption { return func(s *step) { s.timeout = d } }

// Deadline sets how long a step may take in all, from the publish of its command until its action
// has completed, attempts and waiting included. Time in which database or broker are away does not
// count. When it has passed, a local step has failed; of a remote one nobody knows whether it
// happened, so it is tried again if Retry allows for it, and then undone as if it had. After half of
// it the command of a remote step is emitted once more, with its id, if no reply has come. Default:
// none for a local step, 15 min for a remote one.
func Deadline(d time.Duration) StepOption { return func(s *step) { s.deadline = d } }

// NothingToUndo says that a remote step has no compensation.
func NothingToUndo() StepOption { return func(s *step) { s.final = true } }

// Within sets how long a saga may take until its pivot, or its end if it has none. When that has
// passed it is undone. Time in which database or broker are away does not count. In MANUAL_ACTION
// it runs on, but nothing is undone for it there; if it has passed when an operator retries, or skips
// a step, it counts no more.
func Within[In any](d time.Duration) Part[In] {
	return func(def *Definition) {
		if d <= 0 || def.within != 0 {
			def.mistake("Within needs one duration, more than 0")
		}
		def.within = d
	}
}

// MaxBody sets how large a command may be, in bytes: its body is the input as JSON. A saga whose
// commands would be larger is not started, since workers would park them. Default 256 KiB, which
// every worker takes; one that is to take more needs as large a BACKSTEP_MAX_BODY.
func MaxBody[In any](bytes int) Part[In] {
	return func(def *Definition) {
		if bytes < message.MaxBody || bytes > 4<<20 {
			def.mistake("MaxBody needs %d to %d bytes", message.MaxBody, 4<<20)
		}
		def.maxBody = bytes
	}
}

// delay returns how long to wait after attempt n failed.
func (p retryPolicy) delay(n int) time.Duration { return attempt.Delay(n, p.base, p.cap) }

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
		keys:  func(in any) []string { return keys(as[In](in)) },
		take:  take,
	}
	return func(s *step) { s.lock = l }
}
