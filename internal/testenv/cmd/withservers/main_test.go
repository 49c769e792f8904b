package main

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"backstep/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// withServers returns the built program, ready to run a shell script, with the servers of
// this test.
func withServers(t *testing.T, script string) *exec.Cmd {
	t.Helper()
	program := filepath.Join(t.TempDir(), "withservers")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	s := testenv.Shared(t)
	cmd := exec.Command(program, "--", "sh", "-c", script)
	cmd.Env = append(os.Environ(), s.Environment()...)
	return cmd
}

func TestCommandGetsTheServersAndItsExitCodeIsOurs(t *testing.T) {
	out, err := withServers(t, `echo "$TEST_MYSQL_DSN $TEST_AMQP_URL $TEST_AMQP_MANAGEMENT_URL"; exit 7`).Output()
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok || exit.ExitCode() != 7 {
		t.Errorf("it ended with %v, want exit status 7", err)
	}
	s := testenv.Shared(t)
	if want := s.DSN("") + " " + s.AMQPURL("") + " " + s.ManagementURL() + "\n"; string(out) != want {
		t.Errorf("the command saw %q, want %q", out, want)
	}
}

func TestSignalReachesTheCommandAndItsChildren(t *testing.T) {
	cmd := withServers(t, `trap 'wait; exit 9' TERM; sh -c 'trap "echo child got it; exit" TERM; echo ready; while :; do sleep 0.1; done' & wait`)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "ready" {
		t.Fatalf("the command said %q, want ready", lines.Text())
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if !lines.Scan() || !strings.Contains(lines.Text(), "child got it") {
		t.Errorf("the child said %q", lines.Text())
	}
	err = cmd.Wait()
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 9 {
		t.Errorf("it ended with %v, want exit status 9", err)
	}
}
