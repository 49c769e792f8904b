package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"backstep/internal/app"
)

// programs reads the environment in each binary, and in the CLI with each set of needs.
var programs = []struct {
	call  string
	needs []string
}{
	{"worker", []string{needsMySQL, needsAMQP}},
	{"relay", []string{needsMySQL, needsAMQP}},
	{"backstep verify", []string{needsMySQL, needsAMQP}},
	{"backstep saga list", []string{needsMySQL}},
	{"backstep saga show x", []string{needsMySQL}},
	{"backstep saga versions", []string{needsMySQL}},
	{"backstep saga retry --all --reason x", []string{needsMySQL}},
	{"backstep outbox list", []string{needsMySQL}},
	{"backstep outbox drop 1 --reason x", []string{needsMySQL}},
	{"backstep parked list", []string{needsAMQP}},
	{"backstep parked replay --all --reason x", []string{needsMySQL, needsAMQP}},
	{"backstep migrate up", []string{needsMySQL}},
	{"backstep migrate status", []string{needsMySQL}},
	{"backstep topology apply", []string{needsAMQP}},
	{"backstep submit --count 1", []string{needsAMQP}},
	{"backstep submit --count 1 --stock 1", []string{needsMySQL, needsAMQP}},
}

func (o *operator) callLine(line string) answer {
	o.t.Helper()
	words := strings.Fields(line)
	return o.call("", words[0], words[1:]...)
}

// server is an address at which nobody must come by.
type server struct {
	t *testing.T
	l net.Listener
}

func newServer(t *testing.T) server {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return server{t, l}
}

// untouched demands that nobody has connected: the first to come is the test itself.
func (s server) untouched() {
	s.t.Helper()
	probe, err := net.Dial("tcp", s.l.Addr().String())
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = probe.Close() }()
	for {
		c, err := s.l.Accept()
		if err != nil {
			s.t.Fatal(err)
		}
		own := c.RemoteAddr().String() == probe.LocalAddr().String()
		_ = c.Close()
		if own {
			return
		}
		s.t.Error("it connected to a server")
	}
}

// TestRequiredVariables: whatever is there and cannot be meant is refused with exit code 2
// before any server is touched, and one message has all of it.
func TestRequiredVariables(t *testing.T) {
	s := newServer(t)
	fine := map[string]string{
		needsMySQL: "app:s3cret@tcp(" + s.l.Addr().String() + ")/backstep",
		needsAMQP:  "amqp://app:s3cret@" + s.l.Addr().String() + "/",
	}
	// %s is the value that would do.
	for _, tt := range []struct{ name, value, says string }{
		{"unset", "unset", "is not set; it looks like"},
		{"empty", "", "is empty; it looks like"},
		{"blanks", "  \t", "is blank"},
		{"quotes only", `""`, "is in quotes"},
		{"in quotes", `"%s"`, "is in quotes"},
		{"trailing newline", "%s\n", "contains a line break"},
		{"byte order mark", "\ufeff%s", "starts with a byte order mark"},
		{"nonsense", "nonsense", ": "},
		{"empty file", "file:", "is empty"},
		{"empty line in a file", "file:\r\n", "is empty"},
		{"byte order mark in a file", "file:\ufeff%s\n", "starts with a byte order mark"},
		{"no such file", "file", "no such file"},
		{"both", "both", "are both set"},
	} {
		set := func(name string) []string {
			value := strings.ReplaceAll(tt.value, "%s", fine[name])
			file := filepath.Join(t.TempDir(), "secret")
			if content, ok := strings.CutPrefix(value, "file:"); ok {
				if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
				return []string{name + "_FILE=" + file}
			}
			switch tt.value {
			case "unset":
				return nil
			case "file":
				return []string{name + "_FILE=" + file}
			case "both":
				return []string{name + "=" + fine[name], name + "_FILE=" + file}
			}
			return []string{name + "=" + value}
		}
		t.Run(tt.name, func(t *testing.T) {
			for i, p := range programs {
				sets := [][]string{p.needs}
				if i > 2 && tt.value != "unset" {
					continue // the CLI's verbs only differ in what they need
				}
				if len(p.needs) > 1 {
					sets = append(sets, p.needs[:1], p.needs[1:])
				}
				for _, faulty := range sets {
					var env []string
					for _, name := range p.needs {
						if slices.Contains(faulty, name) {
							env = append(env, set(name)...)
						} else {
							env = append(env, name+"="+fine[name])
						}
					}
					a := newOperator(t, env...).callLine(p.call).want(exitUsage, slices.Concat(faulty, []string{tt.says})...)
					if n := strings.Count(a.stderr, "\n  BACKSTEP_"); n != len(faulty) || strings.Contains(a.stderr, "s3cret") || a.stdout != "" {
						t.Errorf("%s, %v: it says\n%s%s", p.call, faulty, a.stderr, a.stdout)
					}
				}
			}
			s.untouched()
		})
	}
}

