package main

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"backstep/internal/testenv"
	"backstep/internal/testenv/gateway"
)

// newDemoOperator has servers that are given, so that whatever the demo leaves on them stays.
func newDemoOperator(t *testing.T) *operator {
	s := testenv.Shared(t)
	return newOperator(t, "BACKSTEP_MYSQL_DSN="+s.DSN("never_touched"), "BACKSTEP_AMQP_URL="+s.AMQPURL(""),
		"BACKSTEP_AMQP_MANAGEMENT_URL="+s.ManagementURL())
}

func TestDemo(t *testing.T) {
	o := newDemoOperator(t)
	// One address as a mounted secret, which relays and workers must not read.
	secret := filepath.Join(t.TempDir(), "dsn")
	for i, v := range o.env {
		if dsn, ok := strings.CutPrefix(v, "BACKSTEP_MYSQL_DSN="); ok {
			if err := os.WriteFile(secret, []byte(dsn+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			o.env[i] = "BACKSTEP_MYSQL_DSN_FILE=" + secret
		}
	}
	a := o.run("", "demo", "--orders", "40", "--gateway", "--json").want(exitOK)
	var r result
	a.decode(&r)
	if !r.OK || r.Orders != 40 || len(r.Outcomes) != 4 || len(r.Differences) != 0 || !r.Verify.OK || r.Sample == "" {
		t.Errorf("result %+v", r)
	}
	for i, want := range []int{31, 3, 3, 3} {
		if got := r.Outcomes[i]; got.Expected != want || got.Actual != want {
			t.Errorf("outcome %+v, want %d", got, want)
		}
	}
	// 9 outbox rows of an order that goes well: 3 commands, 6 events; fewer or more of the others.
	if r.SagasPerSecond <= 0 || r.P50 <= 0 || r.P99 < r.P50 || r.Published < 31*9 {
		t.Errorf("figures %+v", r)
	}
	nothingLeft(t, o, a.stderr)
}

// Whoever names a stack while servers are given would otherwise believe that it was used.
func TestStackOfGivenServers(t *testing.T) {
	for _, args := range [][]string{{"demo"}, {"bench", "latency"}} {
		o := newDemoOperator(t)
		o.env = append(o.env, "TEST_STACK=current")
		o.run("", args...).want(exitFailed, "TEST_STACK", "BACKSTEP_MYSQL_DSN")
	}
}

// TestDemoStops in every way, and nothing of it stays.
func TestDemoStops(t *testing.T) {
	t.Run("Ctrl-C while it runs", func(t *testing.T) {
		o := newDemoOperator(t)
		d := o.start("backstep", "demo", "--orders", "5000")
		d.says("workers are ready")
		if code := d.stop(syscall.SIGINT); code != exitFailed || !strings.Contains(d.text(), "interrupted") {
			t.Errorf("exit code %d:\n%s", code, d.text())
		}
		nothingLeft(t, o, d.text())
	})
	t.Run("Ctrl-C after --keep", func(t *testing.T) {
		o := newDemoOperator(t)
		d := o.start("backstep", "demo", "--orders", "20", "--relays", "1", "--workers", "1", "--gateway", "--keep")
		d.says("stays up until Ctrl-C")
		them := newOperator(t)
		for _, v := range regexp.MustCompile(`export (\w+)='(.*)'`).FindAllStringSubmatch(d.text(), -1) {
			them.env = append(them.env, v[1]+"="+v[2])
		}
		broken := regexp.MustCompile(`(?m)^  (curl .*)$`).FindAllStringSubmatch(d.text(), -1)
		for i, k := range append(slices.Clone(gateway.Kinds), gateway.None) { // the last is the end of it
			if i >= len(broken) || !strings.Contains(broken[i][1], `"`+string(k)+`"`) {
				t.Fatalf("the demo does not say how the gateway is %s: %q", k, broken)
			}
			if said := them.shell(broken[i][1], ""); strings.Contains(said, "error") {
				t.Errorf("%s: %s", broken[i][1], said)
			}
		}
		them.run("", "submit", "--count", "5").want(exitOK)
		if url := regexp.MustCompile(`payment gateway (http.*)/ledger`).FindStringSubmatch(d.text()); url == nil || !slices.Contains(them.env, "BACKSTEP_PAYMENT_URL="+url[1]) {
			t.Errorf("the payment gateway is at %q: %q", url, them.env)
		}
		them.run("", "verify", "--wait", patience.String()).want(exitOK, "every invariant holds: 25 orders")
		if code := d.stop(syscall.SIGINT); code != exitOK {
			t.Errorf("exit code %d", code)
		}
		nothingLeft(t, o, d.text())
	})
	t.Run("a worker is killed while it stays up", func(t *testing.T) {
		o := newDemoOperator(t)
		d := o.start("backstep", "demo", "--orders", "20", "--keep")
		d.says("stays up until Ctrl-C")
		worker := processes(t, o)["worker"]
		if !regexp.MustCompile(fmt.Sprintf(`worker-[0-9] is process %d\n`, worker)).MatchString(d.text()) {
			t.Errorf("it is not said that the worker is process %d", worker)
		}
		if err := syscall.Kill(worker, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		d.says("ended: signal: killed; the others go on")
		if code := d.stop(syscall.SIGINT); code != 0 {
			t.Errorf("exit code %d", code)
		}
		nothingLeft(t, o, d.text())
	})
	t.Run("kill -9", func(t *testing.T) {
		o := newDemoOperator(t)
		d := o.start("backstep", "demo", "--orders", "20", "--keep")
		d.says("stays up until Ctrl-C")
		name := placeNames(t, d.text())[0]
		d.stop(syscall.SIGKILL)
		eventually(t, "relays and workers have ended", func() error {
			if left := processes(t, o); len(left) > 0 {
				return fmt.Errorf("these run: %v", left)
			}
			return nil
		})
		// On servers that are given, only their owner can remove what a killed demo made.
		p := place{servers: testenv.Shared(t), name: name}
		p.given.AMQP.URL, p.given.MySQL.DSN = "given", "given"
		if err := p.drop(); err != nil {
			t.Error(err)
		}
	})
}

// processes returns relays and workers that have o's environment, one pid for each program.
func processes(t *testing.T, o *operator) map[string]int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	var own string
	for _, v := range o.env {
		if strings.HasPrefix(v, "TMPDIR=") {
			own = v
		}
	}
	found := map[string]int{}
	for _, file := range files {
		env, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(append([]byte{0}, env...), []byte("\x00"+own+"\x00")) {
			continue // it has just ended, or is not ours
		}
		dir := filepath.Dir(file)
		exe, err := os.Readlink(filepath.Join(dir, "exe"))
		pid, perr := strconv.Atoi(filepath.Base(dir))
		if err == nil && perr == nil {
			found[filepath.Base(exe)] = pid
		}
	}
	return found
}

// nothingLeft demands that no process, database and virtual host is left of the demo or the
// benchmark that said this.
func nothingLeft(t *testing.T, o *operator, said string) {
	t.Helper()
	if left := processes(t, o); len(left) > 0 {
		t.Errorf("these still run: %v", left)
	}
	p := place{servers: testenv.Shared(t)}
	for _, name := range placeNames(t, said) {
		if err := p.exec(t.Context(), "USE "+name); err == nil {
			t.Errorf("database %s is still there", name)
		}
		if err := p.servers.Manage(t.Context(), http.MethodGet, nil, nil, "vhosts", name); err == nil {
			t.Errorf("virtual host %s is still there", name)
		}
	}
}

// placeNames are those of the databases and virtual hosts that a demo or a benchmark made.
func placeNames(t *testing.T, said string) []string {
	t.Helper()
	names := regexp.MustCompile(`backstep_(demo|bench)_[0-9a-f]+`).FindAllString(said, -1)
	if len(names) == 0 {
		t.Fatalf("it does not say what it made:\n%s", said)
	}
	return names
}
