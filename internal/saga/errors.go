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

// failure is a business failure: no repeat can cure it.
type failure struct{ reason string }

func (f *failure) Error() string   { return f.reason }
func (f *failure) Permanent() bool { return true }

// Fail returns the error with which a step says no for good. Its action's effects are undone
// and compensation starts; from a compensation it leads to MANUAL_ACTION.
func Fail(format string, args ...any) error { return &failure{fmt.Sprintf(format, args...)} }

// IsPermanent reports whether err, or an error it wraps, says no redelivery can cure it.
// Unknown errors are not permanent: a retry too many costs time, a retry too few costs a saga.
func IsPermanent(err error) bool {
	var p interface{ Permanent() bool }
	return errors.As(err, &p) && p.Permanent()
}
