package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"reflect"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

func locate(t *testing.T, db *sql.DB, ids ...string) (where map[string]outbox.Whereabouts) {
	t.Helper()
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		where, err = outbox.Locate(ctx, tx, ids)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return where
}

func TestLocate(t *testing.T) {
	t.Parallel()
	db := database(t)
	add(t, db, command("q", "pending"), command("q", "refused"), command("q", "sent"), command("q", "twice"), command("q", "back"),
		to(message.ParkedExchange, "q", "gone"), to(message.EventsExchange, "q", "gone"))
	park(t, db, "refused")
	sent := func(id string, ago time.Duration) {
		exec(t, db, `UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6) - INTERVAL ? SECOND WHERE message_id = ?`, int(ago.Seconds()), []byte(id))
	}
	sent("sent", time.Hour)
	sent("twice", time.Hour)
	sent("back", time.Hour)
	sent("gone", time.Hour)
	add(t, db, command("q", "twice"))
	exec(t, db, `UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6) - INTERVAL 1 MINUTE WHERE message_id = 'twice' AND status = 'PENDING'`)
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		return outbox.Schedule(ctx, tx, outbox.Delayed{Message: command("q", "later"), After: time.Hour}, outbox.Delayed{Message: command("q", "back"), After: time.Hour})
	})
	if err != nil {
		t.Fatal(err)
	}
	where := locate(t, db, "pending", "refused", "sent", "twice", "back", "later", "gone", "nobody")
	for id, want := range map[string]struct {
		waits   bool
		sentAgo time.Duration // 0: not, or no row says
	}{
		"pending": {waits: true}, "refused": {waits: true}, "later": {waits: true}, "gone": {}, "nobody": {},
		"sent": {false, time.Hour}, "twice": {false, time.Minute}, "back": {true, time.Hour},
	} {
		w := where[id]
		ago := time.Duration(0)
		if !w.PublishedAt.IsZero() {
			ago = time.Since(w.PublishedAt)
		}
		if off := ago - want.sentAgo; w.Waits() != want.waits || off.Abs() > 20*time.Second {
			t.Errorf("%s: %+v, sent %s ago; want %+v", id, w, ago, want)
		}
	}
	if w := where["refused"]; !w.Parked || w.Pending || w.Scheduled {
		t.Errorf("refused: %+v", w)
	}
	if where := locate(t, db); len(where) != 0 {
		t.Errorf("of no ids: %v", where)
	}
}

// What is found by ids is not looked for anywhere else.
func TestLocateUsesItsIndexes(t *testing.T) {
	t.Parallel()
	db := database(t)
	check := func(what string) {
		t.Helper()
		query, args := outbox.LocateQuery("one", "two", "three")
		var keys []string
		for _, line := range plan(t, db, query, args...) {
			if line["key"] != "" {
				keys = append(keys, line["key"])
			}
		}
		if want := []string{"ix_outbox_message", "ix_scheduled_message"}; !reflect.DeepEqual(keys, want) {
			t.Errorf("%s: it uses %q, want %q", what, keys, want)
		}
	}
	check("no rows")
	exec(t, db, fillSQL, "PUBLISHED")
	exec(t, db, `ANALYZE TABLE outbox_events`)
	check("50,000 published")
}

// Lost commands are published once more by a running relay, with the ids they had; what is not
// published is left alone. All is audited.
func TestRescue(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	add(t, db, command("q", "lost"), command("q", "refused"), command("q", "other"))
	park(t, db, "refused")
	start(t, db, f, outbox.Config{})
	eventually(t, "what is not parked is published", func() bool { return having(t, db, "PUBLISHED") == 2 })
	where := locate(t, db, "lost", "refused", "nobody")
	var shards uint16
	rescue := func() (ids []string) {
		t.Helper()
		err := sqltx.WithTx(outbox.NoteShards(t.Context(), &shards), db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
			ids, err = outbox.Rescue(ctx, tx, []outbox.Whereabouts{where["lost"], where["refused"], where["nobody"]}, operator)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return ids
	}
	if ids := rescue(); fmt.Sprint(ids) != "[lost]" || shards != 1<<message.Shard("lost") {
		t.Errorf("Rescue = %q, shards %b", ids, shards)
	}
	eventually(t, "it is published again", func() bool { return having(t, db, "PUBLISHED") == 2 && f.times("lost") == 2 })
	if got, want := audited(t, db), "rescue lost ops@host the queue is back"; got != want {
		t.Errorf("audit %q, want %q", got, want)
	}
	where = map[string]outbox.Whereabouts{}
	if ids := rescue(); len(ids) != 0 {
		t.Errorf("Rescue of nothing = %q", ids)
	}
}
