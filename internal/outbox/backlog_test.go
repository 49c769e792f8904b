package outbox_test

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// The sums that tell whether something has changed cost no row.
func TestSumsUseTheIndexAlone(t *testing.T) {
	t.Parallel()
	db := database(t)
	exec(t, db, fillSQL, "PENDING")
	query, args := outbox.SumQuery(map[int]uint64{3: math.MaxUint64, 7: 17})
	lines := plan(t, db, query, args...)
	for _, line := range lines {
		if line["key"] != "ix_outbox_relay" {
			t.Errorf("%v", line)
		}
		contains(t, "Extra", line["Extra"], "Using index")
	}
	if len(lines) != 2 {
		t.Errorf("%d lines, want 2", len(lines))
	}
}

// Fifty thousand rows that cannot go, at the head of all shards, delay nobody else; nobody
// overtakes within a key; and all go when they can.
func TestBacklogDelaysNobody(t *testing.T) {
	t.Parallel()
	db, d := database(t), newDoor("q", message.Nacked)
	exec(t, db, fillSQL, "PENDING") // to q
	early, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := outbox.Add(t.Context(), sqltx.Join(early), keyed(command("free", "early"), "k")); err != nil {
		t.Fatal(err)
	}
	start(t, db, d, outbox.Config{PollMax: 250 * time.Millisecond})
	// One after the other, so that each has to be found for itself.
	var waits []time.Duration
	for _, id := range names("m", 40) {
		began := time.Now()
		add(t, db, command("free", id))
		eventually(t, id+" is published", func() bool { return d.times(id) > 0 })
		waits = append(waits, time.Since(began))
	}
	slices.Sort(waits)
	t.Logf("waits of rows that can go: median %s, longest %s", waits[len(waits)/2], waits[len(waits)-1])
	if waits[len(waits)/2] > 250*time.Millisecond {
		t.Errorf("rows that can go waited %s", waits)
	}

	// A row that commits late in the middle of what waits is found, and before its successor.
	if err := early.Commit(); err != nil {
		t.Fatal(err)
	}
	add(t, db, keyed(command("free", "late"), "k"))
	eventually(t, "the two are published", func() bool { return d.times("early") > 0 && d.times("late") > 0 })
	if sent := d.all(); slices.Index(sent, "early") > slices.Index(sent, "late") {
		t.Error("late was published before early")
	}
	// A row behind one of its key that waits, waits.
	waiting := text(t, db, `SELECT ordering_key FROM outbox_events WHERE status = 'PENDING' AND routing_key = 'q' ORDER BY id DESC LIMIT 1`)
	add(t, db, keyed(command("free", "behind"), waiting))
	never(t, "a row overtakes its key", time.Second, func() bool { return d.times("behind") > 0 })

	d.set(message.Confirmed)
	published(t, db, 50_000+43)
}

// Fifty thousand rows of one key, which go one at a time, delay nobody else and do not wait
// for the walks past them.
func TestBacklogOfOneKey(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	exec(t, db, fillSQL, "PENDING")
	exec(t, db, `UPDATE outbox_events SET ordering_key = 'hot'`)
	start(t, db, f, outbox.Config{PollMax: 250 * time.Millisecond})
	eventually(t, "it goes on", func() bool { return len(f.all()) > 1000 })
	began, before := time.Now(), len(f.all())
	var waits []time.Duration
	for i := 0; time.Since(began) < 2*time.Second; i++ {
		id, since := fmt.Sprintf("m%d", i), time.Now()
		add(t, db, command("q", id))
		eventually(t, id+" is published", func() bool { return f.times(id) > 0 })
		waits = append(waits, time.Since(since))
	}
	slices.Sort(waits)
	rate := float64(len(f.all())-before) / time.Since(began).Seconds()
	t.Logf("%.0f rows/s of the key; waits of others: median %s, longest %s", rate, waits[len(waits)/2], waits[len(waits)-1])
	if waits[len(waits)/2] > 250*time.Millisecond {
		t.Errorf("rows of other keys waited %s", waits)
	}
	if rate < 100 {
		t.Errorf("the key goes on at %.0f rows/s", rate)
	}
}
