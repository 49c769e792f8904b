package testenv

import (
	"context"
	"database/sql"
	"os"
	"sync"
	"testing"
	"time"
)

// shared are the servers of this test binary, started by the first test that needs them.
// The tests of a package have nobody to pass them on but the package's variables.
var shared struct {
	mu      sync.Mutex // held while they start
	servers *Servers
	err     error
}

// Main is for TestMain: it runs the tests, stops the servers they used and exits. Servers
// are those in TEST_MYSQL_DSN, TEST_AMQP_URL and TEST_AMQP_MANAGEMENT_URL, else they are
// started, of the stack in TEST_STACK, when the first test asks for them.
func Main(m *testing.M) { os.Exit(M{m}.Run()) }

// M is Main for a package that looks for leaked goroutines: goleak.VerifyTestMain(testenv.M{M: m}).
type M struct{ *testing.M }

// Run runs the tests, stops the servers they used and returns the exit code.
func (m M) Run() int {
	code := m.M.Run()
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.servers == nil {
		return code
	}
	if err := shared.servers.Stop(); err != nil {
		_, _ = os.Stderr.WriteString("testenv: " + err.Error() + "\n")
		return 1
	}
	return code
}

// Shared returns the servers that all tests of the package share.
func Shared(t testing.TB) *Servers {
	t.Helper()
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.servers == nil && shared.err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		o, err := Given()
		if err != nil {
			shared.err = err
		} else {
			shared.servers, shared.err = Start(ctx, o)
		}
	}
	if shared.err != nil {
		t.Fatalf("testenv: %v", shared.err)
	}
	return shared.servers
}

// startTimeout leaves time to install packages or pull images.
const startTimeout = 10 * time.Minute

// Given returns the options that the TEST_ variables of the environment name.
func Given() (Options, error) {
	return Options{
		Dir:           inMemory(),
		MySQLDSN:      os.Getenv("TEST_MYSQL_DSN"),
		AMQPURL:       os.Getenv("TEST_AMQP_URL"),
		ManagementURL: os.Getenv("TEST_AMQP_MANAGEMENT_URL"),
	}.StackFromEnvironment()
}

// Private starts servers that the test has for itself, so that it may stop and kill them,
// and stops them when it ends.
func Private(t testing.TB) *Servers {
	t.Helper()
	return start(t, Options{Dir: inMemory(), Stack: privateStack()})
}

// PrivateDatabase is Private for a test that has only the database for itself, and shares
// the broker.
func PrivateDatabase(t testing.TB) *Servers {
	t.Helper()
	s := Shared(t)
	return start(t, Options{Dir: inMemory(), AMQPURL: s.AMQPURL(""), ManagementURL: s.ManagementURL(), Stack: privateStack()})
}

// ClockedDatabase is PrivateDatabase with a database whose clock ShiftDatabaseClock shifts.
func ClockedDatabase(t testing.TB) *Servers {
	t.Helper()
	s := Shared(t)
	return start(t, Options{
		Dir: inMemory(), AMQPURL: s.AMQPURL(""), ManagementURL: s.ManagementURL(), Stack: privateStack(), ShiftableClock: true,
	})
}

func start(t testing.TB, o Options) *Servers {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	s, err := Start(ctx, o)
	if err != nil {
		t.Fatalf("testenv: %v", err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Errorf("testenv: %v", err)
		}
	})
	return s
}

// Database creates an empty database on the shared server and returns its DSN. It is
// dropped when the test ends.
func Database(t testing.TB) string {
	t.Helper()
	return Shared(t).Database(t)
}

// Database creates an empty database and returns its DSN. It is dropped when the test ends.
func (s *Servers) Database(t testing.TB) string {
	t.Helper()
	name := "test_" + randomName()
	if err := s.exec(t.Context(), "CREATE DATABASE "+name+" CHARACTER SET utf8mb4"); err != nil {
		t.Fatalf("testenv: create a database: %v", err)
	}
	t.Cleanup(func() {
		if err := s.exec(context.Background(), "DROP DATABASE "+name); err != nil && s.lasting() {
			t.Errorf("testenv: drop database %s: %v", name, err)
		}
	})
	return s.DSN(name)
}

// lasting reports whether what a test leaves behind stays. On servers of ours it goes with
// them, and they may be down already.
func (s *Servers) lasting() bool { return s.guard == nil }

func (s *Servers) exec(ctx context.Context, query string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	db, err := sql.Open("mysql", s.DSN(""))
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	_, err = db.ExecContext(ctx, query)
	return err
}
