package app_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"backstep/internal/app"
)

type config struct {
	app.Servers
	app.Service
	Lanes int `default:"1" range:"1 to 64"`
	Relay struct {
		LeaseTTL time.Duration `split_words:"true" default:"5s" range:"1s to 1m"`
		Window   int           `default:"1000" range:"1 to 1000"`
	}
}

func (c *config) Validate() error { return errors.Join(c.Servers.Validate(), c.Service.Validate()) }

func environment(t *testing.T, pairs ...string) {
	t.Helper()
	for _, kv := range os.Environ() { // whatever the machine has set
		if name, _, _ := strings.Cut(kv, "="); strings.HasPrefix(name, app.Prefix+"_") {
			t.Setenv(name, "") // restored after the test
			if err := os.Unsetenv(name); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, p := range pairs {
		name, value, _ := strings.Cut(p, "=")
		t.Setenv(name, value)
	}
}

const dsn, url = "BACKSTEP_MYSQL_DSN=u:p@tcp(h:1)/d", "BACKSTEP_AMQP_URL=amqp://h"

func TestLoad(t *testing.T) {
	environment(t, dsn, url, "BACKSTEP_LANES=3", "BACKSTEP_RELAY_LEASE_TTL=7s", "BACKSTEP_LOG_LEVEL=warn", "BACKSTEP_QUEUES=a")
	var c config
	if err := app.Load(&c); err != nil {
		t.Fatal(err)
	}
	if c.MySQL.DSN != "u:p@tcp(h:1)/d" || c.Lanes != 3 || c.Relay.LeaseTTL != 7*time.Second || c.Relay.Window != 1000 || c.LogLevel.String() != "WARN" {
		t.Errorf("loaded %+v", c)
	}
}

func TestLoadReportsAllFaultsAtOnce(t *testing.T) {
	absent := filepath.Join(t.TempDir(), "absent")
	environment(t, "BACKSTEP_LANES=many", "BACKSTEP_RELAY_WINDOW=1001", "BACKSTEP_RELAY_LEASETTL=5s", "BACKSTEP_RELAY_LEASE_TTL=10",
		"BACKSTEP_AMQP_URL_FILE="+absent, "BACKSTEP_LOG_LEVEL=loud", "BACKSTEP_ADMIN_ADDR=8081", "BACKSTEP_ALLOW_UNTESTED_SERVER=maybe")
	var c config
	err := app.Load(&c)
	if err == nil {
		t.Fatal("no error")
	}
	want := `configuration:
  BACKSTEP_MYSQL_DSN is not set; it looks like user:pass@tcp(host:3306)/database
  BACKSTEP_AMQP_URL_FILE: open ` + absent + `: no such file or directory
  BACKSTEP_ALLOW_UNTESTED_SERVER is "maybe"; it must be true or false
  BACKSTEP_LOG_LEVEL is "loud"; it must be debug, info, warn or error
  BACKSTEP_LANES is "many"; it must be a whole number from 1 to 64, such as 1
  BACKSTEP_RELAY_LEASE_TTL is "10"; it must be a time from 1s to 1m, such as 5s (units: h, m, s, ms)
  BACKSTEP_RELAY_WINDOW is "1001"; it must be a whole number from 1 to 1000, such as 1000
  BACKSTEP_ADMIN_ADDR is "8081"; it must be host:port with a port from 0 to 65535, such as 127.0.0.1:8081
  BACKSTEP_RELAY_LEASETTL is not a variable of Backstep; did you mean BACKSTEP_RELAY_LEASE_TTL?
--help lists the variables`
	if diff := cmp.Diff(want, err.Error()); diff != "" {
		t.Errorf("faults (-want +got):\n%s", diff)
	}
}

// What cannot be meant, as the value of any variable and as the content of any secret's file.
var oddities = []struct {
	name, value string
	file        bool // it is refused in a file too
	says        string
}{
	{"empty", "", true, "is empty"},
	{"blanks", " \t ", true, "is blank"},
	{"quotes only", `""`, true, "is in quotes"},
	{"single quotes only", `''`, true, "is in quotes"},
	{"in quotes", `"%s"`, true, "is in quotes"},
	{"trailing newline", "%s\n", false, "line break"},
	{"trailing newline, as Windows has it", "%s\r\n", false, "line break"},
	{"line break within", "%s\n%[1]s", true, "line break"},
	{"trailing blank", "%s ", true, "starts or ends with a blank"},
	{"leading byte order mark", "\ufeff%s", true, "byte order mark"},
	{"only a byte order mark", "\ufeff", true, "byte order mark"},
}

func TestLoadRefusesWhatCannotBeMeant(t *testing.T) {
	fine := map[string]string{
		"BACKSTEP_MYSQL_DSN": "u:s3cret@tcp(h:1)/d", "BACKSTEP_AMQP_URL": "amqp://u:s3cret@h", "BACKSTEP_ADMIN_ADDR": "127.0.0.1:1",
		"BACKSTEP_LANES": "1", "BACKSTEP_RELAY_LEASE_TTL": "5s", "BACKSTEP_RELAY_WINDOW": "1", "BACKSTEP_LOG_LEVEL": "info",
		"BACKSTEP_ALLOW_UNTESTED_SERVER": "true",
	}
	for _, tt := range oddities {
		t.Run(tt.name, func(t *testing.T) {
			var env []string
			for _, name := range app.Names(&config{}) {
				value, ok := fine[name]
				if !ok {
					t.Fatalf("what is a value of %s?", name)
				}
				env = append(env, name+"="+fill(tt.value, value))
			}
			environment(t, env...)
			err := app.Load(&config{})
			if err == nil || strings.Count(err.Error(), tt.says) != len(env) || strings.Contains(err.Error(), "s3cret") {
				t.Errorf("error %v; it should say %d times %q and no password", err, len(env), tt.says)
			}
		})
		t.Run(tt.name+" in files", func(t *testing.T) {
			var env []string
			for _, name := range []string{"BACKSTEP_MYSQL_DSN", "BACKSTEP_AMQP_URL"} {
				file := filepath.Join(t.TempDir(), "secret")
				if err := os.WriteFile(file, []byte(fill(tt.value, fine[name])), 0o600); err != nil {
					t.Fatal(err)
				}
				env = append(env, name+"_FILE="+file)
			}
			environment(t, env...)
			var c config
			err := app.Load(&c)
			if left := os.Getenv("BACKSTEP_MYSQL_DSN"); left != "" {
				t.Errorf("the secret stays in the environment: %s", left)
			}
			if !tt.file {
				if err != nil || c.MySQL.DSN != fine["BACKSTEP_MYSQL_DSN"] || c.AMQP.URL != fine["BACKSTEP_AMQP_URL"] {
					t.Errorf("loaded %+v, %v; a line break at the end of a file is usual", c, err)
				}
				return
			}
			for _, want := range []string{"BACKSTEP_MYSQL_DSN_FILE: what is in /", "BACKSTEP_AMQP_URL_FILE: what is in /", tt.says} {
				if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "s3cret") || strings.Count(err.Error(), "\n") != 3 {
					t.Errorf("error %v; it should say %q, no password, and no more than the two faults", err, want)
				}
			}
		})
	}
}

func fill(value, fine string) string {
	if strings.Contains(value, "%") {
		return fmt.Sprintf(value, fine)
	}
	return value
}

func TestLoadSecretFiles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "dsn")
	if err := os.WriteFile(file, []byte("u:p@tcp(h:1)/d\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, env, says string }{
		{"both set", dsn + ",BACKSTEP_MYSQL_DSN_FILE=" + file, "BACKSTEP_MYSQL_DSN and BACKSTEP_MYSQL_DSN_FILE are both set; unset one"},
		{"no path", "BACKSTEP_MYSQL_DSN_FILE=", "BACKSTEP_MYSQL_DSN_FILE is empty"},
		{"a folder", "BACKSTEP_MYSQL_DSN_FILE=/", "BACKSTEP_MYSQL_DSN_FILE: read /: is a directory"},
		{"no secret", dsn + ",BACKSTEP_LANES_FILE=" + file, "BACKSTEP_LANES_FILE is not a variable of Backstep; set BACKSTEP_LANES itself"},
		// A worker does not use it, so it does not read it.
		{"another binary's", dsn + ",BACKSTEP_AMQP_MANAGEMENT_URL_FILE=/absent", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			environment(t, append(strings.Split(tt.env, ","), url)...)
			err := app.Load(&config{})
			if tt.says == "" && err != nil || tt.says != "" && (err == nil || !strings.Contains(err.Error(), tt.says) || strings.Count(err.Error(), "\n") != 2) {
				t.Errorf("error %v, want only %q", err, tt.says)
			}
		})
	}
}

