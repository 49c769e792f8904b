package main

import (
	"database/sql"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/testenv"
)

// TestRepairingTheOutbox runs each command of that section of docs/operations.md as it stands
// there, on rows as fill makes them, and demands its effect: what it says, and what rows
// there are then. A command without an effect here, or an effect without a command, fails.
func TestRepairingTheOutbox(t *testing.T) {
	t.Parallel()
	const parked, pending = "2", "1"
	nothing := []int{1, 2, 2} // happens to the rows
	effects := []struct {
		command, row, says string
		rows               []int
	}{
		{"backstep outbox relays", "", "No relay owns 16 shards", nothing},
		{"backstep outbox stats", "", "parked     2", nothing},
		{"backstep outbox list", "", "parked-too", nothing},
		{"backstep outbox list --status PENDING --older 10m", "", "no such rows", nothing},
		{`backstep outbox list --status PENDING,PARKED,PUBLISHED --key "$KEY"`, "", "sent", nothing},
		{`backstep outbox show "$ROW"`, pending, "It waits for a relay", nothing},
		{`backstep outbox show "$ROW" --body > "$FILE"`, pending, "", nothing},
		{"backstep topology apply", "", "policies put", nothing},
		{`backstep outbox requeue "$ROW" --reason 'queue payment is bound again'`, parked, "1 row requeued", []int{2, 1, 2}},
		{"backstep outbox requeue --queue payment --since 2h --dry-run", "", "1 row chosen", nothing},
		{"backstep outbox requeue --queue payment --since 2h --reason 'queue payment is bound again'", "", "1 row requeued", []int{2, 1, 2}},
		{"backstep outbox requeue --all --rate 50 --reason 'broker is back'", "", "2 rows requeued", []int{3, 0, 2}},
		{`backstep outbox drop "$ROW" --dry-run`, parked, "nothing was done", nothing},
		{`backstep outbox drop "$ROW" --reason 'poison, see ticket 12'`, pending, "dropped", []int{0, 2, 2}},
		{`backstep outbox republish --since "$LOST" --until "$WELL" --dry-run`, "", "2 rows would be sent again", nothing},
		{`backstep outbox republish --since "$LOST" --until "$WELL" --reason 'disk of rabbit-1 lost'`, "", "2 rows sent again", []int{3, 2, 0}},
		{"backstep outbox republish --since 1h --queue payment --rate 100 --reason 'queue payment was purged'", "", "0 rows sent again", nothing}, // an hour and a moment ago
		{"backstep outbox republish --type order.confirmed --since 6h --max 1000 --reason 'the mailer lost its queue'", "", "1 row sent again", []int{2, 2, 1}},
	}
	section, commands := documented(t, "Repairing the outbox")
	broker := testenv.Vhost(t)
	o, db := outboxOf(t, "BACKSTEP_AMQP_URL="+broker.URL, "BACKSTEP_AMQP_MANAGEMENT_URL="+broker.ManagementURL)
	file := filepath.Join(t.TempDir(), "body")
	now := time.Now().UTC()
	for _, e := range effects {
		commands.take(t, e.command)
		fill(t, db)
		o.shell(e.command, e.says, "KEY=key-1", "ROW="+e.row, "FILE="+file,
			"LOST="+now.Add(-2*time.Hour).Format(time.RFC3339), "WELL="+now.Format(time.RFC3339))
		rowsAre(t, db, e.rows...)
	}
	commands.end(t)
	if body, err := os.ReadFile(file); err != nil || string(body) != `{"a":1}` {
		t.Errorf("body %q, %v", body, err)
	}
	for _, query := range blocks(section, "sql") {
		var at time.Time
		var actor, action, reason string
		var row int
		var id []byte
		err := db.QueryRowContext(t.Context(), query).Scan(&at, &actor, &action, &row, &id, &reason)
		if errors.Is(err, sql.ErrNoRows) || err != nil || actor != self() || action != "republish" || reason != "the mailer lost its queue" {
			t.Errorf("%s: %s %s %s %v", query, actor, action, reason, err)
		}
	}
}

