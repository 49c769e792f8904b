// Package app is what the binaries' mains have in common: configuration from the
// environment, JSON logs, signals, and the admin port.
package app

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/kelseyhightower/envconfig"

	"backstep/internal/tracing"
)

// Servers is the part of the configuration that every binary has.
type Servers struct {
	MySQL struct {
		DSN string `required:"true" desc:"go-sql-driver DSN, user:password@tcp(host:3306)/database"`
	}
	AMQP struct {
		URL string `required:"true" desc:"amqp://user:password@host:5672/vhost"`
	}
	AllowUntestedServer bool `split_words:"true" default:"false" desc:"accept database servers this version was never tested on"`
}

// Service is the part that every long-running binary has.
type Service struct {
	AdminAddr string     `split_words:"true" default:"127.0.0.1:0" desc:"address of the admin port; loopback by default"`
	LogLevel  slog.Level `split_words:"true" default:"info" desc:"debug, info, warn or error"`
}

// Main runs a long-running binary: it reads the environment into cfg, sets up tracing as the
// standard OTEL_ variables say, and calls run with a context that SIGINT and SIGTERM end. A
// second signal ends the process at once.
func Main(role, about string, cfg any, run func(ctx context.Context) error) {
	flag.Usage = func() { usage(about, cfg) }
	version := flag.Bool("version", false, "print the version")
	check := flag.Bool("check", false, "ask the process at BACKSTEP_ADMIN_ADDR whether it lives; for container health checks")
	flag.Parse()
	switch {
	case *version:
		fmt.Println(Version())
		return
	case *check:
		if err := checkAlive(os.Getenv("BACKSTEP_ADMIN_ADDR")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if err := Load(cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // from now on a signal has its usual effect
	err := traced(ctx, role, run)
	if err != nil {
		slog.Error("stopped", "error", err)
		os.Exit(1)
	}
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

// Validate checks what envconfig does not: required accepts an empty value.
func (s *Servers) Validate() error {
	var errs []error
	if s.MySQL.DSN == "" {
		errs = append(errs, errors.New("BACKSTEP_MYSQL_DSN is empty"))
	}
	if s.AMQP.URL == "" {
		errs = append(errs, errors.New("BACKSTEP_AMQP_URL is empty"))
	}
	return errors.Join(errs...)
}

// InRange reports a number that is out of its range, by its variable's name.
func InRange(name string, v, low, high int) error {
	if v < low || v > high {
		return fmt.Errorf("%s_%s is %d; it may be %d to %d", Prefix, name, v, low, high)
	}
	return nil
}

func usage(about string, cfg any) {
	fmt.Fprintf(os.Stderr, "%s\n\nFlags:\n", about)
	flag.PrintDefaults()
	fmt.Fprint(os.Stderr, "\nIt is configured by environment variables:\n\n")
	// The table goes to standard error like all of the usage.
	stdout := os.Stdout
	os.Stdout = os.Stderr
	defer func() { os.Stdout = stdout }()
	if err := envconfig.Usage(Prefix, cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
}

// Log makes the process's logger: JSON lines on standard output.
func Log(s Service, role string) *slog.Logger {
	log := slog.New(slog.NewJSONHandler(os.Stdout, &slog.HandlerOptions{Level: s.LogLevel})).With("role", role)
	slog.SetDefault(log)
	return log
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
