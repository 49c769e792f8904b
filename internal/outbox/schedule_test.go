package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

func schedule(t testing.TB, db *sql.DB, msgs ...outbox.Delayed) {
	t.Helper()
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		return outbox.Schedule(ctx, tx, msgs...)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func after(d time.Duration, m message.Message) outbox.Delayed {
	return outbox.Delayed{Message: m, After: d, Reason: "a test"}
}

// Messages are published when they are due and not before, by the database's clock, once
// although two relays run; those that are due far in the future stay.
func TestSchedule(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	var mu sync.Mutex // guards sent
	sent := map[string]time.Time{}
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		mu.Lock()
		sent[m.MessageID] = time.Now()
		mu.Unlock()
		c.answer(tag, message.Confirmed, "")
		return nil
	}
	for range 2 {
		start(t, db, f, outbox.Config{LeaseTTL: time.Second})
	}
	added := time.Now()
	var msgs []outbox.Delayed
	for i := range 200 {
		msgs = append(msgs, after(time.Duration(i)*10*time.Millisecond, command("q", fmt.Sprintf("m%d", i))))
	}
	msgs = append(msgs, after(24*time.Hour, command("q", "tomorrow")), after(-time.Hour, command("q", "overdue")))
	schedule(t, db, msgs...)
	published(t, db, 201)
	if n := len(f.all()); n != 201 {
		t.Errorf("%d publishes, want 201", n)
	}
	mu.Lock()
	defer mu.Unlock()
	for i := range 200 {
		due := time.Duration(i) * 10 * time.Millisecond
		if took := sent[fmt.Sprintf("m%d", i)].Sub(added); took < due {
			t.Errorf("m%d was published after %s, before it was due after %s", i, took, due)
		}
	}
	equal(t, "still scheduled", column(t, db, `SELECT message_id FROM scheduled_messages`), []string{"tomorrow"})
}

// One ordering key keeps the order in which its messages are due.
func TestScheduleKeepsOrder(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	var msgs []outbox.Delayed
	for i, id := range names("m", 100) {
		msgs = append(msgs, after(time.Duration(i/10)*time.Millisecond, keyed(command("q", id), "k")))
	}
	schedule(t, db, msgs...)
	start(t, db, f, outbox.Config{})
	published(t, db, 100)
	equal(t, "published", f.all(), names("m", 100))
}

// A message is promoted as it was scheduled.
func TestPromotedMessageIsTheSame(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	got := make(chan message.Message, 10)
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		got <- *m
		c.answer(tag, message.Confirmed, "")
		return nil
	}
	m := everything()
	m.AggregateType, m.AggregateID = "order", "o\xff"
	add(t, db, m)
	schedule(t, db, after(0, m))
	start(t, db, f, outbox.Config{})
	published(t, db, 2)
	if a, b := <-got, <-got; !reflect.DeepEqual(a, b) {
		t.Errorf("added and scheduled differ:\n%+v\n%+v", a, b)
	}
}

func TestScheduleIdempotencyKey(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	m := command("q", "a")
	m.IdempotencyKey = "k"
	again := command("q", "b")
	again.IdempotencyKey = "k"
	add(t, db, m)
	schedule(t, db, after(0, again), after(0, command("q", "c")))
	start(t, db, f, outbox.Config{})
	published(t, db, 2)
	same(t, "published", f.all(), []string{"a", "c"})
	if n := number(t, db, `SELECT COUNT(*) FROM scheduled_messages`); n != 0 {
		t.Errorf("%d messages are still scheduled", n)
	}
}

// B33: whatever the reason is, it does not keep the message from being scheduled.
func TestScheduleReason(t *testing.T) {
	t.Parallel()
	db := database(t)
	for _, reason := range []string{
		"", "plain", "ends in \xff\xfe\x00", strings.Repeat("a", 100_000), strings.Repeat("é", 35_000), strings.Repeat("x😀", 20_000),
		strings.Repeat("\xff", 70_000),
	} {
		m := after(time.Hour, command("q", "a"))
		m.Reason = reason
		schedule(t, db, m)
		got := text(t, db, `SELECT last_error FROM scheduled_messages ORDER BY id DESC LIMIT 1`)
		if !utf8.ValidString(got) || len(reason) < 10 && got != reason {
			t.Errorf("reason %.20q became %.20q", reason, got)
		}
	}
}

// The leader looks for due messages all the time: that costs one look at an index.
func TestScheduleUsesItsIndex(t *testing.T) {
	t.Parallel()
	db := database(t)
	var msgs []outbox.Delayed
	for _, id := range names("m", 5000) {
		msgs = append(msgs, after(time.Hour, command("q", id)))
	}
	schedule(t, db, msgs...)
	exec(t, db, `ANALYZE TABLE scheduled_messages`)
	for _, query := range outbox.ScheduleQueries {
		for _, line := range plan(t, db, strings.ReplaceAll(query, "?", "500")) {
			if line["key"] != "ix_scheduled_due" && !strings.Contains(line["Extra"], "optimized away") || strings.Contains(line["Extra"], "filesort") {
				t.Errorf("%s: %v", query, line)
			}
		}
	}
}
