package e2e

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/message"
)

// backlog is how many messages of 100 KB TestMemoryIsBounded puts into a queue; by hand it can be
// more than a continuous integration has time and disk for: -backlog 100000 are 10 GB.
var backlog = flag.Int("backlog", 2_000, "messages of 100 KB in the queue of TestMemoryIsBounded")

// workerMemory is the most that a worker may ever have used, under a limit of 256 MB.
const workerMemory = 200 << 20

// TestMemoryIsBounded: B53: what a worker needs does not depend on how much waits for it, but on
// prefetch × size. It is the binary as it is deployed: the race detector's shadow is not its own.
func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	plain := "worker-plain"
	build := exec.Command("go", "build", "-o", filepath.Join(binaries, plain), "backstep/cmd/worker")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the worker: %v\n%s", err, out)
	}
	for _, tt := range []struct {
		name   string
		env    []string
		queues []string
		n      int // in each queue
		body   func(t *testing.T) amqp091.Publishing
		done   func(p *proc) int64
		// Most that may be delivered and not acked, in each queue: a lane begins with a prefetch of
		// 1, and what it holds then comes on top of its full prefetch (amqp.Subscription.Reopen).
		unread int
	}{
		{
			name: "a backlog of orders", env: []string{"BACKSTEP_QUEUES=orders", "BACKSTEP_LANES=4"},
			queues: []string{handlers.OrdersQueue}, n: *backlog,
			body:   func(t *testing.T) amqp091.Publishing { return padded(t, 100_000) },
			done:   func(p *proc) int64 { return p.stats().Done },
			unread: 4 * (1 + 2*128),
		},
		{
			// With the default of twice the batch they would be 5 × 256 × 256 KiB.
			name: "the largest bodies, all of them poison, in all queues", env: []string{"BACKSTEP_BATCH=32", "BACKSTEP_PREFETCH=64"},
			queues: handlers.Queues, n: 150,
			body: func(t *testing.T) amqp091.Publishing {
				m := padded(t, 256<<10)
				m.Type = "no.such"
				return m
			},
			done:   func(p *proc) int64 { return p.stats().Parked },
			unread: 1 + 64,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWheel(t)
			w.apply()
			m := tt.body(t)
			for _, q := range tt.queues {
				w.fill(q, m, tt.n)
			}
			began := time.Now()
			p := w.start(plain, tt.env...)
			all := int64(tt.n * len(tt.queues))
			// Six minutes for ten thousand: a busy machine has done 40 a second.
			w.eventually(time.Minute+time.Duration(all)*36*time.Millisecond, "all is processed", func() error {
				if _, err := p.admin(); err != nil {
					return err
				}
				for _, q := range tt.queues {
					if _, unacked := w.broker.Queue(w.t, q); unacked > tt.unread {
						t.Fatalf("queue %s: %d are delivered and not acked, want %d at most", q, unacked, tt.unread)
					}
				}
				if n := tt.done(p); n < all {
					return fmt.Errorf("%d of %d", n, all)
				}
				return nil
			})
			used := p.peak()
			t.Logf("%d messages of %d bytes in %.0f s: %d MiB at most", all, len(m.Body), time.Since(began).Seconds(), used>>20)
			if used > workerMemory {
				t.Errorf("the worker has used %d MiB, want %d at most", used>>20, workerMemory>>20)
			}
			p.stop()
		})
	}
}

// padded is a good order in a body of so many bytes: blanks mean nothing in JSON.
func padded(t *testing.T, size int) amqp091.Publishing {
	t.Helper()
	m := request(t, nil)
	m.Body = append(m.Body, bytes.Repeat([]byte(" "), size-len(m.Body))...)
	return m
}

// fill puts n messages into a queue that differ in their ids.
func (w *wheel) fill(queue string, m amqp091.Publishing, n int) {
	w.t.Helper()
	for n > 0 {
		some := make([]amqp091.Publishing, min(n, 500))
		for i := range some {
			some[i] = m
			some[i].MessageId = message.NewID()
		}
		w.broker.Publish(w.t, message.CommandsExchange, queue, some...)
		n -= len(some)
	}
}

// apply declares the topology, with the policies.
func (w *wheel) apply() {
	w.t.Helper()
	p := w.startArgs("backstep", []string{"topology", "apply"}, "BACKSTEP_AMQP_MANAGEMENT_URL="+w.broker.ManagementURL)
	<-p.done
	if p.err != nil {
		w.t.Fatalf("topology apply: %v\n%s", p.err, p.text())
	}
}

// peak returns the most memory that the process has ever used, in bytes.
func (p *proc) peak() int64 {
	p.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		var kib int64
		if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &kib); n == 1 {
			return kib << 10
		}
	}
	p.t.Fatal("the kernel does not say what the process has used")
	return 0
}
