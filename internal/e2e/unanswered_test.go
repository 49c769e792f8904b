package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"backstep/client/participant"
	"backstep/internal/handlers"
	"backstep/internal/saga"
	"backstep/internal/testenv"
)

// tour has one try at a room, which is given back should no answer come in time.
var tour = saga.Define("tour", 1,
	saga.RemoteStep[journey, ticket]("room", "hotel", saga.Deadline(24*time.Second)),
	saga.Step("train", "inventory", buy("train"), giveBack("train")),
)

// The broker loses commands that a participant has not had yet, and replies that nobody has read. Half
// a deadline later they come again, and all sagas complete, each with one room, at their first attempt.
func TestLostOnTheWayToAParticipantAndBack(t *testing.T) {
	t.Parallel()
	w := newWheel(t)
	w.exec(`CREATE TABLE sold (what VARCHAR(16) PRIMARY KEY, n INT NOT NULL)`)
	w.exec(`INSERT INTO sold VALUES ('train', 0)`)
	hotelsOwn := testenv.Database(t)
	hotel := openDSN(t, hotelsOwn)
	for _, query := range []string{participant.Schema, `CREATE TABLE rooms (taken INT NOT NULL)`, `INSERT INTO rooms VALUES (0)`} {
		if _, err := hotel.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	w.start("relay")
	keep := saga.KeeperConfig{Settle: time.Second}
	w.ownWorker(tour, keep, 8, handlers.InventoryQueue) // nobody reads replies yet
	w.awaitQueues()
	w.sink("hotel")

	const each = 6
	begun := 0
	waiting := func(queue string) {
		t.Helper()
		for range each {
			begun++
			w.begin(tour, strconv.Itoa(begun*77+1), journey{begun*77 + 1}) // one that no hotel refuses
		}
		w.eventually(30*time.Second, "all wait in queue "+queue, func() error {
			if ready, _ := w.broker.Queue(t, queue); ready < each {
				return fmt.Errorf("%d do", ready)
			}
			return nil
		})
		if n := w.broker.Purge(t, queue); n != each {
			t.Errorf("%d messages of %s were purged, want %d", n, queue, each)
		}
	}
	waiting("hotel")
	w.startHotel(hotelsOwn)
	waiting(handlers.RepliesQueue)
	w.ownWorker(tour, keep, 8, handlers.RepliesQueue)

	w.eventually(60*time.Second, "all sagas have ended", func() error {
		if n := w.count(`SELECT COUNT(*) FROM saga_instances WHERE status IN ('RUNNING', 'COMPENSATING')`); n > 0 {
			return fmt.Errorf("%d have not", n)
		}
		return nil
	})
	var taken int
	if err := hotel.QueryRowContext(t.Context(), `SELECT taken FROM rooms`).Scan(&taken); err != nil {
		t.Fatal(err)
	}
	for what, n := range map[string]int{
		"completed sagas":        w.count(`SELECT COUNT(*) FROM saga_instances WHERE status = 'COMPLETED'`),
		"rooms":                  taken,
		"trains":                 w.count(`SELECT n FROM sold WHERE what = 'train'`),
		"commands emitted again": w.count(`SELECT COUNT(*) FROM outbox_actions WHERE action = 'rescue'`),
		"first attempts":         w.count(`SELECT COUNT(*) FROM saga_steps WHERE name = 'room' AND attempts = 1`),
	} {
		if n != begun {
			t.Errorf("%d %s, want %d", n, what, begun)
		}
	}
}

// startHotel runs the participant as a process of its own until the test ends.
func (w *wheel) startHotel(dsn string) {
	w.t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), hotelBroker+"="+w.broker.URL, hotelDSN+"="+dsn, hotelDies+"=0")
	cmd.Stderr = w.t.Output()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // it was killed
	})
}
