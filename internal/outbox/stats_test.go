package outbox_test

import (
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
)

func TestStats(t *testing.T) {
	t.Parallel()
	db := database(t)
	look := func() outbox.Stats {
		t.Helper()
		st, err := outbox.LookAt(t.Context(), db)
		if err != nil {
			t.Fatal(err)
		}
		return st
	}
	if st := look(); st.Pending+st.Parked+st.Scheduled != 0 || st.Oldest != 0 || len(st.Shards) != message.Shards || len(st.Destinations) != 0 || st.At.IsZero() {
		t.Errorf("empty: %+v", st)
	}
	exec(t, db, `UPDATE outbox_shards SET owner = 'r1' WHERE shard = ?`, message.Shard("a"))
	add(t, db, keyed(command("q", "old"), "a"), keyed(command("q", "new"), "a"), command("other", "parked"),
		command("q", "sent"), command("q", "sent long ago"), to("events", "x", "event"))
	exec(t, db, `UPDATE outbox_events SET created_at = NOW(6) - INTERVAL 1 HOUR WHERE message_id = 'old'`)
	park(t, db, "parked")
	exec(t, db, `UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6) WHERE message_id IN ('sent', 'event')`)
	exec(t, db, `UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6) - INTERVAL 2 MINUTE WHERE message_id = 'sent long ago'`)
	for i, due := range []string{"- INTERVAL 5 MINUTE", "- INTERVAL 1 SECOND", "+ INTERVAL 1 HOUR"} {
		exec(t, db, `INSERT INTO scheduled_messages (due_at, message_id, ordering_key, exchange, routing_key, properties, headers, payload)
VALUES (NOW(6) `+due+`, ?, 'k', 'e', 'r', '', '', '')`, fmt.Sprint(i))
	}
	st := look()
	if st.Pending != 2 || st.Parked != 1 || st.Scheduled != 3 || st.Due != 2 {
		t.Errorf("counts %+v", st)
	}
	if st.Oldest < 3600 || st.Oldest > 3700 || st.OldestDue < 300 || st.OldestDue > 400 {
		t.Errorf("oldest %f s, oldest due %f s", st.Oldest, st.OldestDue)
	}
	if st.RateOver != 60 || st.Rate != 2.0/60 {
		t.Errorf("rate %f over %f s, want 2 rows in a minute", st.Rate, st.RateOver)
	}
	if sh := st.Shards[message.Shard("a")]; sh.Owner != "r1" || sh.Pending != 2 || sh.Oldest < 3600 {
		t.Errorf("shard %+v", sh)
	}
	if sh := st.Shards[message.Shard("parked")]; sh.Parked != 1 {
		t.Errorf("shard %+v", sh)
	}
	var names []string
	for _, d := range st.Destinations {
		names = append(names, fmt.Sprintf("%s/%s %d %d", d.Exchange, d.RoutingKey, d.Pending, d.Parked))
	}
	equal(t, "destinations", names, []string{"backstep.commands/q 2 0", "backstep.commands/other 0 1", "events/x 0 0"})
	if st.Destinations[0].Rate != 1.0/60 || st.Destinations[0].Oldest < 3600 || st.Destinations[2].Rate != 1.0/60 {
		t.Errorf("destinations %+v", st.Destinations)
	}
}

