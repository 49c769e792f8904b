package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// fleet is processes of ours. They end with this process, however it ends: they are in the
// process group of a shell that waits on a pipe and kills its group when the pipe has no
// writer left. (Pdeathsig would not do: it fires when the thread that forked ends, and Go ends
// threads at will.) In a group of their own they also do not get the terminal's Ctrl-C, so
// they can be stopped in order.
type fleet struct {
	dir    string // of the logs
	env    []string
	leader *exec.Cmd
	hold   *os.File   // the pipe's write end
	ended  chan *proc // those that ended; stop has to be asked whether they should have
	procs  []*proc
}

const leaderScript = `cat >/dev/null; kill -s KILL 0`

func newFleet(dir string, env []string) (*fleet, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe for the processes: %w", err)
	}
	defer r.Close() //nolint:errcheck // the child has its own copy
	leader := exec.Command("/bin/sh", "-c", leaderScript)
	leader.Stdin = r
	leader.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := leader.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start the processes' guard: %w", err), w.Close())
	}
	return &fleet{dir: dir, env: env, leader: leader, hold: w, ended: make(chan *proc, 64)}, nil
}

// start runs a program; its output goes to <dir>/<name>.log.
func (f *fleet) start(program, name string) error {
	p := &proc{name: name, cmd: exec.Command(program), log: filepath.Join(f.dir, name+".log"), done: make(chan struct{})}
	file, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	p.tap = &tap{file: file, found: make(chan string, 1)}
	p.cmd.Env = f.env
	p.cmd.Stdout, p.cmd.Stderr = p.tap, p.tap
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pgid: f.leader.Process.Pid}
	if err := p.cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("start %s: %w", name, err), file.Close())
	}
	f.procs = append(f.procs, p)
	go func() {
		p.err = errors.Join(p.cmd.Wait(), file.Close())
		close(p.done)
		f.ended <- p
	}()
	return nil
}

// readyTimeout is how long a process may take until it can do its work.
const readyTimeout = 60 * time.Second

// awaitReady waits until every process says that it can do its work.
func (f *fleet) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not ready after %s", readyTimeout))
	defer cancel()
	for _, p := range f.procs {
		if err := p.awaitReady(ctx); err != nil {
			return fmt.Errorf("%s: %w; its last words:\n%s", p.name, err, p.tail())
		}
	}
	return nil
}

// stopTimeout is how long a process may take to stop before it is killed.
const stopTimeout = 20 * time.Second

// stop asks every process to stop, kills those that do not within stopTimeout, and returns
// when none is left. The error names those that did not end in an orderly way.
func (f *fleet) stop() error {
	for _, p := range f.procs {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	}
	limit := time.NewTimer(stopTimeout)
	defer limit.Stop()
	var errs []error
	for _, p := range f.procs {
		select {
		case <-p.done:
			if p.err != nil && !p.expected {
				errs = append(errs, fmt.Errorf("%s: %w", p.name, p.err))
			}
		case <-limit.C:
			limit.Reset(0) // for the others too
			_ = p.cmd.Process.Kill()
			<-p.done
			errs = append(errs, fmt.Errorf("%s did not stop within %s of SIGTERM and was killed", p.name, stopTimeout))
		}
	}
	errs = append(errs, f.hold.Close())
	_ = f.leader.Wait() // it kills itself
	return errors.Join(errs...)
}