// TestParkedMessagesDoc does the same with the section on parked messages: two of payment and
// one of orders.
func TestParkedMessagesDoc(t *testing.T) {
	t.Parallel()
	effects := []struct {
		command, says   string
		parked, payment int // how many are then parked, and in the payment queue
	}{
		{"backstep parked list", "3 messages", 3, 0},
		{"backstep parked list --queue payment --because 'gateway away' --since 2h", "2 messages", 3, 0},
		{`backstep parked show "$ID"`, "gateway away", 3, 0},
		{`backstep parked show "$ID" --body > "$FILE"`, "", 3, 0},
		{`backstep parked replay "$ID" --reason 'worker 1.4 knows the version'`, "1 message replayed", 2, 1},
		{"backstep parked replay --queue payment --because 'gateway away' --since 2h --dry-run", "2 messages would be replayed", 3, 0},
		{"backstep parked replay --queue payment --because 'gateway away' --since 2h --reason 'the gateway is back'", "2 messages replayed", 1, 2},
		{"backstep parked replay --all --rate 5 --max 100 --reason 'ticket 12'", "3 messages replayed", 0, 2},
		{`backstep parked drop "$ID" --reason 'poison, see ticket 12'`, "1 message dropped", 2, 0},
		{"backstep parked drop --queue orders --because 'no lines' --dry-run", "1 message would be dropped", 3, 0},
		{"backstep parked drop --queue orders --because 'no lines' --reason 'a client sent nonsense'", "1 message dropped", 2, 0},
	}
	section, commands := documented(t, "Parked messages")
	o, db, broker := lotOf(t)
	file := filepath.Join(t.TempDir(), "body")
	for _, e := range effects {
		commands.take(t, e.command)
		for _, q := range []string{"orders", "payment"} {
			broker.Purge(t, q)
			broker.Purge(t, q+".parked")
		}
		broker.Publish(t, message.ParkedExchange, "payment", parkedCopy("p1", "t", "gateway away", time.Now()), parkedCopy("p2", "t", "gateway away", time.Now()))
		broker.Publish(t, message.ParkedExchange, "orders", parkedCopy("o1", "t", "no lines", time.Now()))
		o.shell(e.command, e.says, "ID=p1", "FILE="+file)
		parkedOrders, _ := broker.Queue(t, "orders.parked")
		parkedPayment, _ := broker.Queue(t, "payment.parked")
		payment, _ := broker.Queue(t, "payment")
		if parkedOrders+parkedPayment != e.parked || payment != e.payment {
			t.Errorf("after %s %d and %d are parked, %d are in payment, want %d and %d", e.command, parkedOrders, parkedPayment, payment, e.parked, e.payment)
		}
	}
	commands.end(t)
	if body, err := os.ReadFile(file); err != nil || string(body) != `{"id":"p1"}` {
		t.Errorf("body %q, %v", body, err)
	}
	for _, query := range blocks(section, "sql") {
		var at time.Time
		var id int
		var actor, action, message, reason string
		if err := db.QueryRowContext(t.Context(), query).Scan(&at, &actor, &action, &id, &message, &reason); err != nil ||
			actor != self() || action != "drop" || message != "o1" || reason != "a client sent nonsense" {
			t.Errorf("%s: %s %s %s %s %v", query, actor, action, message, reason, err)
		}
	}
}

// commands are those of a section that have not been run yet.
type commands []string

// documented returns a section of docs/operations.md, or of one of its sections, and the commands in it.
func documented(t *testing.T, title string) (section string, all *commands) {
	t.Helper()
	doc, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(doc), "\n## "+title+"\n")
	if !found {
		_, section, found = strings.Cut(string(doc), "\n### "+title+"\n")
		section, _, _ = strings.Cut(section, "\n### ")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	list := commands(blocks(section, "sh"))
	if !found || len(list) == 0 {
		t.Fatal("docs/operations.md has no such section, or no commands in it")
	}
	return section, &list
}

// take demands that a command is there.
func (c *commands) take(t *testing.T, command string) {
	t.Helper()
	if i := slices.Index(*c, command); i >= 0 {
		*c = slices.Delete(*c, i, i+1)
	} else {
		t.Errorf("docs/operations.md does not have %s", command)
	}
}

// end demands that all have been taken.
func (c *commands) end(t *testing.T) {
	t.Helper()
	if len(*c) > 0 {
		t.Errorf("no effect is known here of %q", *c)
	}
}

// shell runs a command as a person types it, demands what it says, and returns that.
func (o *operator) shell(command, says string, env ...string) string {
	o.t.Helper()
	cmd := exec.Command("sh", "-c", command)
	cmd.Env = slices.Concat(o.env, []string{"PATH=" + binaries + ":" + os.Getenv("PATH")}, env)
	said, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(said), says) {
		o.t.Errorf("%s: %v\n%s\nwant %q", command, err, said, says)
	}
	return string(said)
}

// blocks returns the lines of the blocks of a language in a document.
func blocks(doc, language string) (lines []string) {
	for {
		_, rest, ok := strings.Cut(doc, "\n```"+language+"\n")
		if !ok {
			return lines
		}
		block, after, _ := strings.Cut(rest, "\n```")
		lines, doc = append(lines, strings.Split(block, "\n")...), after
	}
}
