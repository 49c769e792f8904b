package main

import (
	"io"
	"net"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/go-sql-driver/mysql"

	"backstep/internal/testenv"
)

// TestBrokerDenies: no verb waits for what only a person can cure, and it says how.
func TestBrokerDenies(t *testing.T) {
	broker := testenv.Vhost(t)
	stranger := broker.User(t, "^$", "^$", "^$")
	other := testenv.Vhost(t)
	for _, tt := range []struct {
		name, url string
		says      []string
	}{
		{"unknown virtual host", broker.URL + "-typo", []string{"vhost " + broker.Vhost + "-typo not found", "rabbitmqctl add_vhost '" + broker.Vhost + "-typo'"}},
		{"virtual host of others", strings.Replace(stranger, broker.Vhost, other.Vhost, 1), []string{"rabbitmqctl set_permissions -p '" + other.Vhost + "'"}},
		{"wrong password", strings.Replace(stranger, "@", "s3cret@", 1), []string{"403", `and its password right?`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := newOperator(t, "BACKSTEP_AMQP_URL="+tt.url)
			for _, args := range []string{"submit --count 1 --patience 1h", "topology apply"} {
				a := o.run("", strings.Fields(args)...).want(exitFailed, append(tt.says, "BACKSTEP_AMQP_URL")...)
				if strings.Contains(a.stderr, "s3cret") {
					t.Errorf("it tells the password: %s", a.stderr)
				}
			}
		})
	}
	newOperator(t, "BACKSTEP_AMQP_URL="+stranger).run("", "topology", "apply").
		want(exitFailed, `exchange "backstep.commands"`, "lacks the permission to configure it")
	o := newOperator(t, "BACKSTEP_AMQP_URL="+broker.URL)
	a := o.run("", "topology", "apply", "--json").want(exitOK, "the policies were not put, because BACKSTEP_AMQP_MANAGEMENT_URL is not set")
	a.decode(&applied{})
	newOperator(t, "BACKSTEP_AMQP_URL="+broker.URL, "BACKSTEP_AMQP_MANAGEMENT_URL=http://127.0.0.1:1").run("", "topology", "apply").
		want(exitFailed, "the policies could not be put", "is BACKSTEP_AMQP_MANAGEMENT_URL right?")
}

// gate is a way to a server that closes every connection until it is opened.
type gate struct {
	addr string
	open atomic.Bool
}

func newGate(t *testing.T, target string) *gate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gate{addr: l.Addr().String()}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return // the test is over
			}
			if !g.open.Load() {
				_ = client.Close()
				continue
			}
			server, err := net.Dial("tcp", target)
			if err != nil {
				_ = client.Close()
				continue
			}
			end := func() { _ = client.Close(); _ = server.Close() }
			wg.Go(func() { defer end(); _, _ = io.Copy(client, server) })
			wg.Go(func() { defer end(); _, _ = io.Copy(server, client) })
		}
	})
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	return g
}

// TestVerifyWaitsForServers that are still starting, and for the schema and the topology that
// come after them.
func TestVerifyWaitsForServers(t *testing.T) {
	dsn, broker := testenv.Database(t), testenv.Vhost(t)
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(broker.URL)
	if err != nil {
		t.Fatal(err)
	}
	db, mq := newGate(t, cfg.Addr), newGate(t, u.Host)
	cfg.Addr, u.Host = db.addr, mq.addr
	o := newOperator(t, "BACKSTEP_MYSQL_DSN="+cfg.FormatDSN(), "BACKSTEP_AMQP_URL="+u.String())
	o.run("", "verify").want(exitFailed, "is it running, and is BACKSTEP_MYSQL_DSN right?")

	v := o.start("backstep", "verify", "--wait", patience.String())
	v.says("waiting: MySQL at ")
	db.open.Store(true)
	direct := newOperator(t, "BACKSTEP_MYSQL_DSN="+dsn, "BACKSTEP_AMQP_URL="+broker.URL)
	direct.run("", "migrate", "up").want(exitOK)
	direct.run("", "topology", "apply").want(exitOK)
	mq.open.Store(true)
	if code := v.wait(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	v.says("every invariant holds")
}

// TestCheck: a health check says whom it asked.
func TestCheck(t *testing.T) {
	o := newOperator(t, "BACKSTEP_MYSQL_DSN="+testenv.Database(t), "BACKSTEP_AMQP_URL="+testenv.Vhost(t).URL)
	o.run("", "migrate", "up").want(exitOK)
	for _, program := range []string{"worker", "relay"} {
		o.call("", program, "--check").want(exitUsage, "BACKSTEP_ADMIN_ADDR is 127.0.0.1:0", "set it to a fixed port")
		b := o.start(program)
		b.says("admin listening")
		addr := regexp.MustCompile(`"addr":"([^"]+)"`).FindStringSubmatch(b.text())
		// The database, and nothing of who may use it.
		b.says(`"database":"` + databaseOf(t, o) + `"`)
		if len(addr) != 2 {
			t.Fatalf("no address in:\n%s", b.text())
		}
		// A proxy has no business between a process and its health check.
		check := newOperator(t, "BACKSTEP_ADMIN_ADDR="+addr[1], "HTTP_PROXY=http://127.0.0.1:1", "http_proxy=http://127.0.0.1:1")
		check.call("", program, "--check").want(exitOK, "http://"+addr[1]+"/livez answers 200 OK")
		if code := b.stop(syscall.SIGTERM); code != exitOK {
			t.Errorf("%s exited with %d", program, code)
		}
		check.call("", program, "--check").want(exitFailed, "http://"+addr[1]+"/livez", "connection refused", "BACKSTEP_ADMIN_ADDR")
	}
	newOperator(t, "BACKSTEP_ADMIN_ADDR=8081").call("", "worker", "--check").want(exitUsage, "it must be host:port")
}

func databaseOf(t *testing.T, o *operator) string {
	t.Helper()
	for _, kv := range o.env {
		if dsn, ok := strings.CutPrefix(kv, "BACKSTEP_MYSQL_DSN="); ok {
			cfg, err := mysql.ParseDSN(dsn)
			if err != nil {
				t.Fatal(err)
			}
			return cfg.Addr + "/" + cfg.DBName
		}
	}
	t.Fatal("no DSN")
	return ""
}
