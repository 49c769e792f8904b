package testenv

import (
	"context"
	_ "embed" // compose.yaml
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

//go:embed compose.yaml
var composeYAML []byte

// compose is a Docker Compose project of ours. It has a random name, so that any number
// may run on one machine.
type compose struct {
	command []string // docker compose with its options, to be run in dir
	dir     string
	env     []string
	guard   *guard
}

// findCompose returns a project that is not started yet. It fails if there is no Docker
// client with Compose, or if no daemon answers it within 3 s.
func findCompose(ctx context.Context, path searchPath) (*compose, error) {
	docker, err := path.find("docker")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	for _, args := range [][]string{{"info"}, {"compose", "version"}} {
		cmd := exec.CommandContext(ctx, docker, args...)
		cmd.WaitDelay = time.Second // a plugin may keep the pipe open
		if out, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("run docker %s: %w: %s", args[0], err, lastLine(out))
		}
	}
	return &compose{command: []string{docker, "compose", "-p", "backstep-" + randomName(), "-f", "compose.yaml"}}, nil
}

// startCompose starts those of the servers that s does not have yet. After an error nothing
// of it is left.
func (s *Servers) startCompose(ctx context.Context, o Options) error {
	c, err := findCompose(ctx, newSearchPath(o.Path))
	if err != nil {
		return err
	}
	dir, err := s.prepare(o, append(c.command, "down", "--volumes", "--timeout", "1")...)
	if err != nil {
		return err
	}
	c.dir, c.guard = dir, s.guard
	o.log().Info("starting containers", "dir", dir)
	if err := s.up(ctx, c); err != nil {
		o.log().Warn("containers did not start", "error", err)
		s.guard = nil
		return errors.Join(err, c.guard.release())
	}
	return nil
}

// up starts the missing servers in project c and notes them in s.
func (s *Servers) up(ctx context.Context, c *compose) error {
	ports, err := freePorts(3)
	if err != nil {
		return err
	}
	c.env = append(os.Environ(), fmt.Sprintf("MYSQL_PORT=%d", ports[0]),
		fmt.Sprintf("AMQP_PORT=%d", ports[1]), fmt.Sprintf("MANAGEMENT_PORT=%d", ports[2]))
	preload := ""
	if s.clock != nil {
		if err := s.clock.make(ctx, c.dir); err != nil {
			return err
		}
		preload = filepath.Join("/", clockDir, clockLibrary)
	} else if err := os.Mkdir(filepath.Join(c.dir, clockDir), 0o700); err != nil { // or Docker makes it, as root
		return err
	}
	c.env = append(c.env, "CLOCK_PRELOAD="+preload)
	if err := os.WriteFile(filepath.Join(c.dir, "compose.yaml"), composeYAML, 0o600); err != nil {
		return err
	}
	cfg := rootConfig(fmt.Sprintf("127.0.0.1:%d", ports[0]))
	url, management := guestURL("amqp", ports[1]), guestURL("http", ports[2])
	database := &container{c, "mysql", func(ctx context.Context) error { return pingMySQL(ctx, cfg) }}
	broker := &container{c, "rabbitmq", func(ctx context.Context) error { return pingRabbitMQ(ctx, url, management) }}
	var missing []*container
	if s.database == nil {
		missing = append(missing, database)
	}
	if s.broker == nil {
		missing = append(missing, broker)
	}
	if err := c.start(ctx, missing...); err != nil {
		return err
	}
	if s.database == nil {
		s.database, s.dsn = database, cfg
	}
	if s.broker == nil {
		s.broker, s.amqp, s.management = broker, url, management
	}
	return nil
}

func (c *compose) run(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, c.command[0], append(c.command[1:], args...)...)
	cmd.Dir, cmd.Env = c.dir, c.env
	cmd.WaitDelay = time.Second
	c.guard.adopt(cmd)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("run docker compose %s: %w: %s", args[0], err, lastLine(out))
	}
	return nil
}

// start starts containers side by side and returns when they serve.
func (c *compose) start(ctx context.Context, containers ...*container) error {
	args := []string{"up", "--detach", "--wait"} // this waits until they run, and fails if they end
	for _, container := range containers {
		args = append(args, container.service)
	}
	if err := c.run(ctx, args...); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, serveTimeout)
	defer cancel()
	for _, container := range containers {
		if err := wait(ctx, nil, container.ready); err != nil {
			return fmt.Errorf("start %s: %w", container.service, err)
		}
	}
	return nil
}

// container is a server that runs as a service of a Compose project.
type container struct {
	*compose
	service string
	ready   func(ctx context.Context) error
}

func (c *container) start(ctx context.Context) error { return c.compose.start(ctx, c) }
func (c *container) stop(ctx context.Context) error  { return c.run(ctx, "stop", c.service) }
func (c *container) kill() error                     { return c.run(context.Background(), "kill", c.service) }
func (c *container) pid() int                        { return 0 }
func (c *container) reaped()                         {} // removed by the guard