// TestDSNOptions: what would break a promise is refused by name; package sqltx has the table.
func TestDSNOptions(t *testing.T) {
	s := newServer(t)
	for _, call := range []string{"worker", "relay", "backstep saga list"} {
		newOperator(t, "BACKSTEP_MYSQL_DSN=app:s3cret@tcp("+s.l.Addr().String()+")/d?autocommit=0&sql_mode=%27%27&parseTime=false",
			"BACKSTEP_AMQP_URL=amqp://"+s.l.Addr().String()).callLine(call).
			want(exitUsage, "  BACKSTEP_MYSQL_DSN: the DSN sets autocommit, sql_mode; leave it out")
	}
	s.untouched()
}

// TestSecretsFromFiles: a line break at the end is an editor's.
func TestSecretsFromFiles(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"dsn": "app:s3cret@tcp(127.0.0.1:1)/backstep\r\n", "url": "amqp://app:s3cret@127.0.0.1:1/\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	o := newOperator(t, "BACKSTEP_MYSQL_DSN_FILE="+filepath.Join(dir, "dsn"), "BACKSTEP_AMQP_URL_FILE="+filepath.Join(dir, "url"))
	o.run("", "saga", "list").want(exitFailed, "app@tcp(127.0.0.1:1)/backstep")
	o.run("", "submit", "--count", "1", "--patience", "10ms").want(exitFailed, "amqp://app@127.0.0.1:1/")
}

// variables has a row for each of app.Variables: who reads it, which of the values below are
// meant, and what it says to the others. A number or a time has bounds.
var variables = map[string]struct {
	programs  string
	fine      []string
	says      string
	low, high string
}{
	"BACKSTEP_ADMIN_ADDR":            {programs: "worker relay", says: "it must be host:port with a port from 0 to 65535, such as 127.0.0.1:8081"},
	"BACKSTEP_ALLOW_UNTESTED_SERVER": {programs: "worker relay backstep", fine: []string{"0", "1"}, says: "it must be true or false"},
	"BACKSTEP_AMQP_MANAGEMENT_URL":   {programs: "backstep", says: ": it must read http(s)://user:password@host:port"},
	"BACKSTEP_AMQP_URL":              {programs: "worker relay backstep", says: ": it must start with amqp:// or amqps://"},
	"BACKSTEP_BATCH":                 {programs: "worker", fine: []string{"1", "10"}, low: "1", high: "500"},
	"BACKSTEP_INBOX_RETENTION":       {programs: "worker relay backstep", low: "1h", high: "8760h"},
	"BACKSTEP_JAEGER_URL":            {programs: "backstep", says: ": it must read http(s)://host:port"},
	"BACKSTEP_LANES":                 {programs: "worker", fine: []string{"1", "10"}, low: "1", high: "64"},
	"BACKSTEP_LOG_LEVEL":             {programs: "worker relay", says: "it must be debug, info, warn or error"},
	"BACKSTEP_MAX_BODY":              {programs: "worker", low: "262144", high: "4194304"},
	"BACKSTEP_MAX_HOLD":              {programs: "worker", low: "1s", high: "24h"},
	"BACKSTEP_MYSQL_DSN":             {programs: "worker relay backstep", says: ": the DSN cannot be read; it looks like"},
	"BACKSTEP_OUTBOX_RETENTION":      {programs: "relay", fine: []string{"0", "0s", "1ns"}, low: "0s", high: "8760h"},
	"BACKSTEP_PAYMENT_URL":           {programs: "worker backstep", says: "it must read http(s)://host:port/path"},
	"BACKSTEP_PREFETCH":              {programs: "worker", fine: []string{"1", "10"}, low: "1", high: "1000"},
	"BACKSTEP_QUEUES":                {programs: "worker", says: "the queues are orders, "},
	"BACKSTEP_RELAY_LEASE_TTL":       {programs: "relay", low: "1s", high: "5m"},
	"BACKSTEP_RELAY_PARK_AFTER":      {programs: "relay", low: "1s", high: "720h"},
	"BACKSTEP_RELAY_WINDOW":          {programs: "relay", fine: []string{"1", "10"}, low: "1", high: "10000"},
	"BACKSTEP_RESCUE_AFTER":          {programs: "worker", low: "1s", high: "24h"},
	"BACKSTEP_SAGA_RETENTION":        {programs: "relay", low: "1h", high: "87600h"},
}

