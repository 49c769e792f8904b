package testenv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// fakeDocker is a client whose Compose starts nothing: it notes its arguments, and the ports
// it was given.
const fakeDocker = `
cd "${0%/*}"
echo "$@" >>calls
case "$*" in
*" up "*) echo "$MYSQL_PORT $AMQP_PORT $MANAGEMENT_PORT" >ports.new && mv ports.new ports; cat fail 2>/dev/null && exit 1 ;;
esac
exit 0`

func TestComposeProject(t *testing.T) {
	t.Parallel()
	servers := Private(t)
	dir, path := t.TempDir(), t.TempDir()
	script(t, path, "docker", fakeDocker)
	forward(t, filepath.Join(path, "ports"), servers.dsn.Addr, servers.amqp.Host, servers.management.Host)

	s, err := Start(t.Context(), Options{Dir: dir, Path: path})
	if err != nil {
		t.Fatal(err)
	}
	if err := open(t, s.DSN("")).Ping(); err != nil {
		t.Errorf("use %s: %v", s.DSN(""), err)
	}
	err = errors.Join(s.RestartBroker(t.Context()), s.KillDatabase(), s.StartDatabase(t.Context()), s.Stop(), s.Stop())
	if err != nil {
		t.Errorf("restart, kill, start, stop: %v", err)
	}
	calls, err := os.ReadFile(filepath.Join(path, "calls"))
	if err != nil {
		t.Fatal(err)
	}
	project := strings.Fields(string(calls))[5]
	for i, want := range []string{
		"info", "compose version",
		"up --detach --wait mysql rabbitmq",
		"stop rabbitmq", "up --detach --wait rabbitmq",
		"kill mysql", "up --detach --wait mysql",
		"down --volumes --timeout 1",
	} {
		if i > 1 {
			want = fmt.Sprintf("compose -p %s -f compose.yaml %s", project, want)
		}
		if got := strings.Split(string(calls), "\n")[i]; got != want {
			t.Errorf("call %d was docker %s, want %s", i, got, want)
		}
	}
	isEmpty(t, dir)
}

func TestComposeThatFailsLeavesNothingAndSaysWhy(t *testing.T) {
	dir, path := t.TempDir(), t.TempDir()
	script(t, path, "docker", fakeDocker)
	if err := os.WriteFile(filepath.Join(path, "fail"), []byte("cannot pull\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Start(t.Context(), Options{Dir: dir, Path: path})
	if err == nil || !strings.Contains(err.Error(), "cannot pull") {
		t.Errorf("Start gave %v, want Docker's reason", err)
	}
	calls, _ := os.ReadFile(filepath.Join(path, "calls")) // an empty one fails below
	if !strings.Contains(string(calls), " down ") {
		t.Errorf("docker was called with\n%swant down among it", calls)
	}
	isEmpty(t, dir)
}

// forward does what Docker's port forwarding would, from the ports in the file, once it is
// there, to the addresses, until the test ends.
func forward(t *testing.T, file string, addrs ...string) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	wg.Go(func() {
		var ports []byte
		if wait(ctx, nil, func(context.Context) (err error) { ports, err = os.ReadFile(file); return err }) != nil {
			return
		}
		for i, port := range strings.Fields(string(ports)) {
			l, err := net.Listen("tcp", "127.0.0.1:"+port)
			if err != nil {
				t.Error(err)
				return
			}
			context.AfterFunc(ctx, func() { _ = l.Close() })
			wg.Go(func() { accept(ctx, l, addrs[i], &wg) })
		}
	})
}

func accept(ctx context.Context, l net.Listener, addr string, wg *sync.WaitGroup) {
	for {
		client, err := l.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", addr)
		if err != nil {
			_ = client.Close()
			continue
		}
		done, cancel := context.WithCancel(ctx) // when either side has closed
		context.AfterFunc(done, func() { _, _ = client.Close(), server.Close() })
		wg.Go(func() { defer cancel(); _, _ = io.Copy(client, server) })
		wg.Go(func() { defer cancel(); _, _ = io.Copy(server, client) })
	}
}
