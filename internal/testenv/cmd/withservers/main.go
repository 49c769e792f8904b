// Command withservers runs a command that finds a MySQL and a RabbitMQ in its environment.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"

	"backstep/internal/testenv"
)

const usage = `Usage: withservers -- COMMAND [ARGUMENT...]

Starts a MySQL (or MariaDB) and a RabbitMQ, runs COMMAND, stops the servers and exits as
COMMAND did. COMMAND finds them in TEST_MYSQL_DSN, TEST_AMQP_URL and
TEST_AMQP_MANAGEMENT_URL. Of these, what is set already is used as it is and not started.
With TEST_STACK=current, they are MySQL and RabbitMQ of Debian's unstable suite, which runs
in a folder of its own.

Example:
  withservers -- go test -race ./...
`

func main() {
	args := os.Args[1:]
	if len(args) > 0 && (args[0] == "-h" || args[0] == "--help") {
		fmt.Print(usage)
		return
	}
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	code, err := run(args)
	if err != nil {
		fmt.Fprintln(os.Stderr, "withservers:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// run starts servers, runs the command and returns its exit code.
func run(command []string) (code int, err error) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()

	o, err := testenv.Given()
	if err != nil {
		return 1, err
	}
	o.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	servers, err := testenv.Start(ctx, o)
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, servers.Stop()) }()
	if ctx.Err() != nil {
		return 1, context.Cause(ctx)
	}

	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), servers.Environment()...)
	// In a group of its own, so that a signal reaches what the command started as well, once:
	// go test does not pass SIGTERM on to the test binaries.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Foreground: inForeground()}
	if err := cmd.Start(); err != nil {
		return 127, err
	}
	group := -cmd.Process.Pid
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			_ = syscall.Kill(group, s.(syscall.Signal)) // it may just have ended
		case err := <-ended:
			_ = syscall.Kill(group, syscall.SIGKILL) // what it left behind, most often nothing
			return exitCode(err)
		}
	}
}

// inForeground reports whether we own the terminal on our standard input, if it is one. Then
// the command shall own it, to read from it and to get its Ctrl-C.
func inForeground() bool {
	owner, err := unix.IoctlGetInt(int(os.Stdin.Fd()), unix.TIOCGPGRP)
	return err == nil && owner == unix.Getpgrp()
}

// exitCode is what a shell would exit with.
func exitCode(err error) (int, error) {
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok {
		return 0, err
	}
	if status := exit.Sys().(syscall.WaitStatus); status.Signaled() {
		return 128 + int(status.Signal()), nil
	}
	return exit.ExitCode(), nil
}
