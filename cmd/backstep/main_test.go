package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"backstep/internal/testenv"
)

// binaries is the folder with the programs under test.
var binaries string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "backstep-cli-")
	if err != nil {
		panic(err)
	}
	binaries = dir
	code := 1
	args := []string{"build", "-o", dir}
	if raceEnabled {
		args = append(args, "-race")
	}
	build := exec.Command("go", append(args, "backstep/cmd/backstep", "backstep/cmd/worker", "backstep/cmd/relay")...)
	build.Stdout, build.Stderr = os.Stdout, os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "build the programs:", err)
	} else {
		code = testenv.M{M: m}.Run()
	}
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// patience is how long a test waits for what must happen.
const patience = 90 * time.Second

// operator runs the programs with an environment.
type operator struct {
	t   *testing.T
	env []string // what it has besides PATH
}

func newOperator(t *testing.T, env ...string) *operator {
	// A program with the race detector sleeps a second before it exits, unless it is told not to.
	own := []string{"PATH=" + os.Getenv("PATH"), "TMPDIR=" + t.TempDir(), "GORACE=atexit_sleep_ms=0"}
	return &operator{t, append(own, env...)}
}

func (o *operator) command(program string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(binaries, program), args...)
	cmd.Env = o.env
	return cmd
}

// answer is what a verb said.
type answer struct {
	t              *testing.T
	program, args  string
	stdout, stderr string
	code           int
}

// run runs a verb to its end.
func (o *operator) run(stdin string, args ...string) answer {
	o.t.Helper()
	return o.call(stdin, "backstep", args...)
}

// call runs a program to its end, which must come.
func (o *operator) call(stdin, program string, args ...string) answer {
	o.t.Helper()
	cmd := o.command(program, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err := cmd.Start(); err != nil {
		o.t.Fatal(err)
	}
	limit := time.AfterFunc(2*patience, func() { _ = cmd.Process.Kill() })
	err := cmd.Wait()
	if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited || !limit.Stop() {
		o.t.Fatalf("%s %s: %v\nstdout: %s\nstderr: %s", program, strings.Join(args, " "), err, &stdout, &stderr)
	}
	return answer{o.t, program, strings.Join(args, " "), stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// want demands the exit code and that each text is in the output.
func (a answer) want(code int, texts ...string) answer {
	a.t.Helper()
	if a.code != code {
		a.t.Fatalf("%s %s exited with %d, want %d\nstdout: %s\nstderr: %s", a.program, a.args, a.code, code, a.stdout, a.stderr)
	}
	for _, text := range texts {
		if !strings.Contains(a.stdout+a.stderr, text) {
			a.t.Errorf("%s %s does not say %q\nstdout: %s\nstderr: %s", a.program, a.args, text, a.stdout, a.stderr)
		}
	}
	return a
}

// decode reads standard output, which must be one JSON value.
func (a answer) decode(v any) {
	a.t.Helper()
	if err := json.Unmarshal([]byte(a.stdout), v); err != nil {
		a.t.Fatalf("%s %s: %v\nstdout: %s\nstderr: %s", a.program, a.args, err, a.stdout, a.stderr)
	}
}

// background is a program that runs.
type background struct {
	t    *testing.T
	cmd  *exec.Cmd
	done chan struct{}

	mu      sync.Mutex // guards below
	out     bytes.Buffer
	changed chan struct{} // closed and replaced when out grows
}

func (o *operator) start(program string, args ...string) *background {
	o.t.Helper()
	b := &background{t: o.t, cmd: o.command(program, args...), done: make(chan struct{}), changed: make(chan struct{})}
	b.cmd.Stdout, b.cmd.Stderr = b, b
	if err := b.cmd.Start(); err != nil {
		o.t.Fatal(err)
	}
	go func() {
		_ = b.cmd.Wait() // how it ended is in ProcessState
		close(b.done)
	}()
	o.t.Cleanup(func() {
		_ = b.cmd.Process.Kill() // it may have ended
		<-b.done
		if o.t.Failed() {
			o.t.Logf("--- output of %s\n%s", program, b.text())
		}
		if strings.Contains(b.text(), "WARNING: DATA RACE") {
			o.t.Errorf("data race in %s", program)
		}
	})
	return b
}

func (b *background) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.changed)
	b.changed = make(chan struct{})
	return b.out.Write(p)
}

func (b *background) text() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.out.String()
}

// says waits until the program has printed a text.
func (b *background) says(text string) {
	b.t.Helper()
	limit := time.After(patience)
	for {
		b.mu.Lock()
		found, changed := strings.Contains(b.out.String(), text), b.changed
		b.mu.Unlock()
		if found {
			return
		}
		select {
		case <-changed:
		case <-b.done:
			b.t.Fatalf("it ended and never said %q:\n%s", text, b.text())
		case <-limit:
			b.t.Fatalf("it did not say %q:\n%s", text, b.text())
		}
	}
}

// stop sends a signal and returns the exit code.
func (b *background) stop(s syscall.Signal) int {
	b.t.Helper()
	if err := b.cmd.Process.Signal(s); err != nil {
		b.t.Fatal(err)
	}
	return b.wait()
}

func (b *background) wait() int {
	b.t.Helper()
	select {
	case <-b.done:
	case <-time.After(patience):
		b.t.Fatalf("it did not end:\n%s", b.text())
	}
	return b.cmd.ProcessState.ExitCode()
}

// eventually waits until check gives nil; it is for what tells nobody when it happens.
func eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("never: %s: %v", what, err)
		}
		<-tick.C
	}
}
