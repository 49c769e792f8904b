package main

import (
	"bytes"
	"database/sql"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
	"backstep/internal/inbox"
	"backstep/internal/message"
	"backstep/internal/testenv"
)

// lotOf returns an operator of a database with the schema and a virtual host with the queues.
func lotOf(t *testing.T) (*operator, *sql.DB, *testenv.Broker) {
	t.Helper()
	broker := testenv.Vhost(t)
	o, db := outboxOf(t, "BACKSTEP_AMQP_URL="+broker.URL, "BACKSTEP_AMQP_MANAGEMENT_URL="+broker.ManagementURL)
	o.run("", "topology", "apply").want(exitOK)
	return o, db, broker
}

// parkedCopy is a message as a lane parks it.
func parkedCopy(id, typ, reason string, at time.Time) amqp091.Publishing {
	return amqp091.Publishing{
		MessageId: id, Type: typ, ContentType: "application/json", AppId: "a client", DeliveryMode: 2, Body: []byte(`{"id":"` + id + `"}`),
		Headers: amqp091.Table{
			message.HeaderParkedReason: reason, message.HeaderParkedAt: at.UTC().Format(time.RFC3339Nano),
			message.HeaderParkedFrom: "a queue", "mine": int32(7),
		},
	}
}

// drained takes all messages off a queue and returns their ids, in order.
func drained(t *testing.T, broker *testenv.Broker, queue string) (ids []string) {
	t.Helper()
	for {
		d, ok := broker.Get(t, queue)
		if !ok {
			return ids
		}
		ids = append(ids, d.MessageId)
	}
}

// parkedList is what list --json says.
type parkedList struct {
	Groups []parkedGroup
	Queues []look
	More   bool
}

// parkedAre demands how many messages are parked from a queue.
func parkedAre(t *testing.T, o *operator, queue string, want int) {
	t.Helper()
	var list parkedList
	o.run("", "parked", "list", "--queue", queue, "--json").want(exitOK).decode(&list)
	n := 0
	for _, g := range list.Groups {
		n += g.Count
	}
	if n != want || list.More {
		t.Errorf("%d are parked from %s, want %d: %+v", n, queue, want, list)
	}
}

// replayed is what replay --json and drop --json say.
type replayed struct {
	Counts   map[fate]int
	More     bool
	Messages []parkedFate
}

func (r *replayed) want(t *testing.T, counts map[fate]int) {
	t.Helper()
	if !maps.Equal(r.Counts, counts) {
		t.Errorf("%v became of them, want %v: %+v", r.Counts, counts, r.Messages)
	}
}

var because = []string{"--reason", "cured, ticket 12", "--actor", "ops"}

