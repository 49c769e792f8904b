package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"backstep/internal/app"
	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

func TestUsage(t *testing.T) {
	o := newOperator(t)
	tests := []struct {
		args string
		code int
		says string
	}{
		{"--help", exitOK, "BACKSTEP_AMQP_MANAGEMENT_URL"},
		{"--version", exitOK, "backstep"},
		{"", exitUsage, "Usage:"},
		{"sagas", exitUsage, `unknown command "sagas" for backstep; did you mean saga?`},
		{"saga", exitUsage, "Usage:"},
		{"saga bogus", exitUsage, `unknown command "bogus" for backstep saga`},
		{"saga show", exitUsage, "accepts 1 arg(s), received 0: name a saga, by its id or that of the request"},
		{"saga show 1 --interval 1s", exitUsage, "--interval is for --watch"},
		{"saga retry --status COMPLETED --reason x", exitUsage, "--status COMPLETED: there is nothing to retry"},
		{"saga resolve --status running --as completed --reason x", exitUsage, "--status RUNNING: there is nothing to resolve"},
		{"saga list --type nope", exitUsage, `no definition here has the type "nope"; there is place-order`},
		{"saga resolve --help", exitOK, "do it in a transaction that is rolled back, and say what it did\n"},
		{"saga skip --help", exitOK, "do it, and the step that comes next, in a transaction that is rolled back; call nobody\n"},
		{"saga skip --help", exitOK, "--step says what to leave out and chooses no saga"},
		{"saga list --bogus", exitUsage, "backstep saga list --help"},
		{"saga list --status LOST", exitUsage, "RUNNING, COMPLETED"},
		{"saga list --limit 0", exitUsage, "--limit"},
		{"saga list", exitUsage, "BACKSTEP_MYSQL_DSN is not set"},
		{"saga list --step bogus", exitUsage, "reserve-stock, charge-payment, create-shipment of place-order 1"},
		{"saga list --watch --interval 0s", exitUsage, "--interval"},
		{"saga retry --reason x", exitUsage, "retry needs ids, flags that choose sagas, or --all"},
		{"saga retry 1 --status RUNNING --reason x", exitUsage, "not both"},
		{"saga retry 1", exitUsage, "--reason is needed"},
		{"saga retry 1 --reason x --rate 0", exitUsage, "--rate"},
		{"saga retry 1 --reason x --max-failures -1", exitUsage, "--max-failures"},
		{"saga skip 1 --reason x", exitUsage, "--step is needed"},
		{"saga skip --step charge-payment --reason x", exitUsage, "skip needs ids, flags that choose sagas, or --all: --step names the step to leave out, and chooses no saga"},
		{"saga resolve 1 --as done --reason x", exitUsage, "say completed or compensated"},
		{"saga resolve 1 --as completed --reason x", exitUsage, "BACKSTEP_MYSQL_DSN is not set"},
		{"outbox", exitUsage, "Usage:"},
		{"outbox bogus", exitUsage, `unknown command "bogus" for backstep outbox`},
		{"outbox list --status LOST", exitUsage, "PENDING, PARKED, PUBLISHED"},
		{"outbox list --max 0", exitUsage, "--max"},
		{"outbox list --since yesterday", exitUsage, "neither an age such as 90m nor a time"},
		{"outbox list --since -1h", exitUsage, "it must be positive"},
		{"outbox show", exitUsage, "accepts 1 arg"},
		{"outbox show 1 --body --json", exitUsage, "do not go together"},
		{"outbox stats --interval 0s", exitUsage, "--interval"},
		{"outbox requeue --reason x", exitUsage, "requeue needs ids, flags that choose rows, or --all"},
		{"outbox requeue 1 --all --reason x", exitUsage, "not both"},
		{"outbox requeue 1", exitUsage, "--reason is needed"},
		{"outbox requeue 1 --reason x --rate 0", exitUsage, "--rate"},
		{"outbox requeue --all --reason x --max -1", exitUsage, "--max"},
		{"outbox drop --reason x", exitUsage, "requires at least 1 arg"},
		{"outbox drop 1", exitUsage, "--reason is needed"},
		{"outbox drop 1 --reason x --patience 0s", exitUsage, "--patience"},
		{"outbox republish --reason x", exitUsage, "at least --since"},
		{"outbox republish --since 1h", exitUsage, "--reason is needed"},
		{"outbox relays", exitUsage, "BACKSTEP_MYSQL_DSN is not set"},
		{"parked", exitUsage, "Usage:"},
		{"parked lits", exitUsage, "did you mean list?"},
		{"parked list --max 0", exitUsage, "--max is 0; it may be 1 to 200000"},
		{"parked list --since yesterday", exitUsage, "neither an age such as 90m nor a time"},
		{"parked list --since 1m --until 1h", exitUsage, "is before --since"},
		{"parked list", exitUsage, "BACKSTEP_AMQP_URL is not set"},
		{"parked show", exitUsage, "accepts 1 arg"},
		{"parked show 1 --body --json", exitUsage, "do not go together"},
		{"parked show 1", exitUsage, "BACKSTEP_MYSQL_DSN is not set"},
		{"parked replay --reason x", exitUsage, "replay needs ids, flags that choose messages, or --all"},
		{"parked replay 1", exitUsage, "--reason is needed"},
		{"parked replay 1 --reason x --rate 0", exitUsage, "--rate"},
		{"parked replay 1 --reason x --max -1", exitUsage, "--max"},
		{"parked drop --reason x", exitUsage, "drop needs ids, flags that choose messages, or --all"},
		{"parked drop 1", exitUsage, "--reason is needed"},
		{"parked drop 1 --reason x --max -1", exitUsage, "--max"},
		{"migrate up", exitUsage, "BACKSTEP_MYSQL_DSN is not set"},
		{"topology apply", exitUsage, "BACKSTEP_AMQP_URL is not set"},
		{"verify", exitUsage, "BACKSTEP_MYSQL_DSN is not set"},
		{"submit", exitUsage, `needs FILE ("-" is standard input) or --count`},
		{"submit --count 2 orders.jsonl", exitUsage, "not both"},
		{"submit --count 2 --decline 3", exitUsage, "more than --count 2"},
		{"submit --count -1", exitUsage, "negative"},
		{"submit --count 1 --skus 0", exitUsage, "--skus"},
		{"submit no-such-file", exitFailed, "no such file"},
		{"demo --workers 0", exitUsage, "--workers"},
		{"bench", exitUsage, "Usage:"},
		{"bench latence", exitUsage, "did you mean latency?"},
		{"bench relay --runs 0 --rows -1", exitUsage, "--rows is -1; it may be 1 to 10000000"},
		{"bench relay --runs 0 --rows -1", exitUsage, "--runs is 0"},
		{"bench relay --relays 17", exitUsage, "--relays"},
		{"bench relay --keys 0", exitUsage, "--keys"},
		{"bench relay --history -1", exitUsage, "--history"},
		{"bench relay 50000", exitUsage, "unknown command"},
		{"bench latency --interval 10us", exitUsage, "--interval is 10µs; it may be 1ms to 1m"},
		{"bench latency --rows 0", exitUsage, "--rows"},
		{"bench relay --far-future -1", exitUsage, "--far-future"},
		{"bench schedule --rows 0 --idle 1ms", exitUsage, "--rows is 0; it may be 1 to 1000000"},
		{"bench schedule --rows 0 --idle 1ms", exitUsage, "--idle is 1ms; it may be 1s to 1m"},
		{"bench schedule --relays 17", exitUsage, "--relays"},
		{"bench schedule --spread -1s", exitUsage, "--spread"},
		{"bench schedule --interval 0", exitUsage, "--interval"},
		{"bench schedule --far-future -1", exitUsage, "--far-future"},
		{"bench saga --orders 0 --refuse 101", exitUsage, "--orders is 0; it may be 1 to 1000000"},
		{"bench saga --orders 0 --refuse 101", exitUsage, "--refuse is 101"},
		{"bench saga --relays 0", exitUsage, "--relays"},
		{"bench saga --workers 33", exitUsage, "--workers"},
		{"bench saga --rate 0", exitUsage, "--rate"},
		{"bench saga --seconds -1", exitUsage, "--seconds"},
		{"bench saga --runs 0", exitUsage, "--runs"},
		{"bench saga 5000", exitUsage, "unknown command"},
	}
	for _, tt := range tests {
		t.Run(tt.args, func(t *testing.T) {
			a := o.run("", strings.Fields(tt.args)...)
			a.t = t
			a.want(tt.code, tt.says)
		})
	}
	for _, args := range []string{"migrate up", "migrate status", "topology apply", "submit", "saga list", "saga show", "saga versions",
		"saga retry", "saga skip", "saga cancel", "saga compensate", "saga resolve", "verify", "demo",
		"bench relay", "bench latency", "bench schedule", "bench saga",
		"outbox relays", "outbox stats", "outbox list", "outbox show", "outbox requeue", "outbox drop", "outbox republish",
		"parked list", "parked show", "parked replay", "parked drop"} {
		o.run("", append(strings.Fields(args), "--help")...).want(exitOK, "Examples:", "--json")
	}
}