// What operators ask does not read what was published: each query is served by its index, and
// looking at an outbox of 50,000 published rows looks at a handful of them.
func TestOperatorsQueriesUseTheirIndexes(t *testing.T) {
	t.Parallel()
	db := database(t)
	queries := outbox.StatsQueries()
	key := outbox.Filter{Key: "k", Type: "t"}
	some := outbox.Filter{Type: "t", Queue: "q", RoutingKey: "q", Since: time.Now().Add(-time.Hour), Before: time.Now()}
	for _, f := range []outbox.Filter{{}, key, some} {
		for _, s := range []outbox.Status{outbox.StatusPending, outbox.StatusParked, outbox.StatusPublished} {
			queries = append(queries, f.ListQuery(s, 51))
		}
	}
	check := func(what string) {
		t.Helper()
		for _, q := range queries {
			parts := 0
			for _, line := range plan(t, db, q.SQL, q.Args...) {
				if line["table"] != "outbox_events" {
					continue // what was read of it, grouped
				}
				parts++
				if line["key"] != q.Index || !slices.Contains([]string{"ref", "range"}, line["type"]) || strings.Contains(line["Extra"], "filesort") {
					t.Errorf("%s: %v\n%s", what, line, q.SQL)
				}
			}
			if parts == 0 {
				t.Errorf("%s: not a look at outbox_events\n%s", what, q.SQL)
			}
		}
	}
	add(t, db, command("q", "one"), command("q", "two"))
	park(t, db, "two")
	check("two rows")
	exec(t, db, fillSQL, "PUBLISHED")
	exec(t, db, `UPDATE outbox_events SET published_at = NOW(6) - INTERVAL 1 HOUR WHERE status = 'PUBLISHED'`)
	check("50,000 published")
	exec(t, db, `ANALYZE TABLE outbox_events`)
	check("50,000 published, analyzed")

	var st outbox.Stats
	n := looksAt(t, db, func(conn *sql.Conn) {
		var err error
		if st, err = outbox.LookAt(t.Context(), conn); err != nil {
			t.Fatal(err)
		}
	})
	if n > 500 {
		t.Errorf("stats of 50,000 published rows look at %d", n)
	}
	if st.Pending != 1 || st.Parked != 1 || st.PublishedEstimate < 25_000 || st.PublishedEstimate > 100_000 {
		t.Errorf("pending %d, parked %d, published about %d", st.Pending, st.Parked, st.PublishedEstimate)
	}
	n = looksAt(t, db, func(conn *sql.Conn) {
		list, more, err := outbox.List(t.Context(), conn, outbox.Filter{}, 50, outbox.StatusParked, outbox.StatusPending, outbox.StatusPublished)
		if err != nil || len(list) != 50 || !more {
			t.Errorf("%d rows, more %t, %v", len(list), more, err)
		}
	})
	if n > 200 {
		t.Errorf("a list of 50 among 50,000 rows looks at %d", n)
	}
	// A faster outbox than 10,000 rows a minute tells by the last 10,000.
	exec(t, db, `UPDATE outbox_events SET published_at = NOW(6) - INTERVAL (id MOD 10) SECOND WHERE status = 'PUBLISHED'`)
	st, err := outbox.LookAt(t.Context(), db)
	if err != nil || st.RateOver >= 60 || st.Rate < 500 {
		t.Errorf("rate %f over %f s, %v", st.Rate, st.RateOver, err)
	}
}

func TestList(t *testing.T) {
	t.Parallel()
	db := database(t)
	event := to("backstep.events", "order.created", "event")
	event.Type = "order.created"
	add(t, db, keyed(command("q", "pending"), "a"), keyed(command("q2", "parked"), "a"), keyed(command("q", "sent"), "a"), event, keyed(command("q", "sent later"), "b"))
	exec(t, db, `UPDATE outbox_events SET created_at = NOW(6) - INTERVAL 1 HOUR WHERE message_id IN ('pending', 'parked')`)
	park(t, db, "parked")
	exec(t, db, `UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6) - INTERVAL 10 MINUTE WHERE message_id IN ('sent', 'event')`)
	exec(t, db, `UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6) - INTERVAL 1 MINUTE WHERE message_id = 'sent later'`)
	now, err := outbox.Now(t.Context(), db)
	if err != nil {
		t.Fatal(err)
	}
	all := []outbox.Status{outbox.StatusParked, outbox.StatusPending, outbox.StatusPublished}
	tests := []struct {
		f        outbox.Filter
		statuses []outbox.Status
		limit    int
		want     string
		more     bool
	}{
		{outbox.Filter{}, all, 50, "parked pending sent later event sent", false},
		{outbox.Filter{}, all, 2, "parked pending", true},
		{outbox.Filter{}, all, 5, "parked pending sent later event sent", false},
		{outbox.Filter{}, all, 4, "parked pending sent later event", true},
		{outbox.Filter{}, all[2:], 50, "sent later event sent", false},
		{outbox.Filter{Key: "a"}, all, 50, "parked pending sent", false},
		{outbox.Filter{Key: "nobody's"}, all, 50, "", false},
		{outbox.Filter{Type: "order.created"}, all, 50, "event", false},
		{outbox.Filter{Queue: "q"}, all, 50, "pending sent later sent", false},
		{outbox.Filter{Queue: "order.created"}, all, 50, "", false},
		{outbox.Filter{RoutingKey: "order.created"}, all, 50, "event", false},
		{outbox.Filter{Since: now.Add(-5 * time.Minute)}, all, 50, "sent later", false},
		{outbox.Filter{Before: now.Add(-5 * time.Minute)}, all, 50, "parked pending event sent", false},
	}
	for _, tt := range tests {
		list, more, err := outbox.List(t.Context(), db, tt.f, tt.limit, tt.statuses...)
		if err != nil {
			t.Fatal(err)
		}
		var ids []string
		for _, i := range list {
			ids = append(ids, i.MessageID)
		}
		if got := strings.Join(ids, " "); got != tt.want || more != tt.more {
			t.Errorf("List(%+v, %d) = %q, more %t, want %q, %t", tt.f, tt.limit, got, more, tt.want, tt.more)
		}
	}
	ids, err := outbox.Choose(t.Context(), db, outbox.Filter{}, outbox.StatusPublished, 2)
	equal(t, "chosen", ids, []uint64{3, 4})
	if err != nil {
		t.Error(err)
	}
	list, _, err := outbox.List(t.Context(), db, outbox.Filter{}, 1, outbox.StatusParked)
	if err != nil || len(list) != 1 || list[0].Attempts != 3 || list[0].LastError != "NO_ROUTE" || list[0].Age < time.Hour || list[0].Shard != message.Shard("a") {
		t.Errorf("list %+v, %v", list, err)
	}
}

