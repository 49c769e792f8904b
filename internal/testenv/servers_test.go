package testenv

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("TESTENV_OWN_SERVERS_IN"); dir != "" {
		own(dir)
	}
	if dir := os.Getenv("TESTENV_MAKE_DEBIAN_IN"); dir != "" {
		_, err := debian{dir, slog.New(slog.DiscardHandler)}.root(context.Background())
		fmt.Fprintln(os.Stderr, "it was not killed:", err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(M{m})
}

// own starts servers, says who they are and waits to be killed. It is the other process of
// TestNothingOutlivesAKilledOwner.
func own(dir string) {
	s, err := Start(context.Background(), Options{Dir: dir, Path: os.Getenv("TESTENV_PATH"), Stack: privateStack()})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_ = json.NewEncoder(os.Stdout).Encode(processes(s))
	select {}
}

// processes returns the ids of all that s runs.
func processes(s *Servers) []int {
	return []int{s.MySQLPID(), s.RabbitPID(), s.broker.(*rabbit).epmd.pid(), s.guard.leader.Process.Pid, s.guard.watcher.Process.Pid}
}

func TestNothingOutlivesAKilledOwner(t *testing.T) {
	path := pathToProcesses(t)
	t.Parallel()
	dir := t.TempDir()
	owner := exec.Command(os.Args[0])
	owner.Env = append(os.Environ(), "TESTENV_OWN_SERVERS_IN="+dir, "TESTENV_PATH="+path)
	owner.Stderr = os.Stderr
	out, err := owner.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n') // empty if it failed; then it said why
	var pids []int
	if err := json.Unmarshal([]byte(line), &pids); err != nil {
		t.Fatalf("the owner said %q: %v", line, errors.Join(err, owner.Wait()))
	}
	for _, pid := range pids {
		if !runs(pid) {
			t.Errorf("process %d does not run while its owner lives", pid)
		}
	}
	_ = owner.Process.Kill()
	_ = owner.Wait()

	deadline := time.Now().Add(5 * time.Second)
	for _, pid := range pids {
		for runs(pid) {
			if time.Now().After(deadline) {
				t.Fatalf("process %d still runs 5 s after its owner was killed", pid)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	isEmpty(t, dir)
}

func TestFaultsAndStop(t *testing.T) {
	path := pathToProcesses(t)
	t.Parallel()
	dir := t.TempDir()
	s, err := Start(t.Context(), Options{Dir: dir, Path: path, Stack: privateStack()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Stop() })
	areOfTheirStack(t, s)
	vhost, db := s.Vhost(t), open(t, s.Database(t))
	if _, err := db.Exec("CREATE TABLE t (id INT PRIMARY KEY)"); err != nil {
		t.Fatal(err)
	}
	declareQuorumQueue(t, vhost, "q")

	faults := []struct {
		name string
		do   func() error
		pid  func() int
	}{
		// First, for one that is killed may forget a queue that was declared in the moment before.
		{"restart broker", func() error { return s.RestartBroker(t.Context()) }, s.RabbitPID},
		{"kill and start broker", func() error { return errors.Join(s.KillBroker(), s.StartBroker(t.Context())) }, s.RabbitPID},
		{"kill and start database", func() error { return errors.Join(s.KillDatabase(), s.StartDatabase(t.Context())) }, s.MySQLPID},
		{"restart database", func() error { return s.RestartDatabase(t.Context()) }, s.MySQLPID},
	}
	for _, f := range faults {
		before := f.pid()
		if err := f.do(); err != nil {
			t.Fatalf("%s: %v", f.name, err)
		}
		if after := f.pid(); after == before || runs(before) {
			t.Errorf("%s: process %d before and %d after, want another", f.name, before, after)
		}
	}
	if err := s.StartBroker(t.Context()); err == nil {
		t.Error("a broker that runs could be started")
	}
	if ready, _ := vhost.Queue(t, "q"); ready != 0 {
		t.Errorf("the queue has %d messages, want 0", ready)
	}
	if _, err := db.Exec("INSERT INTO t VALUES (1)"); err != nil {
		t.Errorf("use the database after the faults: %v", err)
	}
	if out, err := s.Rabbitmqctl(t.Context(), "list_vhosts"); err != nil || !strings.Contains(out, vhost.Vhost) {
		t.Errorf("rabbitmqctl list_vhosts gave %q, %v, want %s in it", out, err, vhost.Vhost)
	}

	pids := processes(s)
	if err := errors.Join(s.Stop(), s.Stop()); err != nil {
		t.Errorf("Stop, twice: %v", err)
	}
	for _, pid := range pids {
		if runs(pid) {
			t.Errorf("process %d runs after Stop", pid)
		}
	}
	isEmpty(t, dir)
}

func TestGivenServersAreUsedAndNothingIsStarted(t *testing.T) {
	others := Shared(t)
	dir := t.TempDir()
	s, err := Start(t.Context(), Options{
		Dir:           dir,
		MySQLDSN:      others.DSN("whatever"),
		AMQPURL:       others.AMQPURL(""),
		ManagementURL: others.ManagementURL(),
		Path:          dir,
	})
	if err != nil {
		t.Fatal(err)
	}
	if s.DSN("d") != others.DSN("d") || s.AMQPURL("v") != others.AMQPURL("v") || s.ManagementURL() != others.ManagementURL() {
		t.Errorf("addresses are %s, %s, %s, want the given ones", s.DSN("d"), s.AMQPURL("v"), s.ManagementURL())
	}
	if s.MySQLPID() != 0 || s.RabbitPID() != 0 || s.guard != nil {
		t.Error("something was started")
	}
	if err := s.KillBroker(); !errors.Is(err, ErrNotOurs) {
		t.Errorf("KillBroker gave %v, want ErrNotOurs", err)
	}
	if err := s.Stop(); err != nil {
		t.Errorf("Stop: %v", err)
	}
	if err := open(t, others.DSN("")).Ping(); err != nil {
		t.Errorf("the given database after Stop: %v", err)
	}
	isEmpty(t, dir)
}

func TestNoServersAtAll(t *testing.T) {
	dir := t.TempDir()
	_, err := Start(t.Context(), Options{Dir: dir, Path: dir})
	if err == nil {
		t.Fatal("servers were started from an empty folder")
	}
	for _, hint := range []string{"BACKSTEP_MYSQL_DSN", "BACKSTEP_AMQP_URL", "Docker", "mariadb-server", "rabbitmq-server"} {
		if !strings.Contains(err.Error(), hint) {
			t.Errorf("the error does not mention %s:\n%v", hint, err)
		}
	}
	isEmpty(t, dir)
}

func TestServerThatEndsWhileStarting(t *testing.T) {
	dir, path := t.TempDir(), t.TempDir()
	epmd, err := newSearchPath("").find("epmd")
	if err != nil {
		t.Skip("Erlang is not installed")
	}
	if err := os.Symlink(epmd, filepath.Join(path, "epmd")); err != nil {
		t.Fatal(err)
	}
	script(t, path, "rabbitmq-server", "echo the cookie is too old >&2; exit 1")
	_, err = Start(t.Context(), Options{Dir: dir, Path: path, MySQLDSN: Shared(t).DSN("")})
	if err == nil || !strings.Contains(err.Error(), "the cookie is too old") {
		t.Errorf("Start gave %v, want the server's last words", err)
	}
	isEmpty(t, dir)
}

// pathToProcesses returns a path by which Start gets private processes, with Docker or
// without; a stack needs none. The test is skipped where only Docker could give it servers.
func pathToProcesses(t *testing.T) string {
	t.Helper()
	if privateStack() != "" {
		return ""
	}
	dir := t.TempDir()
	script(t, dir, "docker", "exit 1")
	path := append(searchPath{dir}, newSearchPath("")...)
	if _, _, err := new(Servers).lookUp(t.Context(), "", path); err != nil && os.Geteuid() != 0 {
		t.Skipf("servers are neither installed nor may we install them: %v", err)
	}
	return strings.Join(path, string(filepath.ListSeparator))
}

// areOfTheirStack demands that servers of a stack are those that its log line names.
func areOfTheirStack(t *testing.T, s *Servers) {
	t.Helper()
	if s.stack == "" {
		return
	}
	d, err := currentStack(slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	packages, err := os.ReadFile(filepath.Join(d.dir, "packages"))
	if err != nil {
		t.Fatal(err)
	}
	var database string
	if err := open(t, s.DSN("")).QueryRow("SELECT VERSION()").Scan(&database); err != nil {
		t.Fatal(err)
	}
	broker, err := s.Rabbitmqctl(t.Context(), "version")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"mysql-server-core " + database, "rabbitmq-server " + strings.TrimSpace(broker) + "-"} {
		if !strings.Contains(string(packages), want) {
			t.Errorf("%s runs, but the packages are\n%s", want, packages)
		}
	}
}

func script(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
}

// runs reports whether a process runs. One that only waits to be reaped does not.
func runs(pid int) bool {
	out, _ := exec.Command("ps", "-o", "stat=", "-p", fmt.Sprint(pid)).Output() // fails if there is none
	state := strings.TrimSpace(string(out))
	return state != "" && !strings.HasPrefix(state, "Z")
}

func isEmpty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > 0 {
		t.Errorf("%s contains %v (%v), want nothing left", dir, entries, err)
	}
}