// TestVariables: see app.Variables.
func TestVariables(t *testing.T) {
	for _, name := range app.Names(&config{}) {
		if !slices.Contains(app.Variables, name) {
			t.Errorf("%s is not in app.Variables", name)
		}
	}
	newOperator(t, "BACKSTEP_MYSQL_DNS=x", "BACKSTEP_INBOX_RETENTION=1s").run("", "saga", "list").
		want(exitUsage, "BACKSTEP_MYSQL_DNS is not a variable of Backstep")
	newOperator(t, "BACKSTEP_INBOX_RETENTION=1s").run("", "verify").want(exitUsage, "a time from 1h to 8760h")
}

func TestServersThatCannotBeReached(t *testing.T) {
	t.Parallel()
	o := newOperator(t, "BACKSTEP_MYSQL_DSN=app:s3cret@tcp(127.0.0.1:1)/backstep", "BACKSTEP_AMQP_URL=amqp://app:s3cret@127.0.0.1:1/")
	for _, args := range []string{"saga list", "topology apply"} {
		a := o.run("", strings.Fields(args)...).want(exitFailed, "127.0.0.1:1", "is it running")
		if strings.Contains(a.stderr, "s3cret") {
			t.Errorf("backstep %s tells the password: %s", args, a.stderr)
		}
	}
	o = newOperator(t, "BACKSTEP_MYSQL_DSN="+testenv.Shared(t).DSN("no_such_database"))
	o.run("", "migrate", "up").want(exitFailed, "CREATE DATABASE")
}

