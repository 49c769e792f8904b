package testenv

import (
	"bytes"
	"context"
	_ "embed" // shift.c
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// shiftC goes between a server and its C library. (libfaketime is not everywhere, and a clock
// of a namespace's own exists only for the monotonic ones. A Go program asks the kernel
// without a library; nothing of this works for one.)
//
//go:embed clock/shift.c
var shiftC []byte

// clock is the wall clock of a database, which can be shifted while it runs.
type clock struct{ dir string }

const (
	clockDir     = "clock"
	clockLibrary = "shift.so"
	clockShift   = "shift"
)

// make puts the clock, not shifted, into a folder of its own in dir. It takes a C compiler, as
// the race detector does.
func (c *clock) make(ctx context.Context, dir string) error {
	c.dir = filepath.Join(dir, clockDir)
	if err := os.MkdirAll(c.dir, 0o755); err != nil { //nolint:gosec // a server in a container is another user
		return err
	}
	if err := c.shift(0); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "cc", "-shared", "-fPIC", "-O2", "-x", "c", "-o", filepath.Join(c.dir, clockLibrary), "-", "-ldl")
	cmd.Stdin = bytes.NewReader(shiftC)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("compile the library that shifts a clock: %w\n%s", err, out)
	}
	return nil
}

// environment makes a server go by the clock.
func (c *clock) environment() []string {
	return []string{"LD_PRELOAD=" + filepath.Join(c.dir, clockLibrary), "CLOCK_SHIFT_FILE=" + filepath.Join(c.dir, clockShift)}
}

func (c *clock) shift(by time.Duration) error {
	f, err := os.OpenFile(filepath.Join(c.dir, clockShift), os.O_CREATE|os.O_WRONLY, 0o644) //nolint:gosec // as above
	if err != nil {
		return err
	}
	_, err = f.Write(binary.NativeEndian.AppendUint64(nil, uint64(by))) // in place: the server has mapped it
	return errors.Join(err, f.Close())
}

// ShiftDatabaseClock has the database's wall clock step, to what this machine's shows and by
// more. The servers must have been started with Options.ShiftableClock.
func (s *Servers) ShiftDatabaseClock(by time.Duration) error {
	if s.clock == nil {
		return errors.New("shift the database's clock: it was not started with one of its own")
	}
	if err := s.clock.shift(by); err != nil {
		return fmt.Errorf("shift the database's clock: %w", err)
	}
	return nil
}
