//go:build crashpoints

package crash

import (
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// CRASH_AT is <point>:<n>: the process kills itself, as kill -9 would, the n-th time
// it comes to the point.
var (
	name, count, _ = strings.Cut(os.Getenv("CRASH_AT"), ":")
	hits           atomic.Int64
)

// Point kills the process if this is the point, and the time, the environment names.
func Point(at string) {
	if at != name {
		return
	}
	n, err := strconv.ParseInt(count, 10, 64)
	if err != nil {
		n = 1
	}
	if hits.Add(1) == n {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL) // cannot fail on oneself
		select {}                                      // nothing after the point runs
	}
}

// CRASH_ON is <how>:<message id>: the handler of that message does what no recover can catch.
// Without a colon it names no message, so none crashes.
var how, poison, _ = strings.Cut(os.Getenv("CRASH_ON"), ":")

// Message ends the process if the environment names the message.
func Message(id string) {
	if poison == "" || id != poison {
		return
	}
	switch how {
	case "goroutine":
		go func() { panic("crash test") }()
		select {}
	case "overflow":
		debug.SetMaxStack(1 << 20) // the usual 1 GB is no more of an overflow
		overflow(0)
	}
}

func overflow(n int) int { return overflow(n+1) + 1 }
