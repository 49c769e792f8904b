package app

import (
	"os"
	"runtime/debug"
)

// Go collects garbage whenever the heap has doubled. Ours is a few megabytes, so that is all
// the time, and a fifth of a relay's processor time; with five times the heap it is a
// twentieth. When the heap is large the limit makes it collect as often as ever.
const (
	heapGrowth = 400       // percent
	heapLimit  = 128 << 20 // bytes of the whole process
)

// tuneGC leaves alone what GOGC or GOMEMLIMIT say.
func tuneGC() {
	if os.Getenv("GOGC") == "" && os.Getenv("GOMEMLIMIT") == "" {
		debug.SetGCPercent(heapGrowth)
		debug.SetMemoryLimit(heapLimit)
	}
}
