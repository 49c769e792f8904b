package testenv

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
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
}

// Servers are a MySQL (or MariaDB) and a RabbitMQ that serve.
type Servers struct {
	database   server
	broker     server
	dsn        *mysql.Config
	amqp       *url.URL
	management *url.URL

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
// installing the packages (without starting the services they bring). Whatever Start
// started ends with Stop, or when this process ends, however it ends.
func Start(ctx context.Context, o Options) (*Servers, error) {
	began := time.Now()
	s := &Servers{}
	s.stop = sync.OnceValue(s.stopAll)
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
	return s.startProcesses(ctx, o)
}

// useGiven takes the servers whose addresses are given and checks that they answer.
func (s *Servers) useGiven(ctx context.Context, o Options) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if o.MySQLDSN != "" {
		cfg, err := mysql.ParseDSN(o.MySQLDSN)
		if err != nil {
			return fmt.Errorf("read the given MySQL DSN: %w", err)
		}
		if err := wait(ctx, nil, func(ctx context.Context) error { return pingMySQL(ctx, cfg) }); err != nil {
			return fmt.Errorf("use the given MySQL at %s: %w", cfg.Addr, err)
		}
		s.database, s.dsn = given("MySQL"), cfg
	}
	if o.AMQPURL != "" {
		broker, err := url.Parse(o.AMQPURL)
		if err != nil {
			return errors.New("read the given AMQP URL: it is not a URL") // the error would quote the password
		}
		management := &url.URL{Scheme: "http", User: broker.User, Host: net.JoinHostPort(broker.Hostname(), "15672")}
		if o.ManagementURL != "" {
			if management, err = url.Parse(o.ManagementURL); err != nil {
				return errors.New("read the given management URL: it is not a URL")
			}
		}
		if management.User == nil {
			management.User = broker.User
		}
		if err := wait(ctx, nil, func(ctx context.Context) error { return pingRabbitMQ(ctx, broker, management) }); err != nil {
			return fmt.Errorf("use the given RabbitMQ at %s: %w", broker.Host, err)
		}
		s.broker, s.amqp, s.management = given("RabbitMQ"), broker, management
	}
	return nil
}

// startProcesses starts what is still missing as private processes, side by side.
func (s *Servers) startProcesses(ctx context.Context, o Options) error {
	path := newSearchPath(o.Path)
	var (
		mysqlFiles  mysqlPrograms
		rabbitFiles rabbitPrograms
		err         error
	)
	if s.database == nil {
		mysqlFiles, err = findMySQL(ctx, path)
	}
	if s.broker == nil {
		var e error
		rabbitFiles, e = findRabbitMQ(path)
		err = errors.Join(err, e)
	}
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(o.Dir, "backstep-servers-")
	if err != nil {
		return fmt.Errorf("make a folder for the servers: %w", err)
	}
	if s.guard, err = newGuard(dir); err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	o.log().Info("starting private servers", "dir", dir)

	var wg sync.WaitGroup
	var errMySQL, errRabbit error
	if s.database == nil {
		wg.Go(func() {
			var p *process
			if p, s.dsn, errMySQL = startMySQL(ctx, s.guard, dir, mysqlFiles); p != nil {
				s.database = p
			}
		})
	}
	if s.broker == nil {
		wg.Go(func() {
			var r *rabbit
			if r, errRabbit = startRabbitMQ(ctx, s.guard, dir, rabbitFiles); r != nil {
				s.broker, s.amqp, s.management = r, r.url, r.http
			}
		})
	}
	wg.Wait()
	return errors.Join(errMySQL, errRabbit)
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

// KillBroker ends the broker as kill -9 does. Its data stay.
func (s *Servers) KillBroker() error { return s.broker.kill() }

// StopBroker shuts the broker down in an orderly way. Its data stay.
func (s *Servers) StopBroker(ctx context.Context) error { return s.broker.stop(ctx) }

// StartBroker starts the broker again, at its old address, and returns when it serves.
func (s *Servers) StartBroker(ctx context.Context) error { return s.broker.start(ctx) }

// RestartBroker is StopBroker and StartBroker.
func (s *Servers) RestartBroker(ctx context.Context) error {
	if err := s.broker.stop(ctx); err != nil {
		return err
	}
	return s.broker.start(ctx)
}

// KillDatabase ends the database as kill -9 does. Its data stay.
func (s *Servers) KillDatabase() error { return s.database.kill() }

// StopDatabase shuts the database down in an orderly way. Its data stay.
func (s *Servers) StopDatabase(ctx context.Context) error { return s.database.stop(ctx) }

// StartDatabase starts the database again, at its old address, and returns when it serves.
func (s *Servers) StartDatabase(ctx context.Context) error { return s.database.start(ctx) }

// RestartDatabase is StopDatabase and StartDatabase.
func (s *Servers) RestartDatabase(ctx context.Context) error {
	if err := s.database.stop(ctx); err != nil {
		return err
	}
	return s.database.start(ctx)
}

// given is a server that somebody else runs.
type given string

// ErrNotOurs means that a server was given to us, so that we may not stop or start it.
var ErrNotOurs = errors.New("not started by testenv")

func (g given) start(context.Context) error { return fmt.Errorf("start %s: %w", string(g), ErrNotOurs) }
func (g given) stop(context.Context) error  { return fmt.Errorf("stop %s: %w", string(g), ErrNotOurs) }
func (g given) kill() error                 { return fmt.Errorf("kill %s: %w", string(g), ErrNotOurs) }
func (g given) pid() int                    { return 0 }
func (g given) reaped()                     {}

// searchPath lists the folders in which programs are looked for.
type searchPath []string

func newSearchPath(list string) searchPath {
	if list != "" {
		return filepath.SplitList(list)
	}
	// The script that Debian's rabbitmq-server wraps must be found before the wrapper.
	path, _ := filepath.Glob("/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin") // the pattern is well-formed
	path = append(path, filepath.SplitList(os.Getenv("PATH"))...)
	erlang, _ := filepath.Glob("/usr/lib/erlang/erts-*/bin")
	return append(append(path, "/usr/local/sbin", "/usr/sbin", "/usr/bin"), erlang...)
}

// find returns the first of the programs in the first folder that has one.
func (p searchPath) find(programs ...string) (string, error) {
	for _, dir := range p {
		for _, program := range programs {
			file := filepath.Join(dir, program)
			if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
				return file, nil
			}
		}
	}
	return "", fmt.Errorf("no program %s found", strings.Join(programs, " or "))
}

// randomName returns 12 hexadecimal digits, to name things nobody else names.
func randomName() string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