func TestLoadNeeds(t *testing.T) {
	environment(t, dsn, url)
	err := app.Load(&config{}, "BACKSTEP_RELAY_WINDOW")
	if err == nil || !strings.Contains(err.Error(), "BACKSTEP_RELAY_WINDOW is not set") {
		t.Errorf("error %v", err)
	}
}

func TestLoadRefusesUnknownNames(t *testing.T) {
	tests := []struct{ name, meant string }{
		{"BACKSTEP_MYSQL_DNS", "BACKSTEP_MYSQL_DSN"},
		{"BACKSTEP_LAENS", "BACKSTEP_LANES"},
		{"BACKSTEP_RELAY_LEASE_TLL", "BACKSTEP_RELAY_LEASE_TTL"},
		{"BACKSTEP_RELAY_LEASETTL", "BACKSTEP_RELAY_LEASE_TTL"},
		{"BACKSTEP_RELAY_LEASE-TTL", "BACKSTEP_RELAY_LEASE_TTL"},
		{"BACKSTEP-LANES", "BACKSTEP_LANES"},
		{"BACKSTEP.LANES", "BACKSTEP_LANES"},
		{"backstep_lanes", "BACKSTEP_LANES"},
		{"Backstep_Lanes", "BACKSTEP_LANES"},
		{"backstep_mysql_dsn_file", "BACKSTEP_MYSQL_DSN_FILE"},
		{"BACKSTEP_MYSQL_DSN_FIEL", "BACKSTEP_MYSQL_DSN_FILE"},
		{"BACKSTEP_DSN", "BACKSTEP_MYSQL_DSN"},
		{"BACKSTEP_LEASE_TTL", "BACKSTEP_RELAY_LEASE_TTL"},
		{"BACKSTEP_WORKER_BATCH", "BACKSTEP_BATCH"},
		{"BACKSTEP_", ""},
		{"BACKSTEP_VERBOSITY", ""},
		{"BACKSTEP_WORKER_PORT", ""}, // no Service of Kubernetes is there
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			environment(t, dsn, url, tt.name+"=1")
			err := app.Load(&config{})
			want := tt.name + " is not a variable of Backstep"
			if tt.meant != "" {
				want += "; did you mean " + tt.meant + "?"
			}
			if err == nil || err.Error() != "configuration:\n  "+want+"\n--help lists the variables" {
				t.Errorf("error %v, want %q", err, want)
			}
		})
	}
}

