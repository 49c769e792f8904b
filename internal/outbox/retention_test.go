package outbox_test

import (
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
)

// Sweep deletes what was published longer ago than the retention, oldest first, no more than it
// may at a time, and nothing else.
func TestSweep(t *testing.T) {
	t.Parallel()
	db := database(t)
	for i, row := range []struct {
		status string
		hours  int // since it was made, and published if it was
	}{{"PUBLISHED", 30}, {"PUBLISHED", 26}, {"PUBLISHED", 25}, {"PUBLISHED", 23}, {"PENDING", 900}, {"PARKED", 900}} {
		exec(t, db, `
INSERT INTO outbox_events (message_id, ordering_key, exchange, routing_key, properties, headers, payload, status, created_at, published_at)
VALUES (?, '', '', '', '', '', '', ?, NOW(6) - INTERVAL ? HOUR, IF(? = 'PUBLISHED', NOW(6) - INTERVAL ? HOUR, NOW(6)))`,
			i, row.status, row.hours, row.status, row.hours)
	}
	for _, want := range []struct{ swept, left int }{{2, 4}, {1, 3}, {0, 3}} {
		n, err := outbox.Sweep(t.Context(), db, 24*time.Hour, 2)
		if err != nil {
			t.Fatal(err)
		}
		if left := number(t, db, `SELECT COUNT(*) FROM outbox_events`); int(n) != want.swept || left != want.left {
			t.Errorf("swept %d, %d left, want %d and %d", n, left, want.swept, want.left)
		}
	}
	if id := text(t, db, `SELECT message_id FROM outbox_events WHERE status = 'PUBLISHED'`); id != "3" {
		t.Errorf("the published row left is %s, want 3", id)
	}
}

// The sweep looks at the rows it deletes and no others, however many there are.
func TestSweepUsesItsIndex(t *testing.T) {
	t.Parallel()
	db := database(t)
	exec(t, db, fillSQL, "PUBLISHED")
	exec(t, db, `ANALYZE TABLE outbox_events`)
	lines := plan(t, db, outbox.SelectOldSQL, 3600, 1000)
	if len(lines) != 1 || strings.Contains(lines[0]["Extra"], "filesort") || lines[0]["key"] != "ix_outbox_retention" || lines[0]["type"] != "range" {
		t.Errorf("plan of the sweep: %v", lines)
	}
}

// With no retention a row goes when the broker has confirmed it; one that has not is kept.
func TestDeletePublished(t *testing.T) {
	t.Parallel()
	db, b := database(t), newBroker(t)
	b.queue(t, "q", nil)
	start(t, db, b, outbox.Config{DeletePublished: true, ParkAfter: time.Hour})
	s := b.consume(t, "q")
	add(t, db, command("q", "m0"), command("nowhere", "m1"), command("q", "m2"))
	s.await(t, 2)
	eventually(t, "published rows are gone", func() bool { return number(t, db, `SELECT COUNT(*) FROM outbox_events`) == 1 })
	if id := text(t, db, `SELECT message_id FROM outbox_events WHERE status = 'PENDING'`); id != "m1" {
		t.Errorf("the row left is %s, want m1", id)
	}
}

// Writers whose transactions are open do not hold up the marks of others' rows, however many
// rows are marked at once.
func TestMarksWaitForNoWriter(t *testing.T) {
	for name, cfg := range map[string]outbox.Config{"mark": {}, "delete": {DeletePublished: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, f := database(t), &fake{}
			const n = 3_000
			add(t, db, commands("q", names("m", n))...)
			writer, err := db.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer writer.Rollback() //nolint:errcheck // it is open to the end of the test
			exec(t, writer, insertForeignSQL, "open", "{}", "{}", "{}")
			var held sync.WaitGroup
			held.Add(1)
			var answered atomic.Int64
			f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
				if answered.Add(1) == n { // so that one mark has them all
					held.Done()
				}
				go func() { held.Wait(); c.answer(tag, message.Confirmed, "") }()
				return nil
			}
			cfg.Window, cfg.Page = n, n
			start(t, db, f, cfg)
			eventually(t, "all rows are marked", func() bool { return having(t, db, "PENDING") == 0 })
		})
	}
}
