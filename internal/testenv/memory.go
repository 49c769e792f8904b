package testenv

import (
	"os"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

const (
	memoryDir = "/dev/shm"
	// enoughMemory is more than three times what the servers of the whole suite need at once: 3.2 GiB.
	enoughMemory = 12 << 30
)

// inMemory returns a folder in memory for the data of servers that tests start. A server that is killed
// finds its data there as it does on a disk, and only the loss of the machine would be another thing;
// but thousands of databases and commits need not wait for a disk. It returns "" if there is not memory
// enough, or if TMPDIR says where to put things.
func inMemory() string {
	if os.Getenv("TMPDIR") != "" {
		return ""
	}
	var fs unix.Statfs_t
	if unix.Statfs(memoryDir, &fs) != nil || fs.Type != unix.TMPFS_MAGIC || fs.Bavail*uint64(fs.Bsize) < enoughMemory {
		return ""
	}
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return ""
	}
	if m, err := proc.Meminfo(); err != nil || m.MemAvailableBytes == nil || *m.MemAvailableBytes < enoughMemory {
		return ""
	}
	return memoryDir
}