// TestParkedList: the messages are counted by what they have in common, and are then as before.
func TestParkedList(t *testing.T) {
	o, _, broker := lotOf(t)
	o.run("", "parked", "list").want(exitOK, "no messages are parked")
	now := time.Now()
	var ids []string
	for i := range 40 {
		id := fmt.Sprintf("payment-%d", i)
		ids = append(ids, id)
		broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue,
			parkedCopy(id, "place-order.charge-payment", fmt.Sprintf(`step %d of "order %d": gateway away`, i, i), now.Add(-time.Duration(i)*time.Minute)))
	}
	odd := parkedCopy("\x1b[31mred", "odd", "unknown type \"odd\"", now.Add(-48*time.Hour))
	delete(odd.Headers, message.HeaderParkedAt)
	broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, odd)
	broker.Publish(t, message.ParkedExchange, handlers.OrdersQueue, parkedCopy("order-1", "order.create", "no lines", now))
	ids = append(ids, odd.MessageId)

	a := o.run("", "parked", "list").want(exitOK, `step N of "…": gateway away`, "40", "payment-0", `unknown type "…"`, "no lines", "order.create", "42 messages", `\x1b[31mred`)
	if strings.Contains(a.stdout, "\x1b") {
		t.Error("a message id steers the terminal")
	}
	for args, want := range map[string]int{
		"--queue payment":                       41,
		"--queue payment.parked,orders":         42,
		"--queue payment --because GATEWAY":     40,
		"--because gateway --because lines":     1,
		"--type order.create":                   1,
		"--since 9m30s":                         11, // and the order
		"--until 9m30s":                         30, // of the odd one nobody knows
		"--since 20m30s --until 9m30s":          11,
		"--since 2020-01-01T00:00:00Z":          41,
		"--id payment-3,order-1 --id payment-4": 3,
		"--queue shipping":                      0,
	} {
		var list parkedList
		o.run("", append([]string{"parked", "list", "--json"}, strings.Fields(args)...)...).want(exitOK).decode(&list)
		n := 0
		for _, g := range list.Groups {
			n += g.Count
		}
		if n != want || list.More {
			t.Errorf("list %s counts %d, want %d: %+v", args, n, want, list.Groups)
		}
	}
	var list parkedList
	o.run("", "parked", "list", "--json", "--queue", "payment").want(exitOK).decode(&list)
	if g := list.Groups[0]; g.Count != 40 || g.Queue != "payment" || g.Newest.Sub(g.Oldest) != 39*time.Minute || !slices.Equal(g.Types, []string{"place-order.charge-payment"}) ||
		g.Example != "payment-0" || g.Said != `step 0 of "order 0": gateway away` || list.Queues[0].There != 41 || list.Queues[0].Seen != 41 {
		t.Errorf("list %+v", list)
	}
	o.run("", "parked", "list", "--queue", "shipping").want(exitOK, "no such messages are parked")
	o.run("", "parked", "list", "--queue", "nowhere").want(exitFailed, `queue "nowhere.parked"`, "backstep topology apply")
	o.run("", "parked", "replay", "--queue", "payment", "--dry-run").want(exitOK, "41 messages would be replayed", "nothing was done")
	o.run("", "parked", "drop", "--all", "--dry-run").want(exitOK, "42 messages would be dropped", "nothing was done")
	if got := drained(t, broker, "payment.parked"); !slices.Equal(got, ids) {
		t.Errorf("after all this the queue has %q", got)
	}

	// A look at some says so.
	for _, id := range ids[:5] {
		broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, parkedCopy(id, "t", "r", now))
	}
	o.run("", "parked", "list", "--queue", "payment", "--max", "3", "--json").want(exitOK, "payment.parked has 5 messages; these were the first 3").decode(&list)
	if !list.More || list.Groups[0].Count != 3 {
		t.Errorf("list %+v", list)
	}
	parkedAre(t, o, "payment", 5)
}

func TestAlike(t *testing.T) {
	for reason, want := range map[string]string{
		"no message_id": "no message_id",
		"body of 300000 bytes; 262144 is the limit":                                "body of N bytes; N is the limit",
		`unknown type "a \" b"`:                                                    `unknown type "…"`,
		"saga 0194f1a4-5c00-7000-8000-000000000001: command parked":                "saga …: command parked",
		"made at 2026-11-29T12:00:00Z, longer ago than duplicates are known (24h)": "made at …, longer ago than duplicates are known (Nh)",
	} {
		if got := alike(reason); got != want {
			t.Errorf("alike(%q) = %q, want %q", reason, got, want)
		}
	}
	g := parkedGroups{}
	for i := range 3 * maxGroups {
		// Letters: numbers do not count.
		g.add(&inbox.Parked{Reason: strings.Repeat("x", i%100) + strings.Repeat("y", i/100)})
	}
	total := 0
	for _, x := range g.list() {
		total += x.Count
	}
	if n := len(g.list()); n > maxGroups+1 || total != 3*maxGroups {
		t.Errorf("%d groups of %d messages", n, total)
	}
}

// parkAll has a worker park messages sent to the orders queue, and ends it.
func parkAll(t *testing.T, o *operator, broker *testenv.Broker, msgs ...amqp091.Publishing) {
	t.Helper()
	worker, relay := o.start("worker"), o.start("relay")
	broker.Publish(t, message.CommandsExchange, handlers.OrdersQueue, msgs...)
	eventually(t, "all are parked", func() error {
		if ready, _ := broker.Queue(t, "orders.parked"); ready != len(msgs) {
			return fmt.Errorf("%d", ready)
		}
		return nil
	})
	for _, b := range []*background{worker, relay} {
		if code := b.stop(syscall.SIGTERM); code != exitOK {
			t.Errorf("exit code %d", code)
		}
	}
}