func TestRelays(t *testing.T) {
	t.Parallel()
	db := database(t)
	exec(t, db, `UPDATE outbox_shards SET owner = CASE WHEN shard < 3 THEN 'host-17-0123abcd' WHEN shard < 5 THEN 'gone' END, epoch = 2,
 leased_until = NOW(6) + INTERVAL 4 SECOND, recalled = shard = 1`)
	exec(t, db, `INSERT INTO relay_members VALUES ('host-17-0123abcd', 'host', 9, NOW(6) - INTERVAL 1 HOUR, NOW(6) - INTERVAL 1 MINUTE), ('idle', 'host', 1, NOW(6), NOW(6))`)
	relays, free, err := outbox.Relays(t.Context(), db)
	if err != nil || len(relays) != 3 || len(free) != 11 || free[0].Shard != 5 {
		t.Fatalf("relays %+v, free %+v, %v", relays, free, err)
	}
	r := relays[0]
	if r.ID != "host-17-0123abcd" || r.Host != "host" || r.PID != 17 || r.Heartbeats != 9 || r.Silent < time.Minute || r.Uptime < time.Hour || len(r.Shards) != 3 {
		t.Errorf("relay %+v", r)
	}
	if s := r.Shards[1]; s.Shard != 1 || s.Epoch != 2 || !s.Recalled || s.Left <= 0 || s.Left > 4*time.Second {
		t.Errorf("shard %+v", s)
	}
	if r := relays[1]; r.ID != "idle" || r.PID != 0 || len(r.Shards) != 0 {
		t.Errorf("relay %+v", r)
	}
	if r := relays[2]; r.ID != "gone" || !r.HeartbeatAt.IsZero() || len(r.Shards) != 2 {
		t.Errorf("relay %+v", r)
	}
}

func TestGet(t *testing.T) {
	t.Parallel()
	db := database(t)
	m := keyed(command("q", "second"), "k")
	m.Headers, m.Body = message.Headers{"h": int32(5)}, []byte(`{"a":1}`)
	add(t, db, keyed(command("q", "first"), "k"), m, command("q", "refused"))
	exec(t, db, `UPDATE outbox_events SET attempts = 2, last_error = 'NO_ROUTE' WHERE message_id = 'refused'`)
	exec(t, db, `UPDATE outbox_shards SET owner = 'r1' WHERE shard = ?`, message.Shard("k"))
	d, err := outbox.Get(t.Context(), db, rowID(t, db, "second"))
	if err != nil {
		t.Fatal(err)
	}
	if d.Message.Headers["h"] != int32(5) || string(d.Message.Body) != `{"a":1}` || d.Message.ContentType != "application/json" || d.Fault != "" {
		t.Errorf("message %+v, fault %q", d.Message, d.Fault)
	}
	if d.Owner != "r1" || d.Silent >= 0 || d.Ahead == nil || d.Ahead.MessageID != "first" || d.Held == nil || d.Held.MessageID != "refused" {
		t.Errorf("it waits for %+v", d)
	}
	exec(t, db, `INSERT INTO relay_members VALUES ('r1', 'host', 9, NOW(6), NOW(6) - INTERVAL 1 MINUTE)`)
	exec(t, db, `UPDATE outbox_events SET headers = 'nope' WHERE message_id = 'first'`)
	d, err = outbox.Get(t.Context(), db, rowID(t, db, "first"))
	if err != nil || d.Silent < time.Minute || d.Ahead != nil || d.Fault == "" {
		t.Errorf("the first: %+v, %v", d, err)
	}
	if _, err := outbox.Get(t.Context(), db, 99); err == nil {
		t.Error("no error for a row that is not there")
	}
	items, err := outbox.Items(t.Context(), db, []uint64{3, 1, 99})
	if err != nil || len(items) != 2 || items[0].MessageID != "first" {
		t.Errorf("items %+v, %v", items, err)
	}
}
