// Package attempt is what every try at code that is not ours needs: its panics are errors, and it is
// some time until the next.
package attempt

import (
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"time"
)

// Panic is what code panicked with.
type Panic struct {
	What  string // "panic", and where
	Value any
	Stack []byte // of where that was; whoever logs the error logs it too
}

func (p *Panic) Error() string { return fmt.Sprintf("%s: %v", p.What, p.Value) }

// Catch calls f and puts its error into err, or a Panic. If f ends its goroutine (runtime.Goexit), which
// nothing can prevent, there is a Panic for those who look at err when it has ended.
func Catch(what string, err *error, f func() error) {
	returned := false
	defer func() {
		if r := recover(); r != nil {
			*err = &Panic{what, r, debug.Stack()}
		} else if !returned {
			*err = &Panic{what, "runtime.Goexit", debug.Stack()}
		}
	}()
	*err = f()
	returned = true
}

// Delay returns how long to wait after attempt n failed, n ≥ 1: uniformly random in
// [0, min(limit, base·2ⁿ⁻¹)), the "full jitter" of Brooker, "Exponential Backoff and Jitter"
// (2015). It never overflows.
func Delay(n int, base, limit time.Duration) time.Duration {
	if shift := n - 1; base <= limit>>shift {
		limit = base << shift
	}
	return rand.N(limit)
}
