package testenv

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/go-sql-driver/mysql"
)

// Options says what to use. The zero value starts both servers in a temporary folder.
type Options struct {
	// Dir is where the folder with the servers' data is made; default: the system's
	// temporary folder. Stop removes the folder it made, not Dir.
	Dir string
	Log *slog.Logger // gets progress; nil discards it
	// MySQLDSN and AMQPURL are servers to use as they are. If the URL of the broker's
	// management API is empty, it is taken to be port 15672 of the same host, with the same
	// credentials.
	MySQLDSN, AMQPURL, ManagementURL string
	// Path lists the folders to look for programs in, as $PATH does; default: $PATH and the
	// places that Debian's packages use.
	Path string
	// Stack says which programs to start: Current, or "" for those in Path. With a stack,
	// neither Docker nor anything that is installed is used.
	Stack string
	// ShiftableClock gives a database that is started a wall clock of its own, see
	// ShiftDatabaseClock.
	ShiftableClock bool
}

// Servers are a MySQL (or MariaDB) and a RabbitMQ that serve.
type Servers struct {
	database   server
	broker     server
	dsn        *mysql.Config
	amqp       *url.URL
	management *url.URL
	stack      string
	clock      *clock // the database's own, if any

	guard *guard // nil if we started nothing
	stop  func() error
}

// server is one of the two, in whichever way it runs.
type server interface {
	start(ctx context.Context) error // again, after stop or kill; returns when it serves
	stop(ctx context.Context) error  // orderly; the data stay
	kill() error                     // as kill -9
	pid() int                        // 0 if it is not our process
	reaped()                         // waits until the process, ended by the guard, is no more
}

// Start returns servers that answer: for each of the two the given one; else one from
// Docker Compose, if a Docker daemon answers; else a private process on free loopback
// ports, if the programs are there; else, as root on Debian, such a process after
// installing the packages (without starting the services they bring). With a stack it is
// always a private process. Whatever Start started ends with Stop, or when this process ends, however it ends.
func Start(ctx context.Context, o Options) (*Servers, error) {
	began := time.Now()
	s := &Servers{stack: o.Stack}
	s.stop = sync.OnceValue(s.stopAll)
	if o.ShiftableClock {
		s.clock = &clock{}
	}
	if err := s.start(ctx, o); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	o.log().Info("servers are ready", "mysql", s.dsn.Addr, "amqp", s.amqp.Host, "management", s.management.Host,
		"took", time.Since(began).Round(time.Millisecond).String())
	return s, nil
}

func (o Options) log() *slog.Logger {
	if o.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return o.Log
}

func (s *Servers) start(ctx context.Context, o Options) error {
	if err := s.useGiven(ctx, o); err != nil {
		return err
	}
	if s.database != nil && s.broker != nil {
		return nil
	}
	if o.Stack != "" {
		return s.startStack(ctx, o)
	}
	noDocker := s.startCompose(ctx, o)
	if noDocker == nil || ctx.Err() != nil {
		return noDocker
	}
	files, err := s.findPrograms(ctx, o)
	if err != nil {
		return noWay(noDocker, err)
	}
	return s.startPrivate(ctx, o, files)
}

// startPrivate starts what is still missing as private processes.
func (s *Servers) startPrivate(ctx context.Context, o Options, files programs) error {
	dir, err := s.prepare(o)
	if err != nil {
		return err
	}
	o.log().Info("starting private servers", "dir", dir)
	return s.startProcesses(ctx, files, dir)
}

