package outbox_test

import (
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
)

var operator = outbox.Operator{Actor: "ops@host", Reason: "the queue is back"}

// rowID returns the id of the only row of a message.
func rowID(t *testing.T, db *sql.DB, messageID string) uint64 {
	t.Helper()
	ids, err := outbox.Resolve(t.Context(), db, messageID)
	if err != nil || len(ids) != 1 {
		t.Fatalf("rows of %s: %v, %v", messageID, ids, err)
	}
	return ids[0]
}

// park makes rows PARKED as a relay would.
func park(t *testing.T, db *sql.DB, messageIDs ...string) {
	t.Helper()
	for _, id := range messageIDs {
		exec(t, db, `UPDATE outbox_events SET status = 'PARKED', attempts = 3, last_error = 'NO_ROUTE' WHERE message_id = ?`, []byte(id))
	}
}

// audited returns what was done to all rows, in order: action, message id, actor, reason.
func audited(t *testing.T, db *sql.DB) string {
	t.Helper()
	return text(t, db, `SELECT GROUP_CONCAT(CONCAT_WS(' ', action, message_id, actor, reason) ORDER BY id SEPARATOR ', ') FROM outbox_actions`)
}

func TestResolve(t *testing.T) {
	t.Parallel()
	db := database(t)
	add(t, db, command("q", "twice"), command("q", "twice"), command("q", "17x"), command("q", "18446744073709551616"))
	for name, want := range map[string]string{"1": "[1]", "2": "[2]", "twice": "[1 2]", "17x": "[3]", "18446744073709551616": "[4]"} {
		if ids, err := outbox.Resolve(t.Context(), db, name); err != nil || fmt.Sprint(ids) != want {
			t.Errorf("Resolve(%s) = %v, %v, want %s", name, ids, err, want)
		}
	}
	for _, name := range []string{"99", "nobody", "-1"} {
		if ids, err := outbox.Resolve(t.Context(), db, name); !errors.Is(err, outbox.ErrNoRow) {
			t.Errorf("Resolve(%s) = %v, %v, want ErrNoRow", name, ids, err)
		}
	}
}

// A parked row that is requeued is published by a running relay, once, with the id it had;
// doing it again, or to a row that is not parked, changes nothing. All is audited.
func TestRequeue(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	add(t, db, command("q", "parked"), command("q", "other"), command("q", "sent"))
	park(t, db, "parked", "other")
	start(t, db, f, outbox.Config{})
	eventually(t, "what is not parked is published", func() bool { return having(t, db, "PUBLISHED") == 1 })

	ids := []uint64{rowID(t, db, "parked"), rowID(t, db, "sent"), 999}
	found, err := outbox.Requeue(t.Context(), db, ids, operator)
	if err != nil || len(found) != 2 || found[0].Status != outbox.StatusParked || found[0].LastError != "NO_ROUTE" || found[1].Status != outbox.StatusPublished {
		t.Fatalf("Requeue = %+v, %v", found, err)
	}
	eventually(t, "it is published", func() bool { return having(t, db, "PUBLISHED") == 2 })
	if _, err := outbox.Requeue(t.Context(), db, ids, operator); err != nil {
		t.Fatal(err)
	}
	if n := number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE status = 'PUBLISHED' AND message_id = 'parked' AND generation = 1 AND attempts = 0 AND last_error IS NULL`); n != 1 {
		t.Error("the row is not as new")
	}
	if n := f.times("parked"); n != 1 {
		t.Errorf("published %d times, want once", n)
	}
	equal(t, "parked still", []int{having(t, db, "PARKED")}, []int{1})
	if got, want := audited(t, db), "requeue parked ops@host the queue is back"; got != want {
		t.Errorf("audited %q, want %q", got, want)
	}
	actions, err := outbox.Actions(t.Context(), db, ids[0])
	if err != nil || len(actions) != 1 || !strings.Contains(string(actions[0].Before), `"attempts":3,"last_error":"NO_ROUTE"`) {
		t.Errorf("actions %+v, %v", actions, err)
	}
}

// Republished rows go out again with the ids they had, in the order of their keys, while a
// relay runs; what was published since the given time is left alone, so twice is once.
func TestRepublish(t *testing.T) {
	t.Parallel()
	const n = 30
	db, f := database(t), &fake{}
	start(t, db, f, outbox.Config{})
	for i := range n {
		add(t, db, keyed(command("q", fmt.Sprintf("m%02d", i)), fmt.Sprintf("k%d", i%3)))
	}
	published(t, db, n)
	before := len(f.all())
	until, err := outbox.Now(t.Context(), db)
	if err != nil {
		t.Fatal(err)
	}
	chosen := outbox.Filter{Queue: "q", Since: until.Add(-time.Hour), Before: until}
	for range 2 {
		ids, err := outbox.Choose(t.Context(), db, chosen, outbox.StatusPublished, 0)
		if err != nil {
			t.Fatal(err)
		}
		for len(ids) > 0 {
			batch := ids[:min(len(ids), 7)]
			ids = ids[len(batch):]
			if _, err := outbox.Republish(t.Context(), db, batch, until, operator); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "all are published again", func() bool {
			return number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE status = 'PUBLISHED' AND generation = 1`) == n
		})
	}
	again := f.all()[before:]
	same(t, "published again", again, func() (ids []string) {
		for i := range n {
			ids = append(ids, fmt.Sprintf("m%02d", i))
		}
		return ids
	}())
	last := map[int]int{}
	for _, id := range again {
		var i int
		if _, err := fmt.Sscanf(id, "m%d", &i); err != nil {
			t.Fatal(err)
		}
		if i < last[i%3] {
			t.Errorf("%s came after m%d, which has the same key", id, last[i%3])
		}
		last[i%3] = i
	}
	if got := number(t, db, `SELECT COUNT(*) FROM outbox_actions WHERE action = 'republish'`); got != n {
		t.Errorf("%d rows in the audit, want %d", got, n)
	}
}

// What a relay that was slow says of an earlier generation does not count.
func TestMarkOfAnEarlierGeneration(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	confirm := make(chan struct{})
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		go func() { <-confirm; c.answer(tag, message.Confirmed, "") }()
		return nil
	}
	add(t, db, command("q", "m"))
	start(t, db, f, outbox.Config{})
	eventually(t, "it is in flight", func() bool { return f.times("m") == 1 })
	park(t, db, "m") // by another relay, which took the shard over
	if _, err := outbox.Requeue(t.Context(), db, []uint64{rowID(t, db, "m")}, operator); err != nil {
		t.Fatal(err)
	}
	close(confirm)
	published(t, db, 1)
	if n := f.times("m"); n != 2 {
		t.Errorf("published %d times, want twice: the first was of an earlier generation", n)
	}
}
