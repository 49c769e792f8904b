package bench

import (
	"fmt"
	"time"

	"github.com/prometheus/procfs"
)

// CPU returns the processor time, user and system, that process pid has used so far, all its
// threads together, its children not. It reads /proc, so it works on Linux alone.
func CPU(pid int) (time.Duration, error) {
	proc, err := procfs.NewProc(pid)
	if err != nil {
		return 0, fmt.Errorf("read the processor time of process %d: %w", pid, err)
	}
	stat, err := proc.Stat()
	if err != nil {
		return 0, fmt.Errorf("read the processor time of process %d: %w", pid, err)
	}
	return time.Duration(stat.CPUTime() * float64(time.Second)), nil
}
