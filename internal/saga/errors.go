package saga

import (
	"errors"
	"fmt"
)

var (
	// ErrNotFound means there is no instance with that id.
	ErrNotFound = errors.New("saga: no such instance")
	// ErrUnknownDefinition means no definition of that type and version is registered.
	ErrUnknownDefinition = errors.New("saga: unknown definition")
)

// HookError is what a hook of a saga's definition failed with, while its transaction was sound: it is that
// saga's matter, not the database's.
type HookError struct {
	SagaID string
	Err    error
}

func (e *HookError) Error() string { return fmt.Sprintf("hook of saga %s: %v", e.SagaID, e.Err) }
func (e *HookError) Unwrap() error { return e.Err }

// failure is a business failure: no repeat can cure it.
type failure struct{ reason string }

func (f *failure) Error() string   { return f.reason }
func (f *failure) Permanent() bool { return true }

// Fail returns the error with which a step says no for good. Its action's effects are undone
// and compensation starts; from a compensation it leads to MANUAL_ACTION.
func Fail(format string, args ...any) error { return &failure{fmt.Sprintf(format, args...)} }

// IsPermanent reports whether err, or an error it wraps, says no redelivery can cure it.
// Unknown errors are not permanent: a retry too many costs time, a retry too few costs a saga.
func IsPermanent(err error) bool { return permanent(err) != nil }

// permanent returns what says no for good, without the words of those it came by; nil: nothing does.
func permanent(err error) error {
	var p interface {
		error
		Permanent() bool
	}
	if errors.As(err, &p) && p.Permanent() {
		return p
	}
	return nil
}
