package testenv

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"syscall"
)

// installScript installs the packages in $@ without letting them start their services,
// which would listen on the default ports. policy-rc.d (Debian Policy, 9.3.3) says so while
// it runs; the machine's own, if any, is put back however apt ends. The lock keeps a second
// run from saving our file as the machine's.
const installScript = `
exec 9>/run/lock/backstep-install && flock 9 || exit 1
policy=/usr/sbin/policy-rc.d
saved=$policy.before-backstep
restore() { rm -f $policy; [ ! -e $saved ] || mv $saved $policy; }
[ -e $saved ] || [ ! -e $policy ] || mv $policy $saved || exit 1
trap restore EXIT
trap 'exit 1' HUP INT TERM
printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy || exit 1
export DEBIAN_FRONTEND=noninteractive
apt-get update -q || exit 1
apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 "$@" || exit 1`

// install installs Debian packages, if we may and can. It does not end before apt does,
// even if ctx is done: an apt that is interrupted leaves packages half installed.
func install(ctx context.Context, path searchPath, log *slog.Logger, packages ...string) error {
	if _, err := path.find("apt-get"); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("only root may install packages")
	}
	log.Info("installing packages, their services will not be started", "packages", fmt.Sprint(packages))
	cmd := exec.Command("/bin/sh", append([]string{"-c", installScript, "install"}, packages...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // not to be interrupted by Ctrl-C either
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("install %v: %w: %s", packages, err, lastLine(out))
	}
	return ctx.Err()
}
