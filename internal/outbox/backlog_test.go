package outbox_test

import (
	"slices"
	"testing"

	"backstep/internal/message"
	"backstep/internal/outbox"
)

func TestBacklogAndHistory(t *testing.T) {
	db := database(t)
	ctx := t.Context()
	backlog := func(wantPending, wantLast bool) {
		t.Helper()
		pending, last, err := outbox.Backlog(ctx, db)
		if err != nil || pending != wantPending || last.IsZero() == wantLast {
			t.Errorf("Backlog = %t, %v, %v; want %t and a time %t", pending, last, err, wantPending, wantLast)
		}
	}
	backlog(false, false)
	add(t, db, command("payment", "new"))
	backlog(true, false)

	var told []int
	old := command("payment", "old")
	old.Body = []byte(`{"old":true}`)
	if err := outbox.AddHistory(ctx, db, old, 23_004, func(n int) { told = append(told, n) }); err != nil {
		t.Fatal(err)
	}
	if want := []int{10_000, 20_000, 23_004}; !slices.Equal(told, want) {
		t.Errorf("told of %v, want %v", told, want)
	}
	counts, err := outbox.Counts(ctx, db)
	if err != nil || counts["PUBLISHED"] != 23_004 || counts["PENDING"] != 1 {
		t.Errorf("counts %v, %v", counts, err)
	}
	backlog(true, true)
	// They are rows like any other, over all shards and each with an id of its own.
	for query, want := range map[string]int{
		`SELECT COUNT(DISTINCT message_id) FROM outbox_events WHERE status = 'PUBLISHED'`: 23_004,
		`SELECT COUNT(DISTINCT shard) FROM outbox_events WHERE status = 'PUBLISHED'`:      message.Shards,
		`SELECT COUNT(*) FROM outbox_events WHERE payload = '{"old":true}'`:               23_004,
	} {
		if got := number(t, db, query); got != want {
			t.Errorf("%s gives %d, want %d", query, got, want)
		}
	}
	exec(t, db, `DELETE FROM outbox_events WHERE status = 'PENDING'`)
	backlog(false, true)
}
