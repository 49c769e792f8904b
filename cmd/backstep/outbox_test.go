package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

// outboxOf returns an operator of a database with the schema, and a pool on it.
func outboxOf(t *testing.T, env ...string) (*operator, *sql.DB) {
	t.Helper()
	dsn := testenv.Database(t)
	o := newOperator(t, append(env, "BACKSTEP_MYSQL_DSN="+dsn)...)
	o.run("", "migrate", "up").want(exitOK)
	db, err := sqltx.Open(dsn, sqltx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return o, db
}

func execute(t *testing.T, db *sql.DB, query string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// rowsAre demands how many rows there are of each status: PENDING, PARKED, PUBLISHED.
func rowsAre(t *testing.T, db *sql.DB, want ...int) {
	t.Helper()
	counts, err := outbox.Counts(t.Context(), db)
	if err != nil {
		t.Fatal(err)
	}
	if got := []int{counts["PENDING"], counts["PARKED"], counts["PUBLISHED"]}; !slices.Equal(got, want) {
		t.Errorf("%v rows are PENDING, PARKED, PUBLISHED, want %v", got, want)
	}
}

// fill makes the outbox have these rows and no others: 1 PENDING, 2 and 3 PARKED, 4 and 5
// PUBLISHED an hour ago.
func fill(t *testing.T, db *sql.DB) {
	t.Helper()
	execute(t, db, `TRUNCATE TABLE outbox_events`)
	execute(t, db, `TRUNCATE TABLE outbox_actions`)
	command := func(id, queue string, body string) message.Message {
		return message.Message{
			Properties:  message.Properties{MessageID: id, Type: "place-order.charge-payment", CorrelationID: "c"},
			Headers:     message.Headers{message.HeaderSagaID: "saga-1", message.HeaderTraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "n": int32(7)},
			Body:        []byte(body),
			Exchange:    message.CommandsExchange,
			RoutingKey:  queue,
			Mandatory:   true,
			OrderingKey: "key-1",
		}
	}
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		return outbox.Add(ctx, tx, command("pending", "payment", `{"a":1}`), command("parked", "payment", `{"b":[2]}`),
			command("parked-too", "inventory", "\x00\xffraw"), command("sent", "payment", `{}`),
			message.Message{
				Properties: message.Properties{MessageID: "event\x1b[31m", Type: "order.confirmed"},
				Exchange:   message.EventsExchange, RoutingKey: "order.confirmed", Body: []byte(`{}`),
			})
	})
	if err != nil {
		t.Fatal(err)
	}
	execute(t, db, `UPDATE outbox_events SET status = 'PARKED', attempts = 3, last_error = 'NO_ROUTE: no queue' WHERE id IN (2, 3)`)
	execute(t, db, `UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6) - INTERVAL 1 HOUR WHERE id IN (4, 5)`)
}

