package testenv

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// fakeDebootstrap notes that it was called and makes as much of a Debian as is looked at. It does
// not end before the file "go" is there, and fails if there is a file "fail".
const fakeDebootstrap = `
cd "${0%/*}"
echo "$@" >>calls
for dir; do :; done
mkdir -p "$dir/etc" "$dir/var/lib/dpkg"
for package in mysql-server-core rabbitmq-server; do
	printf 'Package: %s\nStatus: install ok installed\nArchitecture: all\nVersion: 47.11\n\n' $package
done >"$dir/var/lib/dpkg/status"
while [ ! -e go ]; do sleep 0.02; done
cat fail 2>/dev/null && exit 1
exit 0`

// newDebian returns a folder that does not exist yet and the folder of a fake debootstrap.
func newDebian(t *testing.T) (d debian, fake string) {
	t.Helper()
	fake = t.TempDir()
	script(t, fake, "debootstrap", fakeDebootstrap)
	t.Setenv("PATH", fake+":"+os.Getenv("PATH"))
	return debian{filepath.Join(t.TempDir(), "cache", "debian"), slog.New(slog.DiscardHandler)}, fake
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// called waits until debootstrap was called.
func called(t *testing.T, fake string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), serveTimeout)
	defer cancel()
	err := wait(ctx, nil, func(context.Context) error {
		_, err := os.Stat(filepath.Join(fake, "calls"))
		return err
	})
	if err != nil {
		t.Fatalf("debootstrap was not called: %v", err)
	}
}

func TestDebianIsMadeOnceByMany(t *testing.T) {
	rootOnly(t)
	d, fake := newDebian(t)
	var wg sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		wg.Go(func() {
			r, err := d.root(t.Context())
			if err == nil && string(r) != d.dir {
				err = fmt.Errorf("the folder is %q", r)
			}
			errs[i] = err
		})
	}
	called(t, fake)
	if _, err := os.Stat(d.dir); err == nil {
		t.Errorf("%s is there before it is whole", d.dir)
	}
	write(t, fake, "go", "")
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	calls, _ := os.ReadFile(filepath.Join(fake, "calls")) // an empty one fails below
	if n := strings.Count(string(calls), "\n"); n != 1 {
		t.Errorf("debootstrap was called %d times, want once:\n%s", n, calls)
	}
	packages, err := os.ReadFile(filepath.Join(d.dir, "packages"))
	if want := "mysql-server-core 47.11\nrabbitmq-server 47.11\n"; err != nil || string(packages) != want {
		t.Errorf("packages are %q, %v, want %q", packages, err, want)
	}
	onlyLock(t, d, "debian")
}

