package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
)

// refused is something the broker has against some rows on a link that is healthy.
type refused struct {
	name    string
	queue   string // where the rows arrive once there is nothing against them any more; "" never
	rows    []planted
	provoke func(s *stage) // before the rows are there
	mend    func(s *stage)

	parked  bool     // at once; otherwise they are held, and tried again
	charged bool     // an attempt is spent
	most    int      // published all the same, before they were refused
	says    []string // in each reason
}

// maxBody is the largest message that the broker of these tests takes.
const maxBody = 1 << 20

var (
	longName = strings.Repeat("x", 255)
	oddName  = "it's 名前 😀"
)

// refusals are the rows of the table "what the broker says" that leave the link healthy.
func refusals() []refused {
	exchange := func(name string) func(*stage) {
		return func(s *stage) {
			s.onChannel(func(ch *amqp091.Channel) error {
				if err := ch.ExchangeDeclare(name, "fanout", false, false, false, false, nil); err != nil {
					return err
				}
				return ch.QueueBind("late", "", name, false, nil)
			})
		}
	}
	header := func(id, headers string) planted {
		return planted{id: id, exchange: message.CommandsExchange, key: "good", headers: headers}
	}
	property := func(id, properties string) planted {
		return planted{id: id, exchange: message.CommandsExchange, key: "good", properties: properties}
	}
	large := commands("large", 10, "good")
	for i := range large {
		large[i].body = make([]byte, maxBody+1)
	}
	return []refused{
		{
			name: "no queue is bound", queue: "nowhere", rows: commands("unroutable", 20, "nowhere"),
			mend:    func(s *stage) { s.sink("nowhere") },
			charged: true, says: []string{"backstep.commands", "nowhere", "312 NO_ROUTE"},
		},
		{
			name: "the queue was deleted", queue: "deleted", rows: commands("deleted", 20, "deleted"),
			provoke: func(s *stage) { s.broker.DeleteQueue(s.t, "deleted") },
			mend:    func(s *stage) { s.sink("deleted") },
			charged: true, says: []string{"backstep.commands", "deleted", "312 NO_ROUTE"},
		},
		{ // B27
			name: "the queue is full", queue: "full", rows: commands("full", 50, "full"),
			provoke: func(s *stage) {
				s.onChannel(func(ch *amqp091.Channel) error {
					// Of this type the limit is exact.
					args := amqp091.Table{"x-queue-type": "classic", "x-max-length": 10, "x-overflow": "reject-publish"}
					if _, err := ch.QueueDeclare("full", true, false, false, false, args); err != nil {
						return err
					}
					return ch.QueueBind("full", "full", message.CommandsExchange, false, nil)
				})
			},
			mend: func(s *stage) { s.consume("full") },
			most: 10,
		},
		{ // B09
			name: "the exchange is missing", queue: "late", rows: rows("missing", 20, "does.not.exist", "k"),
			mend:    exchange("does.not.exist"),
			charged: true, says: []string{`exchange "does.not.exist", routing key "k"`, "404 NOT_FOUND", "no exchange 'does.not.exist'"},
		},
		{
			name: "an exchange with the longest name is missing", queue: "late", rows: rows("long", 5, longName, "k"),
			mend:    exchange(longName),
			charged: true, says: []string{longName, `routing key "k"`, "404 NOT_FOUND"},
		},
		{
			name: "an exchange with an odd name is missing", queue: "late", rows: rows("odd", 5, oddName, "k"),
			mend:    exchange(oddName),
			charged: true, says: []string{oddName, `routing key "k"`, "404 NOT_FOUND"},
		},
		{
			name: "the permission was revoked", queue: "late", rows: rows("revoked", 20, "secret", "k"),
			provoke: func(s *stage) {
				exchange("secret")(s)
				warm := rows("allowed", 5, "secret", "k")
				s.plant(warm...)
				s.published(20*time.Second, "allowed", len(warm))
				s.arrived("late", warm)
				s.broker.Permit(s.t, s.user, ".*", "^(?!secret$)", ".*")
				s.ctl("close_all_connections", "--vhost", s.broker.Vhost, "so that rights count at once")
			},
			mend:    func(s *stage) { s.broker.Permit(s.t, s.user, ".*", ".*", ".*") },
			charged: true, says: []string{`exchange "secret", routing key "k"`, "403 ACCESS_REFUSED"},
		},
		{
			name: "larger than the broker takes", rows: large,
			parked: true, says: []string{`exchange "backstep.commands", routing key "good"`, "406 PRECONDITION_FAILED", "max"},
		},
		{
			name: "an expiration that is no number", rows: []planted{property("expiration-0", `{"expiration":"soon"}`)},
			parked: true, says: []string{"406 PRECONDITION_FAILED", "expiration"},
		},
		{
			name: "somebody else's user_id", rows: []planted{property("user-0", `{"user_id":"somebody-else"}`)},
			parked: true, says: []string{"406 PRECONDITION_FAILED", "user_id"},
		},
		{
			name: "the broker closes the connection with 501", rows: []planted{header("malformed-0", `{"spoil":"spoil me"}`), header("malformed-1", `{"spoil":"spoil me"}`)},
			parked: true, says: []string{`exchange "backstep.commands", routing key "good"`, "501 FRAME_ERROR"},
		},
		{
			name: "a header table that fills a frame", rows: []planted{
				header("frame-0", `{"big":"`+strings.Repeat("x", 131_072-100)+`"}`),
				header("frame-1", `{"big":"`+strings.Repeat("x", 131_072)+`"}`),
				header("frame-2", `{"big":"`+strings.Repeat("x", 500_000)+`"}`),
			},
			parked: true, says: []string{"the headers have", "the limit is 65536"},
		},
		// B20
		{name: "a header of no type", rows: []planted{header("type-0", `{"a":1,"odd":{"$nope":"1"}}`)}, parked: true, says: []string{`"odd"`, "unknown type"}},
		{name: "a number out of range", rows: []planted{header("range-0", `{"small":{"$int8":"300"}}`)}, parked: true, says: []string{`"small"`, "out of range"}},
		{name: "a number that is none", rows: []planted{header("nan-0", `{"n":{"$float64":"NaN"}}`)}, parked: true, says: []string{`"n"`, "NaN"}},
		{name: "a header name of 256 bytes", rows: []planted{header("name-0", `{"`+strings.Repeat("n", 256)+`":1}`)}, parked: true, says: []string{"256 bytes"}},
		{name: "headers that are not UTF-8", rows: []planted{header("utf8-0", "\xff\xfe\x00")}, parked: true, says: []string{"not valid UTF-8"}},
		{name: "properties that are no object", rows: []planted{property("array-0", `[]`)}, parked: true, says: []string{"properties"}},
		// B33
		{name: "a reason of 100 KB", rows: []planted{header("ascii-0", `{"`+strings.Repeat("a", 100_000)+`":{"$nope":"1"}}`)}, parked: true, says: []string{"aaaa", " …"}},
		{name: "a reason of 100 KB, cut in a letter", rows: []planted{
			header("runes-0", `{"`+strings.Repeat("é😀", 20_000)+`":{"$nope":"1"}}`),
			header("runes-1", `{"x`+strings.Repeat("é😀", 20_000)+`":{"$nope":"1"}}`),
			header("runes-2", `{"xy`+strings.Repeat("é😀", 20_000)+`":{"$nope":"1"}}`),
			header("runes-3", `{"xyz`+strings.Repeat("é😀", 20_000)+`":{"$nope":"1"}}`),
		}, parked: true, says: []string{"é😀", " …"}},
	}
}

