package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/go-sql-driver/mysql"

	"backstep/internal/bench"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
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

// One relay of several promotes, and tells when it has. No message is promoted twice, and each key
// keeps the order of its due times.
func TestOneRelayPromotes(t *testing.T) {
	t.Parallel()
	const relays, keys, each = 3, 40, 10
	dsn := testenv.Database(t)
	db, f := open(t, dsn), &fake{}
	var running []*relay
	var counters []*bench.Statements
	var told atomic.Int64
	for range relays {
		c, through := counted(t, dsn)
		counters = append(counters, c)
		running = append(running, start(t, through, f, outbox.Config{Promoted: func() { told.Add(1) }}))
	}
	eventually(t, "they share the shards and one leads", func() bool {
		all, leaders := 0, 0
		for _, r := range running {
			if r.Shards() == 0 {
				return false
			}
			all += r.Shards()
			if r.Leads() {
				leaders++
			}
		}
		return all == message.Shards && leaders == 1
	})
	before := asking(t, counters)

	var msgs []outbox.Delayed
	want := map[string][]string{}
	for i := range each {
		for k := range keys {
			key, id := fmt.Sprintf("k%d", k), fmt.Sprintf("k%d-%d", k, i)
			msgs = append(msgs, after(time.Duration(i)*20*time.Millisecond, keyed(command("q", id), key)))
			want[key] = append(want[key], id)
		}
	}
	// Some are due in the past.
	schedule(t, db, msgs...)
	exec(t, db, `UPDATE scheduled_messages SET due_at = due_at - INTERVAL 1 DAY WHERE message_id LIKE '%-0'`)
	published(t, db, keys*each)
	got := map[string][]string{}
	for _, id := range f.all() {
		key, _, _ := strings.Cut(id, "-")
		got[key] = append(got[key], id)
	}
	for key := range want {
		equal(t, "published of "+key, got[key], want[key])
	}
	if n := number(t, db, `SELECT COUNT(*) FROM scheduled_messages`); n != 0 {
		t.Errorf("%d messages are still scheduled", n)
	}
	asked := 0
	for i, n := range asking(t, counters) {
		if n > before[i] {
			asked++
		}
	}
	if asked != 1 {
		t.Errorf("%d relays asked for due messages, want the leader alone", asked)
	}
	if told.Load() == 0 {
		t.Error("nobody was told of the promotion")
	}
}

// counted is a pool whose statements are counted.
func counted(t *testing.T, dsn string) (*bench.Statements, *sql.DB) {
	t.Helper()
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	c, err := bench.CountStatements(cfg.Net, cfg.Addr)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() { // after the pool has been closed
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	cfg.Net, cfg.Addr = "tcp", c.Addr()
	return c, open(t, cfg.FormatDSN())
}

// asking returns how often each has asked for due messages.
func asking(t *testing.T, counters []*bench.Statements) (ns []int) {
	t.Helper()
	for _, c := range counters {
		counts, err := c.Counts()
		if err != nil {
			t.Fatal(err)
		}
		ns = append(ns, counts["SELECT scheduled_messages"])
	}
	return ns
}

// Relays that all believe that they lead promote each message once, in the order of the due
// times, and none fails.
func TestPromotersAtOnce(t *testing.T) {
	t.Parallel()
	const n = 3000
	db := database(t)
	var msgs []outbox.Delayed
	for i, id := range names("m", n) {
		msgs = append(msgs, after(time.Duration(i)*time.Microsecond, command("q", id)))
	}
	schedule(t, db, msgs...)
	var wg sync.WaitGroup
	for range 3 {
		r := outbox.NewRelay(db, &fake{}, outbox.Config{Log: logger(t)})
		wg.Go(func() {
			for number(t, db, `SELECT COUNT(*) FROM scheduled_messages`) > 0 {
				if err := r.Promote(t.Context()); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	equal(t, "promoted", column(t, db, `SELECT message_id FROM outbox_events ORDER BY id`), names("m", n))
}

// A message that is due before all others is not kept waiting for them, whether its writer rings
// or not. Of the waits that are given here none ends before the test.
func TestScheduledWhileTheLeaderSleeps(t *testing.T) {
	t.Parallel()
	later := after(24*time.Hour, command("q", "tomorrow"))
	for name, tt := range map[string]struct {
		cfg   outbox.Config
		first []outbox.Delayed
		rings bool
	}{
		"on nothing":                 {outbox.Config{PollMax: time.Hour}, nil, false},
		"on a later one":             {outbox.Config{PollMax: time.Hour}, []outbox.Delayed{later}, false},
		"on a later one, and a ring": {outbox.Config{PollMax: time.Hour}.WithSchedulePoll(time.Hour), []outbox.Delayed{later}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := testenv.Database(t)
			db, f := open(t, dsn), &fake{}
			schedule(t, db, tt.first...)
			c, through := counted(t, dsn)
			r := start(t, through, f, tt.cfg)
			eventually(t, "it leads", r.Leads)
			r.Wake(outbox.AllShards) // it may have looked before it led
			eventually(t, "it has asked", func() bool { return asking(t, []*bench.Statements{c})[0] > 0 })
			schedule(t, db, after(30*time.Millisecond, command("q", "soon")), after(-time.Hour, command("q", "overdue")))
			if tt.rings {
				r.Wake(outbox.AllShards)
			}
			published(t, db, 2)
			same(t, "published", f.all(), []string{"overdue", "soon"})
		})
	}
}

// Writers whose transactions are open do not hold up what others have scheduled, however few
// messages there are.
func TestPromotionWaitsForNoWriter(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3, 1000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			db, f := database(t), &fake{}
			var msgs []outbox.Delayed
			for _, id := range names("m", n) {
				msgs = append(msgs, after(0, command("q", id)))
			}
			schedule(t, db, msgs...)
			writer, err := db.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if err := outbox.Schedule(t.Context(), sqltx.Join(writer), after(0, command("q", "open"))); err != nil {
					t.Fatal(err)
				}
			}
			start(t, db, f, outbox.Config{})
			published(t, db, n)
			// It was open all the time: the server ends those that are idle for a minute.
			if err := writer.Rollback(); err != nil {
				t.Errorf("roll back: %v", err)
			}
		})
	}
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