// prepare makes the folder for the servers' data, and the guard that removes it. cleanup is
// a command that the guard is to run as well.
func (s *Servers) prepare(o Options, cleanup ...string) (string, error) {
	dir, err := os.MkdirTemp(o.Dir, "backstep-servers-")
	if err != nil {
		return "", fmt.Errorf("make a folder for the servers: %w", err)
	}
	if s.guard, err = newGuard(dir, cleanup...); err != nil {
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	return dir, nil
}

// startTries is how often a server is started. The ports were free when they were chosen, but
// somebody else may be as fast: each try has ports, and a folder, of its own.
const startTries = 3

// startProcesses starts what is still missing as private processes, side by side.
func (s *Servers) startProcesses(ctx context.Context, files programs, dir string) error {
	var wg sync.WaitGroup
	var errMySQL, errRabbit error
	if s.database == nil {
		wg.Go(func() {
			errMySQL = tryToStart(ctx, dir, "mysql", func(dir string) error {
				p, dsn, err := startMySQL(ctx, s.guard, dir, files.root, files.mysql, s.clock)
				if p != nil {
					s.database, s.dsn = p, dsn
				}
				return err
			})
		})
	}
	if s.broker == nil {
		wg.Go(func() {
			errRabbit = tryToStart(ctx, dir, "rabbitmq", func(dir string) error {
				r, err := startRabbitMQ(ctx, s.guard, dir, files.root, files.rabbit)
				if r != nil {
					s.broker, s.amqp, s.management = r, r.url, r.http
				}
				return err
			})
		})
	}
	wg.Wait()
	return errors.Join(errMySQL, errRabbit)
}

// tryToStart calls start, with a fresh folder in dir, until it succeeds or is tried enough.
func tryToStart(ctx context.Context, dir, name string, start func(dir string) error) error {
	var errs []error
	for try := range startTries {
		own := filepath.Join(dir, fmt.Sprintf("%s-%d", name, try))
		if err := os.Mkdir(own, 0o700); err != nil {
			return errors.Join(append(errs, err)...)
		}
		err := start(own)
		if err == nil {
			return nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

// noWay says why there are no servers and what a person can do about it.
func noWay(reasons ...error) error {
	return fmt.Errorf(`there is no MySQL and RabbitMQ to use, and none could be started. Do one of these:
  - name servers that run: set BACKSTEP_MYSQL_DSN and BACKSTEP_AMQP_URL (for tests TEST_MYSQL_DSN and TEST_AMQP_URL)
  - start Docker
  - install the packages mariadb-server (or mysql-server) and rabbitmq-server
what was tried:
%w`, errors.Join(reasons...))
}

// Stop ends all that Start started, waits for it, and removes its data. It may be called
// again, and does nothing then.
func (s *Servers) Stop() error { return s.stop() }

func (s *Servers) stopAll() error {
	if s.guard == nil {
		return nil
	}
	err := s.guard.release()
	for _, srv := range []server{s.database, s.broker} {
		if srv != nil {
			srv.reaped()
		}
	}
	return err
}

// DSN returns the go-sql-driver DSN of a user who may do everything, for a database, which
// may be empty.
func (s *Servers) DSN(database string) string {
	cfg := s.dsn.Clone()
	cfg.DBName = database
	return cfg.FormatDSN()
}

// AMQPURL returns the URL of a user who may do everything, for a virtual host; empty means "/".
func (s *Servers) AMQPURL(vhost string) string {
	if vhost == "" {
		vhost = "/"
	}
	u := *s.amqp
	u.Path, u.RawPath = "/"+vhost, "/"+url.PathEscape(vhost)
	return u.String()
}

// ManagementURL returns the root of the management API, with credentials.
func (s *Servers) ManagementURL() string { return s.management.String() }

// MySQLPID returns the process id of the database, 0 if it is not our process or is down.
func (s *Servers) MySQLPID() int { return s.database.pid() }

// RabbitPID returns the process id of the broker, 0 if it is not our process or is down.
func (s *Servers) RabbitPID() int { return s.broker.pid() }

// lastLine returns the last line of what a program printed, for error messages.
func lastLine(out []byte) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return lines[len(lines)-1]
}

// randomName returns 12 hexadecimal digits, to name things nobody else names.
func randomName() string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