// lag is how long a neighbour may take from its INSERT to its mark while others are refused.
// It was measured below a second; the rest is for a machine that is busy with other tests.
const lag = 5 * time.Second

// recovery is the contract: after the cure all flows within 5 s, without a restart. It holds
// whatever back-off had been reached: the waits end before. slack is for the machine.
const (
	recovery = 5 * time.Second
	slack    = 2 * time.Second
)

// All that a broker can have against a row, at once, on one relay.
func testRefusals(t *testing.T, s *stage, w *wire) {
	all := refusals()
	s.plant(commands("warm", 5, "deleted")...)
	s.published(20*time.Second, "warm", 5)
	w.spoil("spoil me")
	for _, r := range all {
		if r.provoke != nil {
			r.provoke(s)
		}
	}
	// B17: the worst ones first, then all mixed.
	bad, between := mixed(all)
	good := [][]planted{between, commands("good", 1000, "good")}
	s.plant(append(bad, good[1]...)...)
	s.published(20*time.Second, "good", 1000)
	s.published(lag, "between", len(between))

	// The neighbours of what is held go on all the time, also when it is tried again.
	for i := range 40 {
		good = append(good, commands(fmt.Sprintf("later-%d", i), 5, "good"))
		s.plant(good[len(good)-1]...)
		time.Sleep(250 * time.Millisecond) // there is nothing to wait for: it is about what does not happen
	}
	s.published(lag, "later", 200)
	if took := s.of("later").latest; took > lag.Seconds() {
		t.Errorf("a neighbour took %.1f s", took)
	}
	for _, r := range all {
		t.Run(r.name, func(t *testing.T) { s.refusal(t, r) })
	}
	s.lives()

	// What the broker was asked to do again is little, whatever was refused. (I7)
	if n := s.count(`SELECT MAX(attempts) FROM outbox_events`); n > 20 {
		t.Errorf("a row was tried %d times within seconds", n)
	}
	s.fewChannels()
	if used := s.relay.cpu(2 * time.Second); used > 0.25 {
		t.Errorf("a relay with nothing but refused rows uses %.0f %% of a processor", 100*used)
	}

	for _, r := range all {
		if r.mend != nil {
			r.mend(s)
		}
	}
	began := time.Now()
	for _, r := range all {
		if r.queue != "" {
			s.published(time.Until(began.Add(recovery+slack)), prefixOf(r), len(r.rows))
		}
	}
	t.Logf("all flowed %.1f s after the cure", time.Since(began).Seconds())
	s.lives()
	late := [][]planted{}
	for _, r := range all {
		switch r.queue {
		case "":
		case "late":
			late = append(late, r.rows)
		default:
			s.arrived(r.queue, r.rows)
		}
	}
	s.arrived("late", late...)
	s.arrived("good", good...)
	for _, prefix := range []string{"good", "between", "later"} {
		if st := s.of(prefix); st.charged > 0 || st.parked > 0 {
			t.Errorf("neighbours were charged or parked: %+v", st)
		}
	}
}