// Kubernetes gives each pod variables for each Service of its namespace.
func TestLoadIgnoresServiceLinks(t *testing.T) {
	links := []string{"SERVICE_HOST=10.0.0.1", "SERVICE_PORT=80", "SERVICE_PORT_HTTP=80", "PORT=tcp://10.0.0.1:80",
		"PORT_80_TCP=tcp://10.0.0.1:80", "PORT_80_TCP_PROTO=tcp", "PORT_80_TCP_PORT=80", "PORT_80_TCP_ADDR=10.0.0.1"}
	env := []string{dsn, url}
	for _, l := range links {
		env = append(env, "BACKSTEP_WORKER_"+l, "BACKSTEP_"+l)
	}
	environment(t, env...)
	if err := app.Load(&config{}); err != nil {
		t.Error(err)
	}
}

// The bare name, without the prefix, is somebody else's.
func TestLoadIgnoresBareNames(t *testing.T) {
	environment(t, dsn, url, "LANES=9", "MYSQL_DSN=x")
	var c config
	if err := app.Load(&c); err != nil || c.Lanes != 1 || c.MySQL.DSN != "u:p@tcp(h:1)/d" {
		t.Errorf("lanes %d, DSN %q, error %v", c.Lanes, c.MySQL.DSN, err)
	}
}

func TestNamesAreKnown(t *testing.T) {
	for _, name := range app.Names(&config{}) {
		if !slices.Contains(app.Variables, name) {
			t.Errorf("%s is missing from app.Variables", name)
		}
	}
}

func TestHelp(t *testing.T) {
	help := app.Help(&config{})
	for _, want := range []string{
		"BACKSTEP_MYSQL_DSN", "(required)", "user:pass@tcp(host:3306)/database", "must be 1 to 64", "must be 1s to 1m", "must be true or false", "_FILE",
	} {
		if !strings.Contains(help, want) {
			t.Errorf("help does not say %q:\n%s", want, help)
		}
	}
	for line := range strings.Lines(help) {
		if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > 80 {
			t.Errorf("a line of %d columns: %s", n, line)
		}
	}
}

// A number without a range, or with a default outside, must not come into the world.
func TestTagsAreChecked(t *testing.T) {
	environment(t)
	for name, cfg := range map[string]any{
		"number without range": &struct{ N int }{},
		"time without range":   &struct{ D time.Duration }{},
		"range that is none": &struct {
			N int `range:"few"`
		}{},
		"range upside down": &struct {
			N int `range:"2 to 1"`
		}{},
		"kind without range": &struct {
			N int64 `range:"1 to 2"`
		}{},
		"default not in range": &struct {
			N int `range:"1 to 2" default:"3"`
		}{},
		"default that is none": &struct {
			N int `range:"1 to 2" default:"x"`
		}{},
		"name without prefix": &struct {
			N string `envconfig:"LANES"`
		}{},
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("Load took it")
				}
			}()
			_ = app.Load(cfg) // panics
		})
	}
}

func FuzzLoad(f *testing.F) {
	for _, v := range []string{"", "1", "-1", "1e9", "5s", "30d", "\ufeff1", `"1"`, "0x10", "010", "true", "warn", "u:s3cret@tcp(h:1)/d?strict=true", "amqp://u:s3cret@h"} {
		f.Add(v)
	}
	f.Fuzz(func(t *testing.T, value string) {
		if strings.ContainsRune(value, 0) {
			t.Skip("no variable has a zero byte")
		}
		var env []string
		for _, name := range app.Names(&config{}) {
			env = append(env, name+"="+value)
		}
		environment(t, env...)
		var c config
		err := app.Load(&c)
		if err == nil {
			t.Errorf("one value for everything was taken: %q: %+v", value, c)
		}
		for _, name := range app.Names(&config{}) {
			if strings.Count(err.Error(), "\n  "+name) > 1 {
				t.Errorf("two faults of %s: %v", name, err)
			}
		}
		if c.Lanes < 0 || c.Lanes > 64 || c.Relay.Window > 1000 || c.Relay.LeaseTTL > time.Minute {
			t.Errorf("%q: %+v", value, c)
		}
	})
}
