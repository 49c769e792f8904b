package outbox_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

func TestVerifyAndFind(t *testing.T) {
	db := database(t)
	ctx := t.Context()
	publish := func(id string, ago time.Duration) {
		if _, err := db.ExecContext(ctx, `
UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6) - INTERVAL ? SECOND WHERE message_id = ?`,
			int64(ago.Seconds()), []byte(id)); err != nil {
			t.Fatal(err)
		}
	}

	for i := range 5 {
		id := fmt.Sprintf("m%d", i)
		add(t, db, to(message.CommandsExchange, "payment", id))
		publish(id, time.Minute)
	}
	add(t, db, to(message.CommandsExchange, "payment", "long-ago"), to(message.EventsExchange, "order.created", "event"))
	publish("long-ago", 48*time.Hour)
	publish("event", time.Minute)
	copied := to(message.ParkedExchange, "payment", "m3")
	at := time.Now().UTC()
	copied.Headers = message.Headers{message.HeaderParkedAt: at.Format(time.RFC3339Nano)}
	add(t, db, copied)
	publish("m3", time.Second)
	add(t, db, to(message.ParkedExchange, "payment", "m?"))
	publish("m?", time.Second)

	var ids []string
	for after := uint64(0); ; {
		page, err := outbox.PublishedCommands(ctx, db, after, time.Hour, 2)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		for _, p := range page {
			ids = append(ids, p.MessageID+"@"+p.Queue)
			after = p.RowID
		}
	}
	if got, want := strings.Join(ids, " "), "m0@payment m1@payment m2@payment m3@payment m4@payment"; got != want {
		t.Errorf("published commands %q, want %q", got, want)
	}
	parked, err := outbox.ParkedCopies(ctx, db, "payment", []string{"m2", "m3", "m\xff"})
	if err != nil || len(parked) != 2 || len(parked["m3"]) != 1 || !parked["m3"][0].Equal(at) || len(parked["m\xff"]) != 1 {
		t.Errorf("ParkedCopies = %v, %v, want m3 at %s, and m\\xff", parked, err, at)
	}
	if parked, err := outbox.ParkedCopies(ctx, db, "orders", []string{"m3"}); err != nil || len(parked) != 0 {
		t.Errorf("ParkedCopies of another queue = %v, %v", parked, err)
	}
	if v, err := outbox.Verify(ctx, db); err != nil || len(v) != 0 {
		t.Errorf("Verify at rest = %v, %v", v, err)
	}

	add(t, db, to(message.CommandsExchange, "shipping", "waits"))
	since := time.Now().UTC().Truncate(time.Second)
	later := to(message.CommandsExchange, "payment", "later")
	later.Headers = message.Headers{message.HeaderDeferredSince: since.Format(time.RFC3339Nano)}
	err = sqltx.WithTx(ctx, db, func(ctx context.Context, tx *sqltx.Tx) error {
		return outbox.Schedule(ctx, tx, outbox.Delayed{
			Message: later, After: time.Hour, Reason: "the gateway is away",
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	violations, err := outbox.Verify(ctx, db)
	if err != nil || len(violations) != 2 || !strings.Contains(violations[0].Detail, "to backstep.commands shipping, pending for") ||
		!strings.Contains(violations[1].Detail, "the gateway is away") {
		t.Errorf("Verify = %+v, %v", violations, err)
	}
	counts, err := outbox.Counts(ctx, db)
	if err != nil || counts["PENDING"] != 1 || counts["PUBLISHED"] != 9 {
		t.Errorf("Counts = %v, %v", counts, err)
	}

	for _, tt := range []struct {
		id, status string
		copies     int
	}{{"waits", "PENDING", 1}, {"later", "SCHEDULED", 1}, {"m3", "PUBLISHED", 2}, {"nobody", "", 0}} {
		places, err := outbox.Find(ctx, db, tt.id)
		if err != nil || len(places) != tt.copies || len(places) > 0 && places[0].Status != tt.status {
			t.Errorf("Find(%q) = %+v, %v, want %d %s", tt.id, places, err, tt.copies, tt.status)
		}
		if tt.id == "later" && (places[0].Age > -59*time.Minute || places[0].LastError != "the gateway is away" || !places[0].Deferred.Equal(since)) {
			t.Errorf("Find(%q) = %+v", tt.id, places[0])
		}
	}
}
