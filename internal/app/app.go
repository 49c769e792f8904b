// Package app is what the binaries' mains have in common: configuration from the
// environment, JSON logs, signals, and the admin port.
package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"backstep/internal/amqp"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2 // wrong arguments or configuration
)

// Servers is the part of the configuration that every long-running binary has.
type Servers struct {
	MySQL struct {
		DSN string `required:"true" example:"user:pass@tcp(host:3306)/database" desc:"database, as go-sql-driver DSN"`
	}
	AMQP struct {
		URL string `required:"true" example:"amqp://user:pass@host:5672/vhost" desc:"broker"`
	}
	AllowUntestedServer bool `split_words:"true" default:"false" desc:"accept database servers this version was never tested on"`
}

// Validate checks what tags cannot say.
func (s *Servers) Validate() error { return CheckServers(s.MySQL.DSN, s.AMQP.URL) }

// CheckServers checks the form of the addresses of both servers; empty ones are passed over.
func CheckServers(dsn, url string) error {
	var errs []error
	if dsn != "" {
		if err := sqltx.CheckDSN(dsn); err != nil {
			errs = append(errs, fmt.Errorf("%s_MYSQL_DSN: %w", Prefix, err))
		}
	}
	if url != "" {
		if err := amqp.CheckURL(url); err != nil {
			errs = append(errs, fmt.Errorf("%s_AMQP_URL: %w", Prefix, err))
		}
	}
	return errors.Join(errs...)
}

// Service is the part that every long-running binary has.
type Service struct {
	AdminAddr string     `split_words:"true" default:"127.0.0.1:0" range:"host:port, port 0 to 65535" desc:"address of the admin port, loopback by default; port 0 is a free one, see the log"`
	LogLevel  slog.Level `split_words:"true" default:"info" range:"debug, info, warn or error" desc:"least level that is logged"`
}

// Validate checks what tags cannot say.
func (s *Service) Validate() error {
	if s.AdminAddr == "" { // it could not be read, which has been said
		return nil
	}
	_, port, err := net.SplitHostPort(s.AdminAddr)
	if _, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil {
		return fmt.Errorf("%s_ADMIN_ADDR is %s; it must be host:port with a port from 0 to 65535, such as 127.0.0.1:8081", Prefix, Quote(s.AdminAddr))
	}
	return nil
}

// Main runs a long-running binary and exits: with 0 after an orderly stop, 1 if it failed, 2
// for wrong arguments or configuration.
func Main(role, about string, cfg any, run func(ctx context.Context) error) {
	os.Exit(start(role, about, cfg, os.Args[1:], os.Stdout, os.Stderr, run))
}

// start reads the environment into cfg, sets up tracing as the standard OTEL_ variables say,
// and calls run with a context that SIGINT and SIGTERM end. A second signal ends the process
// at once.
func start(role, about string, cfg any, args []string, stdout, stderr io.Writer, run func(ctx context.Context) error) int {
	flags := pflag.NewFlagSet(role, pflag.ContinueOnError)
	flags.SortFlags = false
	help := flags.BoolP("help", "h", false, "print this help")
	version := flags.Bool("version", false, "print the version")
	check := flags.Bool("check", false, "ask the process that runs whether it lives")
	err := flags.Parse(args)
	if err == nil && flags.NArg() > 0 {
		err = fmt.Errorf("it takes no arguments, but there is %q", flags.Arg(0))
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v; see %[1]s --help\n", role, err)
		return exitUsage
	}
	switch {
	case *help:
		fmt.Fprintf(stdout, "%s\n\nFlags:\n%s\nIt is configured by environment variables:\n\n%s\n", about, flags.FlagUsages(), Help(cfg))
		return exitOK
	case *version:
		fmt.Fprintln(stdout, Version())
		return exitOK
	}
	if *check {
		return checkAlive(stdout, stderr)
	}
	if err := Load(cfg); err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", role, err)
		return exitUsage
	}
	tuneGC()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // from now on a signal has its usual effect
	if err := traced(ctx, role, run); err != nil {
		slog.Error("stopped", "error", err)
		return exitFailed
	}
	return exitOK
}

// traced runs run with tracing set up, and then sends the spans that are left.
func traced(ctx context.Context, role string, run func(ctx context.Context) error) error {
	stop, err := tracing.Setup(ctx, "backstep-"+role, Version())
	if err != nil {
		return err
	}
	err = run(ctx)
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if serr := stop(end); serr != nil {
		slog.Warn("traces not sent", "error", serr) // the work is done all the same
	}
	return err
}

// Log makes the process's logger: JSON lines on standard output.
func Log(s Service, role string) *slog.Logger {
	log := slog.New(slog.NewJSONHandler(os.Stdout, &slog.HandlerOptions{Level: s.LogLevel, ReplaceAttr: legible})).With("role", role)
	slog.SetDefault(log)
	return log
}

// legible writes a duration with its unit, and an error of several in one line.
func legible(_ []string, a slog.Attr) slog.Attr {
	switch v := a.Value.Any().(type) {
	case time.Duration:
		a.Value = slog.StringValue(v.String())
	case error:
		a.Value = slog.StringValue(strings.ReplaceAll(v.Error(), "\n", "; "))
	}
	return a
}

// Version returns the version of the binary, from its build.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" || info.Main.Version == "(devel)" {
		return "dev"
	}
	return info.Main.Version
}

// ConnectionName is how an operator recognises this process in the management UI:
// backstep/worker inventory,payment@host-1 v1.2.
func ConnectionName(role string, queues ...string) string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown-host"
	}
	name := "backstep/" + role
	if len(queues) > 0 {
		name += " " + strings.Join(queues, ",")
	}
	return fmt.Sprintf("%s@%s-%d %s", name, host, os.Getpid(), Version())
}