// TestParkedComesBackAsItWas: what a worker parked, whatever it was, is replayed byte for byte.
func TestParkedComesBackAsItWas(t *testing.T) {
	o, _, broker := lotOf(t)
	at := time.Now().UTC().Truncate(time.Second)
	every := amqp091.Table{
		"nil": nil, "bool": true, "int32": int32(-32), "int64": int64(1) << 60, "text": "grüße 😀", "not utf-8": "\xff\xfe", "bytes": []byte{0, 255},
		"decimal": amqp091.Decimal{Scale: 2, Value: -1999}, "time": at, "float": 0.1,
		"table": amqp091.Table{"list": []any{int64(1), amqp091.Table{"a": "b"}}},
	}
	large := maps.Clone(every)
	large["large"] = strings.Repeat("x", 40<<10)
	names := amqp091.Table{"\xff": amqp091.Table{"\xfe": []any{int32(1)}}, "plain": "x"}
	msgs := []amqp091.Publishing{
		{MessageId: "plain", Type: "order.create", Body: []byte("\x00 no JSON \xff")},
		{MessageId: "full", Type: "order.create", ContentType: "application/x-thing", ContentEncoding: "gzip", DeliveryMode: 2, Priority: 7, CorrelationId: "c",
			ReplyTo: "r", Expiration: "86400000", Timestamp: at, AppId: "a client", Headers: every, Body: []byte("{")},
		{MessageId: "large", Type: "odd", Headers: large, Body: bytes.Repeat([]byte("\xffx"), 50_000), DeliveryMode: 2},
		{MessageId: "names", Type: "odd", Headers: names, Body: nil, DeliveryMode: 2},
	}
	parkAll(t, o, broker, msgs...)
	o.run("", "parked", "show", "full").want(exitOK, "expiration", "86400000", "content_encoding", "grüße 😀", "orders.parked", "backstep parked replay full --queue orders",
		"backstep parked drop full", "payload, 1 byte")
	if a := o.run("", "parked", "show", "large", "--body").want(exitOK); a.stdout != string(msgs[2].Body) {
		t.Errorf("body of %d bytes", len(a.stdout))
	}
	var s shownParked
	o.run("", "parked", "show", "large", "--json").want(exitOK).decode(&s)
	if headers, err := message.DecodeHeaders(s.Headers); err != nil || len(headers) != len(large) || headers.String("large") != large["large"] || s.Verdict != wouldReplay {
		t.Errorf("shown %+v, %v", s.ParkedRecord, err)
	}
	o.run("", append([]string{"parked", "replay", "--all"}, because...)...).want(exitOK, "4 messages replayed")
	parkedAre(t, o, "orders", 0)
	for range msgs {
		d, ok := broker.Get(t, "orders")
		i := slices.IndexFunc(msgs, func(m amqp091.Publishing) bool { return m.MessageId == d.MessageId })
		if !ok || i < 0 {
			t.Fatalf("got %t, %q", ok, d.MessageId)
		}
		was := msgs[i]
		was.DeliveryMode = 2                  // all that is replayed is
		delete(d.Headers, "x-delivery-count") // the broker's
		if at, ok := d.Headers["time"].(time.Time); ok {
			d.Headers["time"] = at.UTC()
		}
		if was.Headers == nil {
			was.Headers = amqp091.Table{}
		}
		got := amqp091.Publishing{
			MessageId: d.MessageId, Type: d.Type, ContentType: d.ContentType, ContentEncoding: d.ContentEncoding, DeliveryMode: d.DeliveryMode, Priority: d.Priority,
			CorrelationId: d.CorrelationId, ReplyTo: d.ReplyTo, Expiration: d.Expiration, Timestamp: was.Timestamp, AppId: d.AppId, UserId: d.UserId,
			Headers: d.Headers, Body: was.Body,
		}
		if got.Headers == nil {
			got.Headers = amqp091.Table{}
		}
		if fmt.Sprintf("%#v", got) != fmt.Sprintf("%#v", was) || !bytes.Equal(d.Body, was.Body) || !d.Timestamp.Equal(was.Timestamp) {
			t.Errorf("%s came back as %.3000s, want %.3000s", was.MessageId, fmt.Sprintf("%#v", got), fmt.Sprintf("%#v", was))
		}
	}
}