// mixed returns rows of all kinds in turn, the large ones first, with neighbours between them.
func mixed(all []refused) (rows, between []planted) {
	for _, r := range all {
		if len(r.rows[0].body) > 0 {
			rows = append(rows, r.rows...)
		}
	}
	for i, more := 0, true; more; i++ {
		more = false
		for _, r := range all {
			if i < len(r.rows) && len(r.rows[0].body) == 0 {
				more = true
				neighbour := commands(fmt.Sprintf("between-%d", len(between)), 1, "good")
				rows = append(append(rows, r.rows[i]), neighbour...)
				between = append(between, neighbour...)
			}
		}
	}
	return rows, between
}

func prefixOf(r refused) string {
	prefix, _, _ := strings.Cut(r.rows[0].id, "-")
	return prefix
}

// refusal demands that what was refused is where it belongs.
func (s *stage) refusal(t *testing.T, r refused) {
	st := s.of(prefixOf(r))
	switch {
	case r.parked && (st.parked != len(r.rows) || st.charged > 0):
		t.Errorf("%+v, want %d rows PARKED without an attempt", st, len(r.rows))
	case !r.parked && (st.parked > 0 || st.published > r.most || st.pending < len(r.rows)-r.most):
		t.Errorf("%+v, want %d rows PENDING", st, len(r.rows)-r.most)
	case r.charged != (st.charged > 0):
		t.Errorf("%+v, charged should be %t", st, r.charged)
	}
	reasons := s.reasons(prefixOf(r))
	if (len(r.says) > 0) != (len(reasons) > 0) {
		t.Errorf("reasons %q, want some with %q", reasons, r.says)
	}
	for _, reason := range reasons {
		for _, part := range r.says {
			if !strings.Contains(reason, part) {
				t.Errorf("reason %.600q does not say %q", reason, part)
			}
		}
	}
}

// B07, B09: with a short time to try them, what nothing becomes of is parked with the reason,
// and requeued by one command when it is mended.
func testParking(t *testing.T, s *stage) {
	s.broker.Permit(t, s.user, ".*", "^(?!secret$)", ".*")
	s.onChannel(func(ch *amqp091.Channel) error {
		return ch.ExchangeDeclare("secret", "fanout", false, false, false, false, nil)
	})
	kinds := map[string][]planted{
		"backstep.commands": commands("unroutable", 10, "nowhere"),
		"does.not.exist":    rows("missing", 10, "does.not.exist", "nowhere"),
		"secret":            rows("forbidden", 10, "secret", "nowhere"),
	}
	good := commands("good", 10, "good")
	var all []planted
	for i := range good {
		for _, bad := range kinds {
			all = append(all, bad[i])
		}
		all = append(all, good[i])
	}
	s.plant(all...)
	s.published(20*time.Second, "good", 10)
	s.eventually(30*time.Second, "all that nobody takes is parked", func() error {
		if n := s.count(`SELECT COUNT(*) FROM outbox_events WHERE status = 'PENDING'`); n > 0 {
			return fmt.Errorf("%d rows are pending", n)
		}
		return nil
	})
	for exchange, bad := range kinds {
		prefix := strings.TrimSuffix(bad[0].id, "-0")
		st := s.of(prefix)
		if st.parked != len(bad) || st.charged == 0 {
			t.Errorf("exchange %s: %+v, want %d PARKED after attempts", exchange, st, len(bad))
		}
		for _, reason := range s.reasons(prefix) {
			if want := fmt.Sprintf("exchange %q, routing key %q", exchange, "nowhere"); !strings.Contains(reason, want) {
				t.Errorf("reason %q does not say %q", reason, want)
			}
		}
	}
	if used := s.relay.cpu(2 * time.Second); used > 0.25 {
		t.Errorf("a relay with nothing but parked rows uses %.0f %% of a processor", 100*used)
	}

	s.broker.Permit(t, s.user, ".*", ".*", ".*")
	s.sink("nowhere")
	s.onChannel(func(ch *amqp091.Channel) error {
		return errors.Join(
			ch.ExchangeDeclare("does.not.exist", "fanout", false, false, false, false, nil),
			ch.QueueBind("nowhere", "", "does.not.exist", false, nil), ch.QueueBind("nowhere", "", "secret", false, nil))
	})
	if requeue := s.run("outbox", "requeue", "--all", "--reason", "mended"); requeue.err != nil {
		t.Fatalf("requeue: %v\n%s", requeue.err, requeue.text())
	}
	for _, bad := range kinds {
		s.published(recovery+slack, strings.TrimSuffix(bad[0].id, "-0"), len(bad))
	}
	s.arrived("nowhere", kinds["backstep.commands"], kinds["does.not.exist"], kinds["secret"])
	s.arrived("good", good)
	s.lives()
}