func TestOutboxLooks(t *testing.T) {
	t.Parallel()
	o, db := outboxOf(t)
	o.run("", "outbox", "list").want(exitOK, "no such rows are PARKED, PENDING")
	o.run("", "outbox", "relays").want(exitOK, "No relay owns 16 shards (0-15)")
	o.run("", "outbox", "stats").want(exitOK, "pending    0", "rate       0.0/s")
	fill(t, db)

	o.run("", "outbox", "list").want(exitOK, "parked-too", "NO_ROUTE: no queue", "place-order.charge-payment", "backstep.commands payment", "key-1")
	a := o.run("", "outbox", "list", "--status", "published").want(exitOK, "sent", `event\x1b[31m`)
	if strings.Contains(a.stdout, "\x1b") {
		t.Error("a message id steers the terminal")
	}
	o.run("", "outbox", "list", "--max", "1").want(exitOK, "parked", "there are more")
	o.run("", "outbox", "list", "--status", "PUBLISHED", "--since", "30m").want(exitOK, "no such rows are PUBLISHED")
	var list struct {
		Rows []outbox.Item
		More bool
	}
	for args, want := range map[string]string{
		"":                                  "parked parked-too pending",
		"--status PENDING":                  "pending",
		"--queue inventory":                 "parked-too",
		"--key key-1 --max 2":               "parked parked-too",
		"--type order.confirmed":            "",
		"--routing-key payment --older 1ns": "parked pending",
		"--status PUBLISHED --since 2h --type place-order.charge-payment": "sent",
		"--since 2020-01-01T00:00:00Z --status PENDING,PARKED":            "pending parked parked-too",
		"--older 2020-01-01T00:00:00+01:00":                               "",
	} {
		list.Rows = nil
		o.run("", append([]string{"outbox", "list", "--json"}, strings.Fields(args)...)...).want(exitOK).decode(&list)
		var ids []string
		for _, r := range list.Rows {
			ids = append(ids, r.MessageID)
		}
		if got := strings.Join(ids, " "); got != want || list.More != strings.Contains(args, "--max") {
			t.Errorf("list %s has %q, more %t, want %q", args, got, list.More, want)
		}
	}

	o.run("", "outbox", "show", "1").want(exitOK, "none owns shard", "PENDING", `"a": 1`, "saga-1", "0af7651916cd43dd8448eb211c80319c", "x-saga-id",
		"backstep outbox drop 1", "backstep saga show saga-1", "correlation_id")
	o.run("", "outbox", "show", "parked-too").want(exitOK, "NO_ROUTE: no queue", "00 ff 72 61 77", "payload, 5 bytes", "backstep outbox requeue 3", "backstep outbox drop 3")
	o.run("", "outbox", "show", "sent").want(exitOK, "backstep outbox republish --key key-1 --since")
	if a := o.run("", "outbox", "show", "3", "--body").want(exitOK); a.stdout != "\x00\xffraw" {
		t.Errorf("body %q", a.stdout)
	}
	var s shownRow
	o.run("", "outbox", "show", "1", "--json").want(exitOK).decode(&s)
	if s.ID != 1 || s.SagaID != "saga-1" || s.TraceID == "" || string(s.Payload) == "" || !strings.Contains(string(s.Headers), `"$int32": "7"`) || len(s.Advice) == 0 {
		t.Errorf("shown %+v", s)
	}
	s = shownRow{}
	o.run("", "outbox", "show", "3", "--json").want(exitOK).decode(&s)
	if string(s.Base64) != "\x00\xffraw" || s.Payload != nil {
		t.Errorf("shown %+v", s)
	}
	o.run("", "outbox", "show", "nobody").want(exitFailed, `no outbox row has the id or the message id "nobody"`, "backstep outbox list")
	execute(t, db, `INSERT INTO scheduled_messages (due_at, message_id, ordering_key, exchange, routing_key, properties, headers, payload, last_error)
VALUES (NOW(6) + INTERVAL 1 HOUR, 'later', 'k', 'e', 'r', '', '', '', 'gateway away')`)
	o.run("", "outbox", "show", "later").want(exitFailed, `message "later" is scheduled`, "gateway away")

	execute(t, db, `UPDATE outbox_shards SET owner = 'relay-1', epoch = 3, leased_until = NOW(6) + INTERVAL 85 MINUTE WHERE shard < 4 OR shard = ?`, message.Shard("key-1"))
	execute(t, db, `INSERT INTO relay_members VALUES ('relay-1', 'host-1', 9, NOW(6) - INTERVAL 1 DAY, NOW(6) - INTERVAL 3 SECOND)`)
	o.run("", "outbox", "relays").want(exitOK, "relay-1", "host-1", "0-3", "LEASE GOOD FOR", "1h2", "counters and no clock", "No relay owns")
	var relays relayList
	o.run("", "outbox", "relays", "--json").want(exitOK).decode(&relays)
	if len(relays.Relays) != 1 || relays.Relays[0].HeartbeatAge == nil || *relays.Relays[0].HeartbeatAge < 3 || len(relays.Free)+len(relays.Relays[0].Shards) != message.Shards {
		t.Errorf("relays %+v", relays)
	}
	o.run("", "outbox", "show", "1").want(exitOK, "Relay relay-1 owns its shard; its last heartbeat was", "Nothing in the database holds it up", "destination held")
	execute(t, db, `UPDATE outbox_events SET status = 'PENDING' WHERE id = 2`)
	o.run("", "outbox", "show", "1").want(exitOK, "Its destination is held: the broker refused row 2", "backstep topology apply")
	o.run("", "outbox", "show", "2").want(exitOK, "The broker has refused it 3 times", "backstep outbox show 1")
	execute(t, db, `DELETE FROM relay_members`)
	o.run("", "outbox", "show", "1").want(exitOK, "but is gone")
	o.run("", "outbox", "relays").want(exitOK, "none: it is gone")

	o.run("", "outbox", "stats").want(exitOK, "pending    2, the oldest for", "parked     1; backstep outbox list --status PARKED", "backstep.commands  payment", "relay-1", "scheduled  1, 0 of them due")
	var st outbox.Stats
	o.run("", "outbox", "stats", "--json").want(exitOK).decode(&st)
	if st.Pending != 2 || st.Parked != 1 || st.Scheduled != 1 || len(st.Shards) != message.Shards {
		t.Errorf("stats %+v", st)
	}
	watch := o.start("backstep", "outbox", "stats", "--watch", "--interval", "10ms", "--json")
	eventually(t, "it looks again", func() error {
		if n := strings.Count(watch.text(), "\n"); n < 3 {
			return fmt.Errorf("%d looks", n)
		}
		return nil
	})
	if code := watch.stop(syscall.SIGINT); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	line, _, _ := strings.Cut(watch.text(), "\n")
	if err := json.Unmarshal([]byte(line), &st); err != nil {
		t.Errorf("%q: %v", line, err)
	}
}

