package testenv

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// root is the folder of the Debian system whose programs we run; empty is this machine's own.
type root string

// enterScript runs a program of the system in folder $1 so that it sees of this machine only
// folder $2, under its own name. It expects a mount namespace of its own: the kernel undoes the
// mounts when the last process in it has ended, however it ended. The system itself can only be
// read, so that any number of servers may use it, none of which changes it.
const enterScript = `
set -e
root=$1 data=$2 new=$1/mnt
shift 2
mount -t tmpfs -o mode=755 tmpfs "$new"
for dir in usr etc; do
	mkdir "$new/$dir"
	mount --bind -o ro "$root/$dir" "$new/$dir"
done
cp -P "$root"/bin "$root"/sbin "$root"/lib* "$new" # links into usr
mkdir -p "$new/proc" "$new/dev" "$new/tmp" "$new$data"
mount --rbind /proc "$new/proc"
mount --rbind /dev "$new/dev"
mount --bind "$data" "$new$data"
exec chroot "$new" /usr/bin/env -C "$data" -- "$@"`

// command returns a command that runs a program in folder dir, which has all its files. Its
// process becomes the program's: a signal to it is one to the program.
func (r root) command(ctx context.Context, dir, program string, args ...string) *exec.Cmd {
	if r != "" {
		program = strings.TrimPrefix(program, string(r))
		args = append([]string{"--mount", "/bin/sh", "-c", enterScript, "enter", string(r), dir, program}, args...)
		program = "unshare"
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	return cmd
}

// searchPath lists the folders in which to look for programs.
func (r root) searchPath() searchPath {
	in := func(dir string) string { return filepath.Join("/", string(r), dir) }
	// The script that Debian's rabbitmq-server wraps must be found before the wrapper.
	path, _ := filepath.Glob(in("usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin")) // the pattern is well-formed
	if r == "" {
		path = append(path, filepath.SplitList(os.Getenv("PATH"))...)
	}
	erlang, _ := filepath.Glob(in("usr/lib/erlang/erts-*/bin"))
	return append(append(path, in("usr/local/sbin"), in("usr/sbin"), in("usr/bin")), erlang...)
}
