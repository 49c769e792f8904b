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
	"syscall"
	"time"
)

// debianSuite never ends, and always has a current MySQL and RabbitMQ.
const debianSuite = "sid"

var debianPackages = []string{"mysql-server-core", "rabbitmq-server"}

// debianScript puts suite $1 with packages $2 into folder $3, which it may leave half done. It
// expects a mount namespace of its own: debootstrap mounts, and nobody unmounts if it is killed.
// What the packages were made of is not needed again.
const debianScript = `
set -e
chmod 755 "$3" # it becomes somebody's /
debootstrap --variant=minbase --include="$2" --force-check-gpg "$1" "$3"
rm -rf "$3/var/cache/apt/archives" "$3/var/lib/apt/lists"
echo 127.0.0.1 localhost >"$3/etc/hosts"
dpkg-query --admindir="$3/var/lib/dpkg" -W -f '${Package} ${Version}\n' $(echo "$2" | tr , ' ') >"$3/packages"`

// debian is a folder with a Debian system, which is made when it is used first and stays.
type debian struct {
	dir string // its parent is ours alone
	log *slog.Logger
}

// currentStack returns the folder that all tests of this user share. It is a cache: whoever
// removes it gets a newer one.
func currentStack(log *slog.Logger) (debian, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return debian{}, fmt.Errorf("find a folder for Debian's servers: %w", err)
	}
	return debian{filepath.Join(cache, "backstep", "debian-"+debianSuite), log}, nil
}

// root returns the folder, whole. Of several processes that need it at once, one makes it.
func (d debian) root(ctx context.Context) (root, error) {
	if err := d.mayEnter(ctx); err != nil {
		return "", fmt.Errorf(`run programs of Debian's %s suite in %s: %w
It takes root, on Debian or a system like it, and the right to mount (in a container: --privileged). Else unset %s,
to run those of this machine`, debianSuite, d.dir, err, stackVariable)
	}
	if err := os.MkdirAll(filepath.Dir(d.dir), 0o700); err != nil {
		return "", fmt.Errorf("make a folder for Debian's servers: %w", err)
	}
	lock, err := d.lock(ctx)
	if err != nil {
		return "", err
	}
	defer func() { _ = lock.Close() }() // which unlocks
	if _, err := os.Stat(d.dir); errors.Is(err, os.ErrNotExist) {
		if err := d.make(ctx); err != nil {
			return "", fmt.Errorf("put Debian's %s suite into %s: %w", debianSuite, d.dir, err)
		}
	} else if err != nil {
		return "", err
	}
	packages, err := os.ReadFile(filepath.Join(d.dir, "packages"))
	if err != nil {
		return "", err
	}
	d.log.Info("programs are those of Debian", "suite", debianSuite, "dir", d.dir,
		"packages", strings.Join(strings.Split(strings.TrimSpace(string(packages)), "\n"), ", "))
	return root(d.dir), nil
}

// mayEnter says why nothing can be run in a folder, if so.
func (d debian) mayEnter(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return errors.New("we are not root")
	}
	if out, err := exec.CommandContext(ctx, "unshare", "--mount", "true").CombinedOutput(); err != nil {
		return fmt.Errorf("make a mount namespace: %w: %s", err, lastLine(out))
	}
	return nil
}

// lock waits until no other process makes the folder.
func (d debian) lock(ctx context.Context) (*os.File, error) {
	f, err := os.OpenFile(d.dir+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for said := false; ; said = true {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !said {
			d.log.Info("another process makes the folder with Debian's servers", "dir", d.dir)
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("wait for %s: %w", d.dir, ctx.Err()), f.Close())
		}
	}
}

// make makes the folder under another name and renames it when it is whole. A guard ends and
// removes it all if we do not live to see that.
func (d debian) make(ctx context.Context) (err error) {
	began := time.Now()
	if err := d.installDebootstrap(ctx); err != nil {
		return err
	}
	left, _ := filepath.Glob(d.dir + ".new-*") // where the guard was killed as well
	for _, dir := range left {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	dir, err := os.MkdirTemp(filepath.Dir(d.dir), filepath.Base(d.dir)+".new-")
	if err != nil {
		return err
	}
	g, err := newGuard(dir)
	if err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	defer func() { err = errors.Join(err, g.release()) }()
	d.log.Info("putting Debian's servers into a folder, once; it takes a minute or two", "suite", debianSuite, "dir", d.dir)
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "/bin/sh", "-c", debianScript, "debian",
		debianSuite, strings.Join(debianPackages, ","), dir)
	cmd.WaitDelay = time.Second // its children may keep the pipe open; the guard ends them
	g.adopt(cmd)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("run debootstrap: %w\n%s", err, out[max(0, len(out)-2000):])
	}
	if err := os.Rename(dir, d.dir); err != nil {
		return err
	}
	d.log.Info("Debian's servers are in their folder", "took", time.Since(began).Round(time.Second).String())
	return nil
}

// installDebootstrap installs what debianScript needs and is not there.
func (d debian) installDebootstrap(ctx context.Context) error {
	const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
	path := newSearchPath("")
	_, err := path.find("debootstrap")
	if _, e := os.Stat(keyring); err == nil && e == nil {
		return nil
	}
	return install(ctx, path, d.log, "debootstrap", "debian-archive-keyring")
}
