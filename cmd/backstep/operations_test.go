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

	"backstep/internal/testenv"
)

// TestRepairingTheOutbox runs each command of that section of docs/operations.md as it stands
// there, on rows as fill makes them, and demands its effect: what it says, and what rows
// there are then. A command without an effect here, or an effect without a command, fails.
func TestRepairingTheOutbox(t *testing.T) {
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
	doc, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(doc), "\n## Repairing the outbox\n")
	section, _, _ = strings.Cut(section, "\n## ")
	commands := blocks(section, "sh")
	if !found || len(commands) == 0 {
		t.Fatal("docs/operations.md has no such section, or no commands in it")
	}
	broker := testenv.Vhost(t)
	o, db := outboxOf(t, "BACKSTEP_AMQP_URL="+broker.URL, "BACKSTEP_AMQP_MANAGEMENT_URL="+broker.ManagementURL)
	file := filepath.Join(t.TempDir(), "body")
	now := time.Now().UTC()
	for _, e := range effects {
		if i := slices.Index(commands, e.command); i >= 0 {
			commands = slices.Delete(commands, i, i+1)
		} else {
			t.Errorf("docs/operations.md does not have %s", e.command)
		}
		fill(t, db)
		cmd := exec.Command("sh", "-c", e.command)
		cmd.Env = append(slices.Clone(o.env), "PATH="+binaries+":"+os.Getenv("PATH"), "KEY=key-1", "ROW="+e.row, "FILE="+file,
			"LOST="+now.Add(-2*time.Hour).Format(time.RFC3339), "WELL="+now.Format(time.RFC3339))
		said, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(said), e.says) {
			t.Errorf("%s: %v\n%s\nwant %q", e.command, err, said, e.says)
		}
		rowsAre(t, db, e.rows...)
	}
	if len(commands) > 0 {
		t.Errorf("no effect is known here of %q", commands)
	}
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