// callOf is how to start a program that reads all its variables.
func callOf(program string) string {
	if program == "backstep" {
		return "backstep verify"
	}
	return program
}

// goWords are of the language and the libraries it is written in; operators know neither.
var goWords = regexp.MustCompile(`strconv|Parse|slog|envconfig|[Uu]nmarshal|\btime:|\bint(64)?\b|Duration|syntax|panic|goroutine|%!`)

// TestValuesOutOfRange gives all variables the same value, so that one message has all faults.
func TestValuesOutOfRange(t *testing.T) {
	for _, name := range app.Variables {
		if _, ok := variables[name]; !ok {
			t.Errorf("%s has no row in the table of this test", name)
		}
	}
	for _, program := range []string{"worker", "relay", "backstep"} {
		for _, value := range []string{
			"-1", "0", "1", "2147483648", "1e9", "10", "30d", "5 s", "999999999h", "99999999999999999999h", "9223372036854775808",
			"-5m", "1.5", "0x10", "010", "1_000", "+1", "NaN", "five", "0s", "1ns", "%s", strings.Repeat("9", 10_000),
		} {
			t.Run(fmt.Sprintf("%s/%.20s", program, value), func(t *testing.T) {
				var env []string
				for name := range variables {
					env = append(env, name+"="+value)
				}
				a := newOperator(t, env...).callLine(callOf(program)).want(exitUsage)
				for name, v := range variables {
					if !strings.Contains(v.programs, program) || slices.Contains(v.fine, value) {
						if strings.Contains(a.stderr, "\n  "+name) {
							t.Errorf("it complains about %s:\n%s", name, a.stderr)
						}
						continue
					}
					if v.low != "" {
						v.says = fmt.Sprintf(" from %s to %s, such as ", v.low, v.high)
					}
					fault := regexp.MustCompile(`(?m)^  `+name+`\b.*$`).FindAllString(a.stderr, -1)
					if len(fault) != 1 || !strings.Contains(fault[0], v.says) {
						t.Errorf("of %s it says %q, want %q", name, fault, v.says)
					}
				}
				if w := goWords.FindString(a.stderr); w != "" || len(a.stderr) > 3000 {
					t.Errorf("%q is no word for an operator, or it says too much:\n%.3000s", w, a.stderr)
				}
			})
		}
	}
}

// TestBounds: what the message and the help call the range is the range. The DSN is faulty,
// so that nothing starts.
func TestBounds(t *testing.T) {
	for _, program := range []string{"worker", "relay", "backstep"} {
		for _, at := range []string{"lowest", "highest", "below", "above"} {
			t.Run(program+" "+at, func(t *testing.T) {
				env := []string{"BACKSTEP_MYSQL_DSN=", "BACKSTEP_AMQP_URL=amqp://127.0.0.1:1"}
				var bounded []string
				for name, v := range variables {
					if v.low == "" {
						continue
					}
					if strings.Contains(v.programs, program) {
						bounded = append(bounded, name)
					}
					env = append(env, name+"="+map[string]string{"lowest": v.low, "highest": v.high, "below": beyond(t, v.low, -1), "above": beyond(t, v.high, 1)}[at])
				}
				a := newOperator(t, env...).callLine(callOf(program)).want(exitUsage, "BACKSTEP_MYSQL_DSN is empty")
				for _, name := range bounded {
					if refused := strings.Contains(a.stderr, "\n  "+name+" is "); refused != (at == "below" || at == "above") {
						t.Errorf("%s: refused %t:\n%s", name, refused, a.stderr)
					}
				}
			})
		}
	}
}

// TestPrefetch: B53: it is finite, and no smaller than a batch.
func TestPrefetch(t *testing.T) {
	s := newServer(t)
	env := []string{"BACKSTEP_MYSQL_DSN=app@tcp(" + s.l.Addr().String() + ")/d", "BACKSTEP_AMQP_URL=amqp://" + s.l.Addr().String()}
	for set, says := range map[string]string{
		"BACKSTEP_PREFETCH=0":                     "BACKSTEP_PREFETCH is \"0\"; it must be a whole number from 1 to 1000, such as 256",
		"BACKSTEP_PREFETCH=127":                   "BACKSTEP_PREFETCH is 127, less than BACKSTEP_BATCH, 128",
		"BACKSTEP_PREFETCH=9 BACKSTEP_BATCH=10":   "BACKSTEP_PREFETCH is 9, less than BACKSTEP_BATCH, 10",
		"BACKSTEP_PREFETCH=1001 BACKSTEP_BATCH=1": "BACKSTEP_PREFETCH is \"1001\"",
	} {
		a := newOperator(t, append(strings.Fields(set), env...)...).callLine("worker").want(exitUsage, says)
		if n := strings.Count(a.stderr, "\n  BACKSTEP_"); n != 1 {
			t.Errorf("%s: it says %s", set, a.stderr)
		}
	}
	s.untouched()
}

