// Command backstep is the operator's command line: schema and topology, submitting orders,
// looking at sagas, repairing the outbox, replaying parked messages, checking every invariant,
// the demo, and benchmarks.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/app"
	"backstep/internal/tracing"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1 // it did not work, or verify found something
	exitUsage  = 2 // wrong arguments or configuration
)

// errReported means that what went wrong has been printed already.
var errReported = errors.New("reported")

// usageError is the caller's mistake in arguments or environment.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// actionError is an error of a verb that had begun; all others are mistakes in its arguments.
type actionError struct{ error }

func (e actionError) Unwrap() error { return e.error }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	context.AfterFunc(ctx, stop) // from now on a signal has its usual effect
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	switch {
	case errors.Is(err, errReported):
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		fmt.Fprintln(stderr, "backstep: interrupted")
	default:
		fmt.Fprintln(stderr, "backstep:", err)
	}
	if _, begun := errors.AsType[actionError](err); !begun {
		return exitUsage
	}
	if _, usage := errors.AsType[usageError](err); usage {
		return exitUsage
	}
	return exitFailed
}

func newRoot() *cobra.Command {
	root := group("backstep", "Operate Backstep: sagas on RabbitMQ and MySQL")
	root.Long = "backstep operates Backstep: sagas on RabbitMQ and MySQL.\n\n" +
		"It exits with 0 if all is well, 1 if something went wrong or verify found\n" +
		"something, and 2 for wrong arguments or configuration. It is configured by\n" +
		"environment variables:\n\n" + app.Help(&config{})
	root.Example = `  backstep demo                       # see it all run, on servers of its own
  backstep migrate up                 # the schema
  backstep topology apply             # exchanges, queues, policies
  backstep submit --count 10 --stock 1000
  backstep saga list --status MANUAL_ACTION
  backstep outbox stats
  backstep parked list
  backstep verify --wait 30s`
	root.Version = app.Version()
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%s: %w; see %s --help", cmd.CommandPath(), err, cmd.CommandPath())
	})
	migrate := group("migrate", "Bring the database schema up to date, or look at it")
	migrate.AddCommand(newMigrateUp(), newMigrateStatus())
	topology := group("topology", "Declare what the broker needs")
	topology.AddCommand(newTopologyApply())
	root.AddCommand(migrate, topology, newSubmit(), newSaga(), newOutbox(), newParked(), newVerify(), newDemo(), newBench())
	return root
}

func newSaga() *cobra.Command {
	cmd := group("saga", "Look at sagas, and put right those that need somebody")
	cmd.Long = "Looks at sagas, and changes them for those who operate them: through the state machine, with a reason,\n" +
		"and audited. A saga in MANUAL_ACTION needs somebody; backstep saga show says why, and what helps."
	cmd.AddCommand(newSagaList(), newSagaShow(), newSagaVersions())
	for _, v := range sagaVerbs {
		cmd.AddCommand(newSagaAction(v))
	}
	return cmd
}

// group is a command that does nothing but hold others.
func group(use, short string) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short,
		Args: cobra.ArbitraryArgs, // not cobra's own text about unknown commands
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				cmd.SetOut(cmd.ErrOrStderr())
				return errors.Join(cmd.Help(), errReported)
			}
			hint := ""
			if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
				hint = "; did you mean " + strings.Join(near, " or ") + "?"
			}
			return usagef("unknown command %q for %s%s; see %[2]s --help", args[0], cmd.CommandPath(), hint)
		},
		SuggestionsMinimumDistance: 2,
	}
}

// verb makes fn a command's RunE, with tracing set up as the standard OTEL_ variables say.
func verb(fn func(cmd *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		if err := traced(cmd, func() error { return fn(cmd, args) }); err != nil {
			return actionError{err}
		}
		return nil
	}
}

func traced(cmd *cobra.Command, fn func() error) error {
	stop, err := tracing.Setup(cmd.Context(), "backstep-cli", app.Version())
	if err != nil {
		return usageError{err}
	}
	err = fn()
	end, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), 5*time.Second)
	defer cancel()
	if serr := stop(end); serr != nil {
		fmt.Fprintln(cmd.ErrOrStderr(), "backstep: traces not sent:", serr) // the work is done all the same
	}
	return err
}
