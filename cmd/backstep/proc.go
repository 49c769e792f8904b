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
	"strings"
	"sync"
	"time"
)

// proc is one process.
type proc struct {
	name string // such as worker-2
	cmd  *exec.Cmd
	log  string // its file
	err  error  // how it ended; set before done is closed
	done chan struct{}
	tap  *tap

	expected bool // it is known that it ended, and no fault
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
	return fmt.Errorf("%s ended by itself: %s; its last words:\n%s", p.name, p.cmd.ProcessState, p.tail())
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