func TestOutboxChanges(t *testing.T) {
	t.Parallel()
	broker := testenv.Vhost(t)
	o, db := outboxOf(t, "BACKSTEP_AMQP_URL="+broker.URL)
	fill(t, db)
	because := []string{"--reason", "queue is back", "--actor", "ops"}
	run := func(args ...string) answer { t.Helper(); return o.run("", append([]string{"outbox"}, args...)...) }
	with := func(args ...string) answer { t.Helper(); return run(append(args, because...)...) }

	// The doorbell has no exchange yet: said, and no failure.
	run("requeue", "parked", "--dry-run").want(exitOK, "NO_ROUTE", "1 row chosen; nothing was done")
	rowsAre(t, db, 1, 2, 2)
	with("requeue", "parked", "nobody").want(exitFailed, `"nobody"`)
	rowsAre(t, db, 1, 2, 2)
	with("requeue", "parked", "2", "sent").want(exitOK, "row 2, message parked: requeued: it was parked: NO_ROUTE", "row 4, message sent: left as it is: it is PUBLISHED already", "1 row requeued",
		"note: the relays' doorbell was not rung")
	o.run("", "topology", "apply").want(exitOK)
	a := with("requeue", "parked").want(exitOK, "it is PENDING already", "0 rows requeued")
	if strings.Contains(a.stderr, "doorbell") {
		t.Errorf("the doorbell did not ring: %s", a.stderr)
	}
	rowsAre(t, db, 2, 1, 2)
	run("show", "parked").want(exitOK, "requeue by ops, because: queue is back", "sent again")

	fill(t, db)
	with("requeue", "--queue", "nowhere").want(exitOK, "0 rows requeued")
	with("requeue", "--all", "--max", "1").want(exitOK, "row 2, message parked: requeued", "1 row requeued", "there are more")
	var requeued struct {
		Requeued int
		Rows     []changedRow
	}
	with("requeue", "--all", "--rate", "1", "--json").want(exitOK).decode(&requeued)
	if requeued.Requeued != 1 || len(requeued.Rows) != 1 || requeued.Rows[0].ID != 3 || !requeued.Rows[0].Done {
		t.Errorf("requeued %+v", requeued)
	}
	rowsAre(t, db, 3, 0, 2)

	// No relay runs, so nothing has to be called back.
	fill(t, db)
	run("drop", "1", "parked", "sent", "--dry-run").want(exitOK, "nothing was done")
	rowsAre(t, db, 1, 2, 2)
	with("drop", "1", "parked", "sent").want(exitFailed, "row 1, message pending: dropped", "row 2, message parked: dropped", "row 4, message sent: it is PUBLISHED", "not dropped: 1 of 3 rows")
	rowsAre(t, db, 0, 1, 2)
	with("drop", "1", "parked").want(exitOK, "row 1: dropped before, by ops", "row 2: dropped before, by ops")
	with("drop", "99").want(exitFailed, `"99"`)
	run("show", "parked").want(exitFailed, `row 2, message "parked", was dropped by ops at`, "queue is back")
	with("requeue", "1").want(exitFailed, `row 1, message "pending", was dropped by ops`)
	var dropped struct {
		Dropped int
		Rows    []outbox.Fate
	}
	with("drop", "3", "--json").want(exitOK).decode(&dropped)
	if dropped.Dropped != 1 || len(dropped.Rows) != 1 || dropped.Rows[0].MessageID != "parked-too" {
		t.Errorf("dropped %+v", dropped)
	}
	execute(t, db, `UPDATE outbox_events SET status = 'PENDING', message_id = 'same'`)
	with("drop", "same").want(exitFailed, "has the rows [4 5] that are not published; name one of them")
	execute(t, db, `UPDATE outbox_shards SET owner = 'dead'`)
	with("drop", "4", "--patience", "100ms").want(exitFailed, "not dropped yet, but PARKED", "relay dead, which has no heartbeat")
	run("show", "4").want(exitOK, "withdrawn by ops, to be dropped: queue is back")

	// Who it was, if nobody says.
	run("requeue", "4", "--reason", "a mistake").want(exitOK, "1 row requeued")
	var actor string
	if err := db.QueryRowContext(t.Context(), `SELECT actor FROM outbox_actions ORDER BY id DESC LIMIT 1`).Scan(&actor); err != nil || actor != self() {
		t.Errorf("actor %q, %v, want %q", actor, err, self())
	}

	fill(t, db)
	run("republish", "--since", "2h", "--dry-run").want(exitOK, "2 rows would be sent again, published from")
	rowsAre(t, db, 1, 2, 2)
	with("republish", "--since", "30m").want(exitOK, "0 rows sent again")
	var again republished
	with("republish", "--since", "2h", "--until", "30m", "--queue", "payment", "--json").want(exitOK).decode(&again)
	if again.Republished != 1 || again.Chosen != 1 || again.Until.Sub(again.Since) != 90*time.Minute {
		t.Errorf("republished %+v", again)
	}
	with("republish", "--type", "order.confirmed", "--max", "1").want(exitOK, "1 row sent again")
	rowsAre(t, db, 3, 2, 0)
	run("show", "sent").want(exitOK, "republish by ops", "sent again", "PENDING")
}