// TestParkedReplay: what can be replayed is, and of the rest it is said why not.
func TestParkedReplay(t *testing.T) {
	o, db, broker := lotOf(t)
	now := time.Now()
	old := parkedCopy("old", "t", "r", now)
	old.Timestamp = now.Add(-15 * 24 * time.Hour)
	long := parkedCopy("long ago", "t", "r", now.Add(-15*24*time.Hour)) // when it was made nobody knows
	none := parkedCopy("given", "t", "no message_id", now)
	none.Headers[message.HeaderParkedProperties] = `{"type":"t"}`
	nameless := parkedCopy("", "t", "r", now)
	copies := parkedCopy("cc", "t", "r", now)
	copies.Headers[message.HeaderParkedEnvelope], copies.Headers[message.HeaderParkedProperties] = true, `{"message_id":"cc","user_id":"guest"}`
	copies.Body = []byte(`{"headers":{"CC":{"$list":["payment"]}},"body":"eA=="}`)
	torn := parkedCopy("torn", "t", "r", now)
	torn.Headers[message.HeaderParkedEnvelope] = true
	bad := parkedCopy("bad", "t", "r", now)
	bad.Headers[message.HeaderParkedProperties] = `{"message_id":"bad","expiration":"soon"}`
	broker.Publish(t, message.ParkedExchange, handlers.OrdersQueue,
		parkedCopy("one", "t", "r", now), old, long, none, nameless, torn, bad, parkedCopy("done", "t", "r", now), parkedCopy("one", "t", "r", now))
	broker.Publish(t, message.ParkedExchange, handlers.ShippingQueue, copies)
	execute(t, db, `INSERT INTO inbox_messages (consumer, message_id) VALUES ('orders', 'done'), ('payment', 'long ago')`)
	run := func(args ...string) answer {
		t.Helper()
		return o.run("", append(append([]string{"parked"}, args...), because...)...)
	}

	o.run("", "parked", "show", "old").want(exitOK, "It cannot be replayed as it is: it was made 15d0h ago", "backstep parked show old --body | backstep submit -")
	o.run("", "parked", "show", "given").want(exitOK, "it had none; that is the one it got when it was parked", "--give-id")
	o.run("", "parked", "show", "done").want(exitOK, "queue orders has recorded its id", "A replay would change nothing")
	o.run("", "parked", "show", "torn").want(exitOK, "the envelope does not decode")
	var r, some replayed
	run("replay", "--queue", "orders", "--dry-run", "--json").want(exitFailed, "not replayed: 5 of 9 messages").decode(&r)
	r.want(t, map[fate]int{fateReplayed: 2, fateKept: 1, fateDone: 1, fateRefused: 5})
	parkedAre(t, o, "orders", 9)

	a := run("replay", "--queue", "orders").want(exitFailed, "1 message replayed, 1 done already, 7 not",
		"message old: left as it is: it was made 15d0h ago", "message long ago: left as it is", "known for 14d0h (BACKSTEP_INBOX_RETENTION)",
		"message given: left as it is: it had no message_id", "message torn: left as it is: what it was before it was parked cannot be read",
		"message bad: left as it is: the broker refuses it", "message done: done already: queue orders has processed", "message one: left as it is: a copy of it was sent",
		"not replayed: 6 of 9 messages")
	if strings.Contains(a.stderr, "not finished") {
		t.Errorf("it says %s", a.stderr)
	}
	if got := drained(t, broker, "orders"); !slices.Equal(got, []string{"one"}) {
		t.Errorf("orders has %q", got)
	}
	parkedAre(t, o, "orders", 7)

	// Who does not know what became of a message sends its copy; then the worker has it.
	execute(t, db, `INSERT INTO inbox_messages (consumer, message_id) VALUES ('orders', 'one')`)
	run("replay", "one").want(exitOK, "0 messages replayed, 1 done already")
	run("replay", "one", "done", "long ago", "--queue", "orders,payment").want(exitFailed, "message one: done already: it had been processed, and was removed by ops at", "2 done already, 1 not")
	run("replay", "nobody").want(exitFailed, "message nobody: not found: no such message is parked from orders, inventory", "not replayed: 1 of 1 message")
	run("replay", "long ago", "--queue", "payment").want(exitOK, "it is not parked, and queue payment has processed it")
	run("replay", "given", "--give-id").want(exitOK, "1 message replayed")
	run("replay", "cc").want(exitOK, "without user_id", "without header CC")
	if d, ok := broker.Get(t, "shipping"); !ok || d.MessageId != "cc" || d.Headers["CC"] != nil || string(d.Body) != "x" {
		t.Errorf("shipping has %t, %+v", ok, d)
	}
	if got := drained(t, broker, "payment"); len(got) > 0 {
		t.Errorf("payment has %q", got)
	}
	d, ok := broker.Get(t, "orders")
	delete(d.Headers, "x-delivery-count") // the broker's
	if !ok || d.MessageId != "given" || d.Type != "t" || !maps.Equal(d.Headers, amqp091.Table{"mine": int32(7)}) {
		t.Errorf("orders has %t, %+v", ok, d)
	}
	run("replay", "given").want(exitOK, "queue orders has it, or has had it; it was replayed by ops at")

	// No queue: nothing is lost.
	broker.Unbind(t, message.CommandsExchange, "payment", "payment")
	broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, parkedCopy("p1", "t", "r", now), parkedCopy("p2", "t", "r", now), parkedCopy("p3", "t", "r", now))
	run("replay", "--queue", "payment").want(exitFailed, `replay message "p1" to queue payment: no queue took it`, "backstep topology apply", "not finished", "0 messages replayed")
	parkedAre(t, o, "payment", 3)
	o.run("", "topology", "apply").want(exitOK)
	run("replay", "--queue", "payment", "--max", "2", "--rate", "1000", "--json").want(exitOK, "there are more").decode(&some)
	some.want(t, map[fate]int{fateReplayed: 2})
	if got := drained(t, broker, "payment"); !slices.Equal(got, []string{"p1", "p2"}) || !some.More {
		t.Errorf("payment has %q, more %t", got, some.More)
	}
	// What stays is not counted, or the rest would never have its turn.
	broker.Publish(t, message.ParkedExchange, handlers.OrdersQueue, parkedCopy("last", "t", "r", now))
	run("replay", "--queue", "orders", "--max", "2", "--dry-run").want(exitFailed, "message last: would be replayed", "2 messages would be replayed, 4 not")
	var actions int
	if err := db.QueryRowContext(t.Context(), `SELECT COUNT(*) FROM parked_actions WHERE actor = 'ops' AND reason = 'cured, ticket 12'`).Scan(&actions); err != nil || actions != 7 {
		t.Errorf("%d actions in the audit, %v, want 7", actions, err)
	}
}