// TestVerbs goes through the life of a deployment.
func TestVerbs(t *testing.T) {
	t.Parallel()
	broker, dsn := testenv.Vhost(t), testenv.Database(t)
	o := newOperator(t, "BACKSTEP_MYSQL_DSN="+dsn, "BACKSTEP_AMQP_URL="+broker.URL, "BACKSTEP_AMQP_MANAGEMENT_URL="+broker.ManagementURL)

	o.run("", "saga", "list").want(exitFailed, "backstep migrate up")
	o.run("", "migrate", "status").want(exitOK, "missing")
	o.run("", "migrate", "up").want(exitOK, "applied 00001_outbox.sql")
	o.run("", "migrate", "up").want(exitOK, "nothing to do")
	var migrations []struct{ Applied bool }
	o.run("", "migrate", "status", "--json").want(exitOK).decode(&migrations)
	if len(migrations) < 4 || !migrations[len(migrations)-1].Applied {
		t.Errorf("migrations %v", migrations)
	}

	o.run("", "submit", "--count", "3").want(exitFailed, "3 of 3 orders were not confirmed", "line 2 was not confirmed", "backstep topology apply")
	o.run("", "verify").want(exitFailed, "every queue exists", "backstep topology apply")
	o.run("", "topology", "apply").want(exitOK, "policies put: backstep-work")
	o.run("", "topology", "apply", "--json").want(exitOK, `"orders"`)
	o.run("", "saga", "list").want(exitOK, "no sagas")
	o.run("", "verify").want(exitOK, "every invariant holds")

	submitLines(t, o, broker)
	o.run("", "verify").want(exitFailed, "every queue is empty", "12 messages ready")

	// Without a relay every saga waits for one.
	worker := o.start("worker")
	eventually(t, "every order has a saga", func() error {
		var list []saga.Summary
		o.run("", "saga", "list", "--status", "running", "--json").want(exitOK).decode(&list)
		if len(list) != 12 {
			return fmt.Errorf("%d sagas", len(list))
		}
		return nil
	})
	var list []saga.Summary
	o.run("", "saga", "list", "--type", "place-order", "--json", "--limit", "1").want(exitOK).decode(&list)
	id := list[0].ID
	o.run("", "saga", "list").want(exitOK, id, "RUNNING", "reserve-stock")
	o.run("", "saga", "list", "--older", "1h").want(exitOK, "no sagas")
	o.run("", "saga", "show", id).want(exitOK, "waited for a relay", "attempt 1 to execute step reserve-stock", "create-shipment  PENDING")
	o.run("", "saga", "show", "nobody").want(exitFailed, `no saga has the id "nobody"`)
	o.run("", "verify", "--wait", "100ms").want(exitFailed, "not at rest after 100ms", "every saga has ended", "every outbox row is published or parked")

	relay := o.start("relay")
	o.run("", "verify", "--wait", patience.String()).want(exitOK, "every invariant holds: 12 orders, 12 sagas")
	o.run("{}", "submit", "-").want(exitOK) // JSON, but no order: it is parked
	o.run("", "verify", "--wait", patience.String()).want(exitOK, "note: 1 message in orders.parked", "12 orders")
	var all []saga.Summary
	o.run("", "saga", "list", "--json").want(exitOK).decode(&all)
	ended := map[saga.Status]int{}
	for _, s := range all {
		ended[s.Status]++
	}
	if ended[saga.Completed] != 9 || ended[saga.Compensated] != 3 {
		t.Errorf("sagas %v, want 9 COMPLETED and 3 COMPENSATED", ended)
	}
	for _, s := range all {
		if strings.Contains(s.LastError, "country ZZ") {
			o.run("", "saga", "show", s.ID).want(exitOK, "no carrier ships to country ZZ", "COMPENSATED  1", "It was undone")
			var d shown
			o.run("", "saga", "show", s.ID, "--json").want(exitOK).decode(&d)
			if len(d.Steps) != 3 || d.Steps[2].Status != saga.StepFailed || d.Steps[0].Result == nil {
				t.Errorf("saga %+v", d)
			}
		}
	}
	for name, b := range map[string]*background{"worker": worker, "relay": relay} {
		if code := b.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("%s exited with %d", name, code)
		}
	}
	breakIt(t, o, dsn)
}

