package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
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

// proc is one process.
type proc struct {
	name string // such as worker-2
	cmd  *exec.Cmd
	log  string // its file
	err  error  // how it ended; set before done is closed
	done chan struct{}
	tap  *tap
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

// tap writes a process's output to its log and looks for the address of its admin port.
type tap struct {
	file  *os.File
	found chan string

	mu   sync.Mutex // guards below: standard output and error may come at once
	line []byte
	seen bool
}

func (t *tap) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.seen {
		t.line = append(t.line, b...)
		t.look()
	}
	return t.file.Write(b)
}

func (t *tap) look() {
	for {
		line, rest, whole := bytes.Cut(t.line, []byte("\n"))
		if !whole {
			return
		}
		t.line = rest
		var entry struct{ Msg, Addr string }
		if json.Unmarshal(line, &entry) == nil && entry.Msg == "admin listening" {
			t.seen, t.line = true, nil
			t.found <- entry.Addr // has room: once
			return
		}
	}
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

func (p *proc) awaitReady(ctx context.Context) error {
	select {
	case addr := <-p.tap.found:
		p.tap.found <- addr
	case <-p.done:
		return fmt.Errorf("it ended: %w", p.err)
	case <-ctx.Done():
		return fmt.Errorf("no admin port: %w", context.Cause(ctx))
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := p.get(ctx, "/readyz", nil)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-p.done:
			return fmt.Errorf("it ended: %w", p.err)
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
	}
}

// get asks the admin port, which must have been found, and decodes its JSON answer into v.
func (p *proc) get(ctx context.Context, path string, v any) error {
	addr := <-p.tap.found
	p.tap.found <- addr
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, http.NoBody)
	if err != nil {
		return err
	}
	req.Close = true // a few requests, then nothing
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // it was only read
	if resp.StatusCode != http.StatusOK {
		var b bytes.Buffer
		_, _ = b.ReadFrom(resp.Body) // half an explanation is better than none
		return errors.New(strings.TrimSpace(b.String()))
	}
	if v == nil {
		return nil
	}
	return json.NewDecoder(resp.Body).Decode(v)
}

// tail returns the end of the process's log.
func (p *proc) tail() string {
	file, err := os.Open(p.log)
	if err != nil {
		return err.Error()
	}
	defer file.Close() //nolint:errcheck // it was only read
	var last []string
	in := bufio.NewScanner(file)
	for in.Scan() {
		if last = append(last, in.Text()); len(last) > 5 {
			last = last[1:]
		}
	}
	return strings.Join(last, "\n")
}

// gone is the error that a process ended which should not have.
func (p *proc) gone() error {
	return fmt.Errorf("%s ended by itself: %w; its last words:\n%s", p.name, p.err, p.tail())
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
			if p.err != nil {
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
