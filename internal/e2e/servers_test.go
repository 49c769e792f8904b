package e2e

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"backstep/internal/testenv"
)

// Each server is shut down and started again, and killed and started again, while sagas are
// under way. Nothing is lost, doubled, charged or parked, and nobody has to restart anything.
func TestServersGoDown(t *testing.T) {
	servers := testenv.Private(t)
	w := wheelOn(t, servers)
	procs := append(w.together("relay", 2), w.together("worker", 2, "BACKSTEP_BATCH=8")...)
	w.awaitQueues()
	var want expectation
	for _, tt := range []struct {
		name     string
		down     func(context.Context) error
		up       func(context.Context) error
		database bool
	}{
		{"broker restarted", servers.StopBroker, servers.StartBroker, false},
		{"database restarted", servers.StopDatabase, servers.StartDatabase, true},
		{"broker killed", func(context.Context) error { return servers.KillBroker() }, servers.StartBroker, false},
		{"database killed", func(context.Context) error { return servers.KillDatabase() }, servers.StartDatabase, true},
	} {
		msgs, more := orders(200)
		before := want.total()
		want = want.plus(more)
		w.submit(msgs...)
		w.eventually(60*time.Second, tt.name+": some sagas have ended", func() error {
			if ended := w.count(`SELECT COUNT(*) FROM orders WHERE status <> 'PENDING'`); ended <= before {
				return fmt.Errorf("%d orders have ended", ended)
			}
			return nil
		})
		ended := w.count(`SELECT COUNT(*) FROM orders WHERE status <> 'PENDING'`)
		if ended == want.total() {
			t.Errorf("%s: everything had ended already: the test shows nothing", tt.name)
		}
		if err := tt.down(t.Context()); err != nil {
			t.Fatal(err)
		}
		if tt.database {
			if err := w.db.PingContext(t.Context()); err == nil {
				t.Errorf("%s: the database answers", tt.name)
			}
		}
		if err := tt.up(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.eventually(120*time.Second, tt.name+": all have ended", func() error {
			var n int
			err := w.db.QueryRowContext(t.Context(), `SELECT COUNT(*) FROM orders WHERE status <> 'PENDING'`).Scan(&n)
			if err == nil && n < want.total() {
				err = fmt.Errorf("%d of %d have", n, want.total())
			}
			return err
		})
	}
	w.rest(want.total(), 60*time.Second)
	w.verify(want)
	w.nothingSpent()
	for _, p := range procs {
		select {
		case <-p.done:
			t.Errorf("a %s ended: %v", p.role, errors.Join(p.err))
		default:
		}
	}
	stopAll(procs...)
}

func (e expectation) plus(o expectation) expectation {
	return expectation{e.confirmed + o.confirmed, e.noStock + o.noStock, e.declined + o.declined, e.refused + o.refused}
}