// submitLines submits 2 orders of 4 lines, and 10 generated ones.
func submitLines(t *testing.T, o *operator, broker *testenv.Broker) {
	t.Helper()
	fine := `{"customer":"山田 😀","items":[{"sku":"SKU-0001","quantity":2,"price_cents":50}],"total_cents":100,"payment_token":"t","ship_to":{"country":"JP"}}`
	file := filepath.Join(t.TempDir(), "orders.jsonl")
	if err := os.WriteFile(file, []byte(fine+"\n{\n"+fine+"\nnope\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	o.run("", "submit", file).want(exitFailed, "nothing was submitted", "line 2: not JSON", "line 4: not JSON")
	if ready, _ := broker.Queue(t, handlers.OrdersQueue); ready != 0 {
		t.Fatalf("%d orders in the queue, want none", ready)
	}
	o.run(fine+"\n\n"+fine, "submit", "-").want(exitOK, "2 orders submitted and confirmed")

	a := o.run("", "submit", "--count", "10", "--no-stock", "1", "--decline", "1", "--refuse", "1", "--stock", "1000", "--json").want(exitOK)
	ids := map[string]bool{}
	lines := bufio.NewScanner(strings.NewReader(a.stdout))
	for lines.Scan() {
		var line order
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil || !line.Confirmed || line.Line < 1 || line.Line > 10 {
			t.Errorf("line %s: %v", lines.Text(), err)
		}
		ids[line.MessageID] = true
	}
	if ready, _ := broker.Queue(t, handlers.OrdersQueue); ready != 12 || len(ids) != 10 {
		t.Errorf("%d orders in the queue, %d ids, want 12 and 10", ready, len(ids))
	}
	d, ok := broker.Get(t, handlers.OrdersQueue)
	if !ok {
		t.Fatal("no message")
	}
	if d.Type != handlers.OrderCreateType || d.DeliveryMode != 2 || d.ContentType != "application/json" || string(d.Body) != fine ||
		d.Headers[message.HeaderRequestID] != d.MessageId || d.CorrelationId != d.MessageId || d.Timestamp.IsZero() {
		t.Errorf("message %+v", d)
	}
	o.run(fine, "submit", "-").want(exitOK) // for the one taken out

	// What no queue takes is not confirmed.
	broker.Unbind(t, message.CommandsExchange, handlers.OrdersQueue, handlers.OrdersQueue)
	o.run(fine, "submit", "-", "--json").want(exitFailed, "line 1 was not confirmed", "backstep topology apply", `"confirmed":false`)
	o.run("", "topology", "apply").want(exitOK)
}

// breakIt makes what must not be, and verify must find it.
func breakIt(t *testing.T, o *operator, dsn string) {
	t.Helper()
	db, err := sqltx.Open(dsn, sqltx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	for _, tt := range []struct{ query, rule string }{
		{"UPDATE inventory SET available = available - 1 WHERE sku = 'SKU-0001'", "stock is conserved"},
		{"DELETE FROM inbox_messages WHERE consumer = 'payment' ORDER BY message_id LIMIT 1", "what was published was processed or parked"},
		{"UPDATE outbox_events SET status = 'PENDING' ORDER BY id LIMIT 1", "every outbox row is published or parked"},
		{"UPDATE saga_instances SET status = 'RUNNING' ORDER BY id LIMIT 1", "every saga has ended"},
	} {
		if _, err := db.ExecContext(t.Context(), tt.query); err != nil {
			t.Fatal(err)
		}
		var f findings
		o.run("", "verify", "--json").want(exitFailed).decode(&f)
		found := false
		for _, v := range f.Violations {
			found = found || strings.HasPrefix(v.Rule, tt.rule)
		}
		if !found || f.OK {
			t.Errorf("after %q verify found %+v, want %q", tt.query, f, tt.rule)
		}
	}
	if _, err := db.ExecContext(t.Context(), "UPDATE saga_instances SET status = 'MANUAL_ACTION' ORDER BY id LIMIT 1"); err != nil {
		t.Fatal(err)
	}
	o.run("", "verify").want(exitFailed, "1 saga in MANUAL_ACTION")
}
