package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

// guardScript waits until the pipe on its standard input has no writer left. Then it kills
// process group $1, runs the command in $3 and after, if any, in folder $2, and removes that. The
// killed may still be closing files while rm runs, so rm gets a few tries.
const guardScript = `
cat >/dev/null
group=$1 dir=$2
shift 2
kill -s KILL -- "-$group" 2>/dev/null
[ $# -eq 0 ] || "$@" >/dev/null 2>&1
for try in 1 2 3 4 5 6 7 8 9 10; do
	rm -rf -- "$dir" 2>/dev/null && exit 0
	sleep 0.2
done
exit 1`

// guard ends what was started in its process group, and removes the data folder, when its
// owner lets go of it, in whichever way: release, a return from main, a panic, or kill -9.
// The owner holds the write end of a pipe, and the kernel closes that. (Pdeathsig would not
// do: it fires when the thread that forked ends, and Go ends threads at will.)
type guard struct {
	group   int       // process group of the servers
	hold    *os.File  // the write end
	leader  *exec.Cmd // cat on the pipe: its pid names the group
	watcher *exec.Cmd // sh with guardScript, in a group of its own
}

// newGuard starts a guard for dir. cleanup is one more command to run at the end, if not empty.
func newGuard(dir string, cleanup ...string) (*guard, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make the guard's pipe: %w", err)
	}
	defer func() { _ = r.Close() }() // the children have their own copies

	leader := exec.Command("cat")
	leader.Stdin = r
	leader.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := leader.Start(); err != nil {
		_ = w.Close()
		return nil, fmt.Errorf("start the guard: %w", err)
	}
	group := leader.Process.Pid
	args := append([]string{"-c", guardScript, "guard", fmt.Sprint(group), dir}, cleanup...)
	watcher := exec.Command("/bin/sh", args...)
	watcher.Stdin, watcher.Dir = r, dir
	watcher.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := watcher.Start(); err != nil {
		_ = w.Close()
		_ = leader.Wait()
		return nil, fmt.Errorf("start the guard: %w", err)
	}
	return &guard{group: group, hold: w, leader: leader, watcher: watcher}, nil
}

// adopt puts cmd, not yet started, into the guarded group.
func (g *guard) adopt(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pgid: g.group}
}

// release ends everything in the group and waits until the guard has cleaned up.
func (g *guard) release() error {
	if err := g.hold.Close(); err != nil {
		return fmt.Errorf("release the guard: %w", err)
	}
	_ = g.leader.Wait() // ends at the end of the pipe or by the watcher's kill; both are right
	if err := g.watcher.Wait(); err != nil {
		return fmt.Errorf("clean up after the servers: %w", err)
	}
	return nil
}
