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

// BusyCPU returns the processor time that this machine has spent so far on anything: all
// processes, the kernel, and what a hypervisor gave to somebody else meanwhile.
func BusyCPU() (time.Duration, error) {
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return 0, fmt.Errorf("read the machine's processor time: %w", err)
	}
	stat, err := fs.Stat()
	if err != nil {
		return 0, fmt.Errorf("read the machine's processor time: %w", err)
	}
	c := stat.CPUTotal
	busy := c.User + c.Nice + c.System + c.IRQ + c.SoftIRQ + c.Steal
	return time.Duration(busy * float64(time.Second)), nil
}
