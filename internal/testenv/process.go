package testenv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// process is a server that runs as our child. It can be ended and started again.
type process struct {
	name    string
	guard   *guard
	log     string // file that gets all it prints
	command func() *exec.Cmd
	ready   func(ctx context.Context) error // nil once it serves

	mu   sync.Mutex // guards the two below; never held while waiting
	cmd  *exec.Cmd
	done chan struct{} // closed when cmd has ended and is reaped
}

// serveTimeout is how long a server may take to serve: far more than it ever needs, but a
// test that hangs says less than one that fails.
const serveTimeout = 2 * time.Minute

// start starts the process and returns once it serves. After an error it does not run.
func (p *process) start(ctx context.Context) error {
	if p.pid() != 0 {
		return fmt.Errorf("start %s: it runs already", p.name)
	}
	log, err := os.OpenFile(p.log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	defer func() { _ = log.Close() }() // the child has its own copy
	cmd, done := p.command(), make(chan struct{})
	cmd.Stdout, cmd.Stderr = log, log
	p.guard.adopt(cmd)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	go func() {
		_ = cmd.Wait() // either we ended it, or its log says why it ended
		close(done)
	}()
	p.mu.Lock()
	p.cmd, p.done = cmd, done
	p.mu.Unlock()

	ctx, cancel := context.WithTimeout(ctx, serveTimeout)
	defer cancel()
	if err := wait(ctx, done, p.ready); err != nil {
		_ = p.kill() // it may have ended by itself
		return fmt.Errorf("start %s: %w; its last words:\n%s", p.name, err, p.tail())
	}
	return nil
}

// stop ends the process in an orderly way and waits for it. Its data stay.
func (p *process) stop(ctx context.Context) error { return p.end(ctx, syscall.SIGTERM) }

// kill ends the process at once, as kill -9 or a power cut would, and waits for it.
func (p *process) kill() error { return p.end(context.Background(), syscall.SIGKILL) }

func (p *process) end(ctx context.Context, sig syscall.Signal) error {
	p.mu.Lock()
	cmd, done := p.cmd, p.done
	p.mu.Unlock()
	if p.pid() == 0 {
		return fmt.Errorf("end %s: it does not run", p.name)
	}
	if err := cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("end %s: %w", p.name, err)
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("end %s: it still runs: %w", p.name, ctx.Err())
	}
}

// pid returns the process id, 0 while it does not run.
func (p *process) pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil {
		return 0
	}
	select {
	case <-p.done:
		return 0
	default:
		return p.cmd.Process.Pid
	}
}

// reaped waits until the process, ended by the guard, is no more.
func (p *process) reaped() {
	p.mu.Lock()
	done := p.done
	p.mu.Unlock()
	if done != nil {
		<-done
	}
}

// tail returns the end of the log, for error messages.
func (p *process) tail() string {
	f, err := os.Open(p.log)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	if end, err := f.Seek(0, io.SeekEnd); err == nil {
		_, _ = f.Seek(max(0, end-2000), io.SeekStart)
	}
	b, _ := io.ReadAll(f) // what can be read of it helps, the rest is not worth a second error
	return strings.TrimSpace(string(b))
}

// wait calls ready every few milliseconds until it succeeds, ended is closed (it may be
// nil), or ctx is done.
func wait(ctx context.Context, ended <-chan struct{}, ready func(context.Context) error) error {
	for {
		try, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := ready(try)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-ended:
			return errors.New("it ended while starting")
		case <-ctx.Done():
			return fmt.Errorf("not ready: %w; last try: %w", ctx.Err(), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// freePorts returns n different loopback ports that nobody listens on. They are below the
// range from which clients' ports come, so that a server can take its port again when it
// is restarted.
func freePorts(n int) ([]int, error) {
	var ports []int
	for tries := 0; len(ports) < n; tries++ {
		port := 12000 + rand.IntN(18000)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			if tries > 100*n {
				return nil, fmt.Errorf("find a free port: %w", err)
			}
			continue
		}
		defer func() { _ = l.Close() }() // open until all are found, so that they differ
		ports = append(ports, port)
	}
	return ports, nil
}