// TestOutboxWithSagas goes through what operators do while workers and relays run: a held
// command is dropped, and its saga waits for somebody; a parked one is requeued, and its saga
// moves on by itself; what was published is sent once more, and nothing happens twice.
func TestOutboxWithSagas(t *testing.T) {
	t.Parallel()
	broker := testenv.Vhost(t)
	env := []string{"BACKSTEP_AMQP_URL=" + broker.URL, "BACKSTEP_AMQP_MANAGEMENT_URL=" + broker.ManagementURL, "BACKSTEP_RELAY_LEASE_TTL=2s"}
	o, db := outboxOf(t, env...)
	o.run("", "topology", "apply").want(exitOK)
	o.start("worker")
	relay := o.start("relay")
	relay.says("connected to the broker") // it has declared what was missing
	o.run("", "submit", "--count", "1", "--stock", "1000").want(exitOK)
	o.run("", "verify", "--wait", patience.String()).want(exitOK, "1 order")

	// The relay finds no route to payment, and tries again and again.
	broker.Unbind(t, message.CommandsExchange, handlers.PaymentQueue, handlers.PaymentQueue)
	o.run("", "submit", "--count", "1", "--seed", "2").want(exitOK)
	held := awaitRow(t, o, "PENDING", func(i outbox.Item) bool { return i.Attempts > 0 })
	o.run("", "outbox", "show", held.MessageID).want(exitOK, "The broker has refused it", "backstep topology apply", "backstep saga show "+held.Key)
	o.run("", "outbox", "relays").want(exitOK, "0-15", "ago")
	o.run("", "outbox", "drop", fmt.Sprint(held.ID), "--reason", "never charge this").want(exitOK, "dropped")
	o.run("", "saga", "show", held.Key).want(exitOK, "MANUAL_ACTION", "to be dropped: never charge this", "It was dropped, or")
	o.run("", "topology", "apply").want(exitOK)

	// Another relay parks what has no route, soon.
	if code := relay.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("the relay exited with %d", code)
	}
	o.env = append(o.env, "BACKSTEP_RELAY_PARK_AFTER=1s")
	o.start("relay").says("connected to the broker")
	broker.Unbind(t, message.CommandsExchange, handlers.PaymentQueue, handlers.PaymentQueue)
	o.run("", "submit", "--count", "2", "--seed", "3").want(exitOK)
	var sagas []saga.Summary
	eventually(t, "their sagas wait for somebody", func() error {
		o.run("", "saga", "list", "--status", "MANUAL_ACTION", "--json").want(exitOK).decode(&sagas)
		if len(sagas) != 3 {
			return fmt.Errorf("%d sagas", len(sagas))
		}
		return nil
	})
	parked := awaitRow(t, o, "PARKED", func(outbox.Item) bool { return true })
	o.run("", "saga", "show", parked.Key).want(exitOK, "backstep outbox requeue "+parked.MessageID)
	o.run("", "topology", "apply").want(exitOK)
	o.run("", "outbox", "requeue", "--queue", handlers.PaymentQueue, "--reason", "payment is bound again").want(exitOK, "2 rows requeued")
	eventually(t, "their sagas complete by themselves", func() error {
		o.run("", "saga", "list", "--json").want(exitOK).decode(&sagas)
		n := map[saga.Status]int{}
		for _, s := range sagas {
			n[s.Status]++
		}
		if n[saga.Completed] != 3 || n[saga.ManualAction] != 1 {
			return fmt.Errorf("sagas %v", n)
		}
		return nil
	})
	if s := sagas[slices.IndexFunc(sagas, func(s saga.Summary) bool { return s.Status == saga.ManualAction })]; s.ID != held.Key {
		t.Errorf("saga %s is in MANUAL_ACTION, want %s, whose command was dropped", s.ID, held.Key)
	}

	// Everything once more: the workers know it all.
	var before, after string
	const effects = `SELECT CONCAT_WS(' ', (SELECT COUNT(*) FROM payments), (SELECT COUNT(*) FROM shipments), (SELECT SUM(reserved) FROM inventory),
 (SELECT SUM(shipped) FROM inventory), (SELECT COUNT(*) FROM inbox_messages), (SELECT COUNT(*) FROM outbox_events))`
	atRest := func() error {
		var st outbox.Stats
		o.run("", "outbox", "stats", "--json").want(exitOK).decode(&st)
		if st.Pending+st.Scheduled > 0 {
			return fmt.Errorf("%d pending", st.Pending)
		}
		return nil
	}
	eventually(t, "all is published", atRest)
	if err := db.QueryRowContext(t.Context(), effects).Scan(&before); err != nil {
		t.Fatal(err)
	}
	var again republished
	o.run("", "outbox", "republish", "--since", "1h", "--reason", "the disk is gone", "--json").want(exitOK).decode(&again)
	if again.Republished < 10 || again.Republished != again.Chosen {
		t.Errorf("republished %+v", again)
	}
	eventually(t, "all is published again", atRest)
	until := again.Until.Format(time.RFC3339Nano)
	o.run("", "outbox", "republish", "--since", "1h", "--until", until, "--reason", "the disk is gone").want(exitOK, "0 rows sent again")
	eventually(t, "the copies are taken from the queues", func() error {
		for _, q := range handlers.Queues {
			if ready, unacked := broker.Queue(t, q); ready+unacked > 0 {
				return fmt.Errorf("%s has %d", q, ready+unacked)
			}
		}
		return nil
	})
	if err := db.QueryRowContext(t.Context(), effects).Scan(&after); err != nil || after != before {
		t.Errorf("effects %q, %v, then %q", before, err, after)
	}
}

// awaitRow waits for a row to the payment queue.
func awaitRow(t *testing.T, o *operator, status string, is func(outbox.Item) bool) (row outbox.Item) {
	t.Helper()
	eventually(t, "a row is "+status, func() error {
		var list struct{ Rows []outbox.Item }
		o.run("", "outbox", "list", "--queue", handlers.PaymentQueue, "--status", status, "--json").want(exitOK).decode(&list)
		if i := slices.IndexFunc(list.Rows, is); i >= 0 {
			row = list.Rows[i]
			return nil
		}
		return fmt.Errorf("%+v", list.Rows)
	})
	return row
}
