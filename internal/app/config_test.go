package app_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"backstep/internal/app"
)

type config struct {
	app.Servers
	app.Service
	Lanes int `default:"1"`
	Relay struct {
		LeaseTTL time.Duration `split_words:"true" default:"5s"`
		Window   int           `default:"1000"`
	}
}

func (c *config) Validate() error {
	return errors.Join(c.Servers.Validate(), app.InRange("LANES", c.Lanes, 1, 64))
}

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
	secret := filepath.Join(t.TempDir(), "absent")
	environment(t, "BACKSTEP_LANES=many", "BACKSTEP_RELAY_WINDOW=1e3", "BACKSTEP_RELAY_LEASETTL=5s",
		"BACKSTEP_AMQP_URL_FILE="+secret, "BACKSTEP_LOG_LEVEL=loud")
	var c config
	err := app.Load(&c)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		`BACKSTEP_LANES is "many"`, `BACKSTEP_RELAY_WINDOW is "1e3"`, "BACKSTEP_RELAY_LEASETTL is not a variable of Backstep",
		"BACKSTEP_AMQP_URL_FILE: ", "BACKSTEP_AMQP_URL missing value", "BACKSTEP_MYSQL_DSN missing value",
		`BACKSTEP_LOG_LEVEL is "loud"`, "--help",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %s:\n%v", want, err)
		}
	}
}

func TestLoadChecksRangesAndEmptyValues(t *testing.T) {
	environment(t, "BACKSTEP_MYSQL_DSN=", url, "BACKSTEP_LANES=65")
	var c config
	err := app.Load(&c)
	if err == nil || !strings.Contains(err.Error(), "BACKSTEP_MYSQL_DSN is empty") || !strings.Contains(err.Error(), "BACKSTEP_LANES is 65; it may be 1 to 64") {
		t.Errorf("error %v", err)
	}
}

func TestLoadSecretFromFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "dsn")
	if err := os.WriteFile(file, []byte("u:p@tcp(h:1)/d\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	environment(t, url, "BACKSTEP_MYSQL_DSN_FILE="+file)
	t.Cleanup(func() { _ = os.Unsetenv("BACKSTEP_MYSQL_DSN") })
	var c config
	if err := app.Load(&c); err != nil || c.MySQL.DSN != "u:p@tcp(h:1)/d" {
		t.Errorf("DSN %q, error %v", c.MySQL.DSN, err)
	}
	environment(t, url, dsn, "BACKSTEP_MYSQL_DSN_FILE="+file)
	if err := app.Load(&c); err == nil || !strings.Contains(err.Error(), "both set") {
		t.Errorf("both set: error %v", err)
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