// beyond is the number, or the time in nanoseconds, next to a bound.
func beyond(t *testing.T, bound string, by int64) string {
	t.Helper()
	if n, err := strconv.ParseInt(bound, 10, 64); err == nil {
		return strconv.FormatInt(n+by, 10)
	}
	d, err := time.ParseDuration(bound)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%dns", d.Nanoseconds()+by)
}

func TestMisspeltVariables(t *testing.T) {
	s := newServer(t)
	for _, p := range programs {
		a := newOperator(t, "BACKSTEP_MYSQL_DSN=app@tcp("+s.l.Addr().String()+")/d", "BACKSTEP_AMQP_URL=amqp://"+s.l.Addr().String(),
			"BACKSTEP_LAENS=4", "BACKSTEP_RELAY_LEASE_TLL=9s", "BACKSTEP_RELAY_LEASE-TTL=9s", "backstep_batch=1", "Backstep_Max_Body=1", "BACKSTEP_CONCURRENCY=5",
			"BACKSTEP_LANES_FILE=/x", "NOT_BACKSTEP_LANES=1").callLine(p.call)
		a.want(exitUsage,
			"BACKSTEP_LAENS is not a variable of Backstep; did you mean BACKSTEP_LANES?",
			"BACKSTEP_RELAY_LEASE_TLL is not a variable of Backstep; did you mean BACKSTEP_RELAY_LEASE_TTL?",
			"BACKSTEP_RELAY_LEASE-TTL is not a variable of Backstep; did you mean BACKSTEP_RELAY_LEASE_TTL?",
			"backstep_batch is not a variable of Backstep; did you mean BACKSTEP_BATCH?",
			"Backstep_Max_Body is not a variable of Backstep; did you mean BACKSTEP_MAX_BODY?",
			"BACKSTEP_CONCURRENCY is not a variable of Backstep\n",
			"BACKSTEP_LANES_FILE is not a variable of Backstep; set BACKSTEP_LANES itself",
		)
		if n := strings.Count(a.stderr, "is not a variable"); n != 7 {
			t.Errorf("%s names %d variables, want 7:\n%s", p.call, n, a.stderr)
		}
	}
	s.untouched()
}

// TestHelp: it was asked for, so it goes to standard output, and has all a program reads.
func TestHelp(t *testing.T) {
	for _, program := range []string{"worker", "relay", "backstep"} {
		for _, flag := range []string{"--help", "-h"} {
			a := newOperator(t, "BACKSTEP_LANES=nonsense").call("", program, flag).want(exitOK)
			if a.stderr != "" {
				t.Errorf("%s --help says on standard error: %s", program, a.stderr)
			}
			lines := strings.Split(a.stdout, "\n")
			for i, line := range lines {
				if n := utf8.RuneCountInString(line); n > 100 {
					t.Errorf("%s --help has a line of %d columns: %s", program, n, line)
				}
				if i > 0 && line != "" && slices.Contains(lines[:i], line) && !strings.HasPrefix(line, "        ") {
					t.Errorf("%s --help says twice: %s", program, line)
				}
			}
			for name, v := range variables {
				if has := strings.Contains(a.stdout, "\n"+name+" "); has != strings.Contains(v.programs, program) {
					t.Errorf("%s --help has %s: %t", program, name, has)
				}
				if v.low != "" && strings.Contains(v.programs, program) && !strings.Contains(a.stdout, "must be "+v.low+" to "+v.high+"\n") {
					t.Errorf("%s --help does not tell the range of %s:\n%s", program, name, a.stdout)
				}
			}
		}
	}
	o := newOperator(t)
	for _, program := range []string{"worker", "relay"} {
		o.call("", program, "--version").want(exitOK)
		o.call("", program, "--bogus").want(exitUsage, program+" --help")
		o.call("", program, "orders").want(exitUsage, `"orders"`)
	}
}
