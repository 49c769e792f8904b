package testenv

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"

	amqp "github.com/rabbitmq/amqp091-go"
)

// rabbitPrograms are the files needed to run RabbitMQ.
type rabbitPrograms struct {
	server string // the real script, not Debian's wrapper, which would become another user
	ctl    string
	epmd   string
}

func findRabbitMQ(path searchPath) (rabbitPrograms, error) {
	server, err := path.find("rabbitmq-server")
	if err != nil {
		return rabbitPrograms{}, err
	}
	epmd, err := path.find("epmd")
	return rabbitPrograms{server, filepath.Join(filepath.Dir(server), "rabbitmqctl"), epmd}, err
}

// rabbit is a RabbitMQ node with an epmd (Erlang's name server) of its own.
type rabbit struct {
	process
	epmd *process
	ctl  func(ctx context.Context, args ...string) *exec.Cmd // rabbitmqctl
	url  *url.URL                                            // AMQP
	http *url.URL                                            // management API
	data string                                              // folder of all that it stores
}

// startRabbitMQ starts a node in dir.
func startRabbitMQ(ctx context.Context, g *guard, dir string, root root, programs rabbitPrograms) (*rabbit, error) {
	ports, err := freePorts(5)
	if err != nil {
		return nil, err
	}
	amqpPort, httpPort, prometheusPort, distPort, epmdPort := ports[0], ports[1], ports[2], ports[3], ports[4]
	dir = filepath.Join(dir, "rabbitmq")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	file := func(name string) string { return filepath.Join(dir, name) }
	conf := fmt.Sprintf(`listeners.tcp.default = 127.0.0.1:%d
management.tcp.ip = 127.0.0.1
management.tcp.port = %d
prometheus.tcp.ip = 127.0.0.1
prometheus.tcp.port = %d
loopback_users = none
disk_free_limit.absolute = 50MB
vm_memory_high_watermark.relative = 0.4
log.file = false
log.console = true
log.console.level = warning
`, amqpPort, httpPort, prometheusPort)
	if err := os.WriteFile(file("rabbitmq.conf"), []byte(conf), 0o600); err != nil {
		return nil, err
	}
	if err := os.WriteFile(file("enabled_plugins"), []byte("[rabbitmq_management,rabbitmq_prometheus].\n"), 0o600); err != nil {
		return nil, err
	}
	// The environment is complete and ours alone: a default for any of these would lead to
	// the machine's own broker.
	env := []string{
		"PATH=" + os.Getenv("PATH") + ":/usr/sbin:/usr/bin",
		"LANG=C.UTF-8",
		"HOME=" + dir, // its own Erlang cookie
		"ERL_EPMD_ADDRESS=127.0.0.1",
		fmt.Sprintf("ERL_EPMD_PORT=%d", epmdPort),
		fmt.Sprintf("RABBITMQ_DIST_PORT=%d", distPort),
		"RABBITMQ_NODENAME=bs-" + randomName() + "@localhost",
		"RABBITMQ_CONF_ENV_FILE=" + os.DevNull, // /etc/rabbitmq/rabbitmq-env.conf sets the node name
		"RABBITMQ_CONFIG_FILE=" + file("rabbitmq.conf"),
		"RABBITMQ_CONFIG_FILES=" + file("conf.d"),
		"RABBITMQ_ADVANCED_CONFIG_FILE=" + file("advanced.config"),
		"RABBITMQ_ENABLED_PLUGINS_FILE=" + file("enabled_plugins"),
		"RABBITMQ_GENERATED_CONFIG_DIR=" + file("config"),
		"RABBITMQ_MNESIA_BASE=" + file("data"),
		"RABBITMQ_LOG_BASE=" + file("logs"),
		"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-kernel inet_dist_use_interface {127,0,0,1}",
		"RABBITMQ_ALLOW_INPUT=1", // the script execs the node, so that the pid is the node's
	}
	command := func(ctx context.Context, program string, args ...string) *exec.Cmd {
		cmd := root.command(ctx, dir, program, args...)
		cmd.Env = env
		return cmd
	}
	// A server outlives the call that starts it; stop, kill and the guard end it.
	server := func(program string, args ...string) func() *exec.Cmd {
		return func() *exec.Cmd { return command(context.Background(), program, args...) }
	}
	r := &rabbit{
		ctl:  func(ctx context.Context, args ...string) *exec.Cmd { return command(ctx, programs.ctl, args...) },
		url:  guestURL("amqp", amqpPort),
		http: guestURL("http", httpPort),
		data: file("data"),
	}
	// Without an epmd there the node would start one that outlives it.
	r.epmd = &process{
		name:    "epmd",
		guard:   g,
		log:     file("epmd.log"),
		command: server(programs.epmd, "-port", fmt.Sprint(epmdPort), "-address", "127.0.0.1"),
		ready: func(ctx context.Context) error {
			c, err := new(net.Dialer).DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", epmdPort))
			if err != nil {
				return err
			}
			return c.Close()
		},
	}
	r.process = process{
		name:    "rabbitmq",
		guard:   g,
		log:     file("log"),
		command: server(programs.server, "-noinput"),
		ready:   func(ctx context.Context) error { return pingRabbitMQ(ctx, r.url, r.http) },
	}
	if err := r.epmd.start(ctx); err != nil {
		return r, err
	}
	return r, r.start(ctx)
}

// guestURL is a URL on this machine for the user that a new broker has.
func guestURL(scheme string, port int) *url.URL {
	return &url.URL{Scheme: scheme, User: url.UserPassword("guest", "guest"), Host: fmt.Sprintf("127.0.0.1:%d", port)}
}

func (r *rabbit) reaped() {
	r.process.reaped()
	r.epmd.reaped()
}

// pingRabbitMQ succeeds when both the management API and AMQP answer.
func pingRabbitMQ(ctx context.Context, broker, management *url.URL) error {
	if err := callManagement(ctx, management, http.MethodGet, nil, nil, "overview"); err != nil {
		return err
	}
	conn, err := amqp.Dial(broker.String())
	if err != nil {
		return err
	}
	return conn.Close()
}