// TestParkedReplayGoesNotRound: what is parked again by the worker is not taken a second time.
func TestParkedReplayGoesNotRound(t *testing.T) {
	o, _, broker := lotOf(t)
	o.start("worker")
	o.start("relay").says("connected to the broker")
	var msgs []amqp091.Publishing
	for i := range 60 {
		msgs = append(msgs, amqp091.Publishing{MessageId: fmt.Sprint("bad-", i), Type: handlers.OrderCreateType, Body: []byte("{}"), DeliveryMode: 2})
	}
	broker.Publish(t, message.CommandsExchange, handlers.OrdersQueue, msgs...)
	all := func() error {
		if ready, _ := broker.Queue(t, "orders.parked"); ready != len(msgs) {
			return fmt.Errorf("%d are parked", ready)
		}
		return nil
	}
	eventually(t, "all are parked", all)
	for range 2 {
		var r replayed
		// Slow enough for the first to be back while it goes on.
		o.run("", append([]string{"parked", "replay", "--all", "--rate", "30", "--json"}, because...)...).want(exitOK).decode(&r)
		r.want(t, map[fate]int{fateReplayed: len(msgs)})
		eventually(t, "all are parked again", all)
	}
}

// newBroker reports whether it is RabbitMQ 4 or later.
func newBroker(t *testing.T, broker *testenv.Broker) bool {
	t.Helper()
	conn, err := amqp091.Dial(broker.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }() // all is said
	version, ok := conn.Properties["version"].(string)
	if !ok {
		t.Fatalf("the broker says it is %v", conn.Properties)
	}
	return !strings.HasPrefix(version, "3.")
}