func TestDebianThatCannotBeMadeLeavesNothingAndSaysWhy(t *testing.T) {
	rootOnly(t)
	d, fake := newDebian(t)
	write(t, fake, "go", "")
	write(t, fake, "fail", "no such suite\n")
	if _, err := d.root(t.Context()); err == nil || !strings.Contains(err.Error(), "no such suite") {
		t.Errorf("root gave %v, want debootstrap's reason", err)
	}
	onlyLock(t, d)
	if err := os.Remove(filepath.Join(fake, "fail")); err != nil {
		t.Fatal(err)
	}
	// As a maker leaves it that was killed together with its guard.
	if err := os.Mkdir(d.dir+".new-1", 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := d.root(t.Context()); err != nil {
		t.Errorf("once it can be made: %v", err)
	}
	onlyLock(t, d, "debian")
}

func TestDebianWhoseMakerIsKilledLeavesNothing(t *testing.T) {
	rootOnly(t)
	d, fake := newDebian(t)
	maker := exec.Command(os.Args[0])
	maker.Env = append(os.Environ(), "TESTENV_MAKE_DEBIAN_IN="+d.dir)
	if err := maker.Start(); err != nil {
		t.Fatal(err)
	}
	called(t, fake)
	if err := maker.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = maker.Wait() // killed
	ctx, cancel := context.WithTimeout(t.Context(), serveTimeout)
	defer cancel()
	err := wait(ctx, nil, func(context.Context) error {
		if left, _ := filepath.Glob(d.dir + ".new-*"); len(left) > 0 {
			return fmt.Errorf("%v is still there", left)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	onlyLock(t, d)
}

func TestDebianThatIsInterruptedLeavesNothing(t *testing.T) {
	rootOnly(t)
	d, fake := newDebian(t)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() {
		_, err := d.root(ctx)
		failed <- err
	}()
	called(t, fake)
	cancel()
	if err := <-failed; err == nil {
		t.Error("root gave no error")
	}
	onlyLock(t, d)
}

// rootOnly ends the test, after a look at what anybody else is told, if we are not root.
func rootOnly(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	_, err := debian{t.TempDir(), slog.New(slog.DiscardHandler)}.root(t.Context())
	if err == nil || !strings.Contains(err.Error(), "It takes root") {
		t.Errorf("root gave %v, want what it takes", err)
	}
	t.Skip("only root can run programs in a folder")
}

// onlyLock demands that besides its lock, d has left only this.
func onlyLock(t *testing.T, d debian, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(d.dir))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		if e.Name() != filepath.Base(d.dir)+".lock" {
			got = append(got, e.Name())
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("the cache has %v, want %v", got, want)
	}
}

func TestStackAndGivenServersExcludeEachOther(t *testing.T) {
	t.Setenv("TEST_STACK", Current)
	for _, o := range []Options{{MySQLDSN: "root@tcp(127.0.0.1:1)/"}, {AMQPURL: "amqp://127.0.0.1:1"}} {
		_, err := o.StackFromEnvironment()
		for _, hint := range []string{"TEST_STACK", "BACKSTEP_MYSQL_DSN", "TEST_AMQP_URL"} {
			if err == nil || !strings.Contains(err.Error(), hint) {
				t.Errorf("the error does not mention %s: %v", hint, err)
			}
		}
	}
	if o, err := (Options{}).StackFromEnvironment(); err != nil || o.Stack != Current {
		t.Errorf("without given servers: stack %q, %v", o.Stack, err)
	}
	if privateStack() != Current {
		t.Errorf("private servers are of stack %q", privateStack())
	}
}

func TestUnknownStack(t *testing.T) {
	_, err := Start(t.Context(), Options{Stack: "newest"})
	if err == nil || !strings.Contains(err.Error(), `"newest"`) || !strings.Contains(err.Error(), `"current"`) {
		t.Errorf("Start gave %v, want what it may be", err)
	}
}

// A program in the folder sees its own data, under the name they have here, and cannot change
// the folder; and nothing stays mounted.
func TestProgramInAFolder(t *testing.T) {
	rootOnly(t)
	r, dir := root(t.TempDir()), t.TempDir()
	write(t, dir, "data", "ours")
	if err := os.Mkdir(filepath.Join(string(r), "mnt"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(string(r), "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(string(r), "etc"), "whose", "theirs")
	for _, link := range []string{"usr", "bin", "sbin", "lib", "lib64"} { // this machine's own programs
		target, err := filepath.EvalSymlinks("/" + link)
		if err == nil {
			err = os.Symlink(target, filepath.Join(string(r), link))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	out, err := r.command(t.Context(), dir, filepath.Join(string(r), "bin/sh"), "-c",
		`cat data /etc/whose; echo; pwd; ls /etc; touch /etc/new || kill -9 $$`).CombinedOutput()
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("it ended with %v, want its own kill", err)
	}
	if want := "ourstheirs\n" + dir + "\nwhose\n"; !strings.HasPrefix(string(out), want) {
		t.Errorf("it said %q, want %q first", out, want)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(mounts), string(r)) {
		t.Errorf("mounts (%v) are\n%s\nwant none in %s", err, mounts, r)
	}
}