// TestParkedDrop: what is dropped is gone from the queue, and whole in the audit.
func TestParkedDrop(t *testing.T) {
	o, db, broker := lotOf(t)
	size := 20 << 20
	if newBroker(t, broker) {
		size = 15 << 20 // more it does not take
	}
	huge := bytes.Repeat([]byte("0123456789\xff\x00abcd"), size/16)
	parkAll(t, o, broker,
		amqp091.Publishing{MessageId: "huge", Type: handlers.OrderCreateType, DeliveryMode: 2, Headers: amqp091.Table{"mine": "x"}, Body: huge},
		amqp091.Publishing{MessageId: "nonsense", Type: handlers.OrderCreateType, DeliveryMode: 2, Body: []byte("nonsense")},
		amqp091.Publishing{MessageId: "neighbour", Type: "odd", DeliveryMode: 2, Body: []byte("odd")})
	body := func(from string) {
		t.Helper()
		if a := o.run("", "parked", "show", "huge", "--body").want(exitOK); a.stdout != string(huge) {
			t.Errorf("the body from the %s has %d bytes, want %d", from, len(a.stdout), len(huge))
		}
	}
	o.run("", "parked", "list").want(exitOK, "dead-lettered by the broker: rejected (a worker rejected it")
	o.run("", "parked", "show", "huge").want(exitOK, "once, for rejected", fmt.Sprintf("payload, %d bytes", len(huge)), "backstep parked drop huge --queue orders")
	var s shownParked
	o.run("", "parked", "show", "huge", "--json").want(exitOK).decode(&s)
	if s.Death == nil || s.Death.Reason != "rejected" || s.ParkedAt.IsZero() || s.Bytes != len(huge) || s.Base64 != nil || s.From != "orders" {
		t.Errorf("shown %+v", s.ParkedRecord)
	}
	body("queue")
	run := func(args ...string) answer {
		t.Helper()
		return o.run("", append(append([]string{"parked", "drop"}, args...), because...)...)
	}
	run("--because", "dead-lettered", "--dry-run").want(exitOK, "1 message would be dropped", "nothing was done")
	run("--because", "dead-lettered").want(exitOK, "from orders, message huge: dropped: it was parked: dead-lettered", "1 message dropped")
	run("huge").want(exitOK, "message huge: done already: it was dropped by ops at", "0 messages dropped, 1 done already")
	run("nobody").want(exitFailed, "message nobody: not found", "not dropped: 1 of 1 message")
	body("audit")
	o.run("", "parked", "show", "huge").want(exitOK, "It is not in orders.parked any more", "dropped by ops", "cured, ticket 12", "mine")
	o.run("", append([]string{"parked", "replay", "huge"}, because...)...).want(exitFailed, "left as it is: it was dropped by ops")
	var r replayed
	run("--all", "--max", "1", "--json").want(exitOK, "there are more").decode(&r)
	r.want(t, map[fate]int{fateDropped: 1})
	parkedAre(t, o, "orders", 1)
	run("--type", map[string]string{"nonsense": "odd", "neighbour": handlers.OrderCreateType}[r.Messages[0].ID]).want(exitOK, "1 message dropped")
	if a := o.run("", "parked", "show", "neighbour", "--body").want(exitOK); a.stdout != "odd" {
		t.Errorf("body %q", a.stdout)
	}
	var bodies int
	if err := db.QueryRowContext(t.Context(), `SELECT COUNT(DISTINCT action_id) FROM parked_bodies`).Scan(&bodies); err != nil || bodies != 3 {
		t.Errorf("%d bodies, %v, want 3", bodies, err)
	}
}
