package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// sagaLot is a database with sagas of orders, and what lanes would do to them.
type sagaLot struct {
	*operator
	db     *sql.DB
	engine *saga.Engine
}

func sagasOf(t *testing.T, env ...string) *sagaLot {
	t.Helper()
	o, db := outboxOf(t, env...)
	if err := handlers.Seed(t.Context(), db, 3, 1000); err != nil {
		t.Fatal(err)
	}
	return &sagaLot{o, db, handlers.NewEngine(slog.New(slog.DiscardHandler))}
}

// place starts the saga of an order.
func (l *sagaLot) place(request string) (id string) {
	l.t.Helper()
	body := `{"customer":"Ada","items":[{"sku":"SKU-0001","quantity":2,"price_cents":50}],"total_cents":100,"payment_token":"t","ship_to":{"country":"JP"}}`
	l.tx(func(ctx context.Context, tx *sqltx.Tx) []message.Outcome {
		return handlers.NewOrderCreate(slog.New(slog.DiscardHandler)).HandleBatch(ctx, tx, []message.Message{
			{Properties: message.Properties{MessageID: request, Type: handlers.OrderCreateType}, Body: []byte(body)}})
	})
	id, err := handlers.SagaOf(l.t.Context(), l.db, request)
	if err != nil {
		l.t.Fatal(err)
	}
	return id
}

func (l *sagaLot) tx(handle func(ctx context.Context, tx *sqltx.Tx) []message.Outcome) {
	l.t.Helper()
	err := sqltx.WithTx(l.t.Context(), l.db, func(ctx context.Context, tx *sqltx.Tx) error {
		for _, o := range handle(ctx, tx) {
			if o.Kind != message.Done && tx.Err() == nil {
				l.t.Errorf("%s: %s", o.Kind, o.Reason)
			}
		}
		return tx.Err()
	})
	if err != nil {
		l.t.Fatal(err)
	}
}

// awaited is the message that a saga awaits.
func (l *sagaLot) awaited(id string) message.Message {
	l.t.Helper()
	d, err := saga.Get(l.t.Context(), l.db, id)
	if err != nil {
		l.t.Fatal(err)
	}
	return message.Message{Properties: message.Properties{MessageID: d.CommandID}, Headers: message.Headers{message.HeaderSagaID: id}}
}

// work has a worker run so many steps of a saga.
func (l *sagaLot) work(id string, steps int) string {
	l.t.Helper()
	for range steps {
		m := l.awaited(id)
		l.tx(func(ctx context.Context, tx *sqltx.Tx) []message.Outcome {
			return l.engine.HandleBatch(ctx, tx, []message.Message{m})
		})
	}
	return id
}

// park has a worker park what a saga awaits.
func (l *sagaLot) park(id, reason string) string {
	l.t.Helper()
	m := l.awaited(id)
	l.tx(func(ctx context.Context, tx *sqltx.Tx) []message.Outcome {
		if err := l.engine.CommandParked(ctx, tx, &m, reason); err != nil {
			l.t.Error(err)
		}
		return nil
	})
	return id
}

// clear makes it a database without sagas.
func (l *sagaLot) clear() {
	l.t.Helper()
	for _, table := range []string{"saga_instances", "saga_steps", "saga_actions", "outbox_events", "scheduled_messages", "orders", "order_items",
		"payments", "payment_idempotency", "shipments"} {
		execute(l.t, l.db, "DELETE FROM "+table)
	}
}

func (l *sagaLot) statuses() string {
	l.t.Helper()
	counts, err := saga.Counts(l.t.Context(), l.db)
	if err != nil {
		l.t.Fatal(err)
	}
	var all []string
	for _, s := range slices.Sorted(maps.Keys(counts)) {
		all = append(all, fmt.Sprint(counts[s], " ", s))
	}
	return strings.Join(all, ", ")
}

// TestSagasDoc runs each command of that section of docs/operations.md as it stands there, on two
// sagas that are stopped at their payment and one that has completed, and demands its effect.
func TestSagasDoc(t *testing.T) {
	t.Parallel()
	const as = "1 COMPLETED, 2 MANUAL_ACTION"
	effects := []struct{ command, says, statuses string }{
		{"backstep saga list --status MANUAL_ACTION", "command parked: gateway away", as},
		{"backstep saga list --step charge-payment --error 'gateway away' --older 10m", "charge-payment", as},
		{`backstep saga show "$ID"`, `backstep saga skip `, as},
		{`backstep saga show "$ID" --json > "$FILE"`, "", as},
		{"backstep saga versions", "place-order        1        0             0              2", as},
		{`backstep saga retry "$ID" --dry-run`, "INSERT payments: 1 row\n", as},
		{`backstep saga retry "$ID" --reason 'the gateway is back'`, "1 saga retried", "1 COMPLETED, 1 MANUAL_ACTION, 1 RUNNING"},
		{"backstep saga retry --status MANUAL_ACTION --error 'gateway away' --rate 20 --reason 'the gateway is back'", "2 sagas retried", "1 COMPLETED, 2 RUNNING"},
		{`backstep saga skip "$ID" --step charge-payment --dry-run`, "the action of step charge-payment is left out; it goes on to execute step create-shipment", as},
		{`backstep saga skip "$ID" --step charge-payment --reason 'paid in cash, ticket 12'`, "1 saga skipped", "1 COMPLETED, 1 MANUAL_ACTION, 1 RUNNING"},
		{`backstep saga cancel "$ID" --reason 'the customer called'`, "1 saga cancelled", "1 COMPENSATING, 1 COMPLETED, 1 MANUAL_ACTION"},
		{"backstep saga cancel --step charge-payment --older 1h --max 100 --dry-run", "2 sagas chosen; nothing was done", as},
		{`backstep saga compensate "$DONE" --dry-run`, "UPDATE shipments: 1 row", as},
		{`backstep saga compensate "$DONE" --reason 'sent back, ticket 12'`, "1 saga compensated", "1 COMPENSATING, 2 MANUAL_ACTION"},
		{`backstep saga resolve "$ID" --as compensated --reason 'sold elsewhere, ticket 12'`, "1 saga resolved", "1 COMPENSATED, 1 COMPLETED, 1 MANUAL_ACTION"},
	}
	section, commands := documented(t, "Sagas that need somebody")
	l := sagasOf(t)
	for i, e := range effects {
		commands.take(t, e.command)
		l.clear()
		id := l.park(l.work(l.place("one"), 1), "gateway away")
		l.park(l.work(l.place("two"), 1), "gateway away")
		done := l.work(l.place("three"), 3)
		execute(t, l.db, "UPDATE saga_instances SET updated_at = NOW(6) - INTERVAL 2 HOUR")
		l.shell(e.command, e.says, "ID="+id, "DONE="+done, "FILE="+t.TempDir()+"/saga")
		if got := l.statuses(); got != e.statuses {
			t.Errorf("after %s (%d) the sagas are %s, want %s", e.command, i, got, e.statuses)
		}
	}
	commands.end(t)
	var byHand, paid []string
	for _, query := range blocks(section, "sql") {
		if strings.HasPrefix(query, "UPDATE ") {
			byHand = append(byHand, strings.TrimSuffix(query, ";"))
			continue
		}
		if strings.HasPrefix(query, "INSERT ") {
			paid = append(paid, strings.TrimSuffix(query, ";"))
			continue
		}
		var at time.Time
		var actor, action, reason string
		var id []byte
		if err := l.db.QueryRowContext(t.Context(), query).Scan(&at, &actor, &action, &id, &reason); err != nil ||
			actor != self() || action != "resolve" || reason != "as COMPENSATED: sold elsewhere, ticket 12" {
			t.Errorf("%s: %s %s %s %v", query, actor, action, reason, err)
		}
	}
	l.putRightByHand(byHand)
	l.paidInCash(paid)
}

// paidInCash runs what the document says on an order whose charge is left out, and demands that nothing is
// amiss when it has completed.
func (l *sagaLot) paidInCash(statements []string) {
	l.t.Helper()
	l.clear()
	execute(l.t, l.db, "UPDATE inventory SET available = initial, reserved = 0, shipped = 0")
	id := l.park(l.work(l.place("one"), 1), "gateway away")
	l.run("", "saga", "skip", id, "--step", "charge-payment", "--reason", "paid in cash", "--actor", "ops").want(exitOK)
	d, err := saga.Get(l.t.Context(), l.db, id)
	if err != nil {
		l.t.Fatal(err)
	}
	for _, s := range statements {
		execute(l.t, l.db, strings.NewReplacer("$ORDER", d.CorrelationID, "$ID", id).Replace(s))
	}
	l.work(id, 1)
	if v, err := handlers.Verify(l.t.Context(), l.db); err != nil || len(v) > 0 || l.statuses() != "1 COMPLETED" {
		l.t.Errorf("after %q: sagas %s, %+v, %v", statements, l.statuses(), v, err)
	}
}

// putRightByHand runs what the document says on an order that is charged and not shipped, and demands
// that it can be resolved then, and that nothing is amiss.
func (l *sagaLot) putRightByHand(statements []string) {
	l.t.Helper()
	l.clear()
	execute(l.t, l.db, "UPDATE inventory SET available = initial, reserved = 0, shipped = 0")
	id := l.park(l.work(l.place("one"), 2), "no carrier")
	resolve := []string{"saga", "resolve", id, "--as", "compensated", "--reason", "refunded by hand", "--actor", "ops"}
	l.run("", resolve...).want(exitFailed, "refund the payment first")
	d, err := saga.Get(l.t.Context(), l.db, id)
	if err != nil {
		l.t.Fatal(err)
	}
	for _, s := range statements {
		execute(l.t, l.db, strings.ReplaceAll(s, "$ORDER", d.CorrelationID))
	}
	l.run("", resolve...).want(exitOK)
	if v, err := handlers.Verify(l.t.Context(), l.db); err != nil || len(v) > 0 || len(statements) == 0 {
		l.t.Errorf("after %q: %+v, %v", statements, v, err)
	}
}

// runReport is what a verb prints as JSON.
type runReport struct {
	Counts map[sagaFate]int
	More   bool
	Left   int
	Sagas  []sagaOutcome
}

// TestSagaVerbs: what cannot be done is said and is exit code 1, twice is once, and a run that goes
// wrong stops by itself.
func TestSagaVerbs(t *testing.T) {
	t.Parallel()
	l := sagasOf(t)
	because := []string{"--reason", "ticket 12", "--actor", "ops"}
	do := func(args ...string) answer {
		t.Helper()
		return l.run("", slices.Concat([]string{"saga"}, args, because)...)
	}
	a, b := l.park(l.work(l.place("a"), 1), "gateway away"), l.park(l.work(l.place("b"), 1), "gateway away")
	do("retry", a, "nobody").want(exitFailed, `no saga has the id "nobody"`)
	do("resolve", a, "--as", "completed").want(exitFailed, "saga "+a+": left as it is: ", "cannot be CONFIRMED: it is not charged and not shipped", "0 sagas resolved, 1 not", "1 of 1 saga: "+a)
	if got := l.statuses(); got != "2 MANUAL_ACTION" {
		t.Errorf("sagas %s", got)
	}
	l.run("", "saga", "retry", a, "--dry-run").want(exitOK, "BACKSTEP_PAYMENT_URL is not set, so")
	l.run("", "saga", "show", a).want(exitOK, "# undo what it did\n  backstep saga resolve "+a+" --as compensated") // not as completed: that is refused
	newOperator(t, append(slices.Clone(l.env), "BACKSTEP_PAYMENT_URL=http://127.0.0.1:1")...).run("", "saga", "retry", a, "--dry-run").
		want(exitOK, "not tried: it would call another system first, with the idempotency key "+a+":charge-payment:execute")
	var r runReport
	do("retry", b).want(exitOK, "known when the step has run: backstep saga show "+b)
	l.park(b, "gateway away")
	do("retry", "a", a, "--json").want(exitOK).decode(&r) // by the id of the order's request
	if len(r.Sagas) != 1 || r.Counts[fateChanged] != 1 || r.Sagas[0].Effect.Status != saga.Running || r.Sagas[0].Effect.Step != "charge-payment" {
		t.Errorf("%+v", r)
	}
	do("retry", a).want(exitOK, "saga "+a+": already so: attempt 1 to execute step charge-payment is PENDING and waits for a relay, so no other is sent. See backstep outbox show ", "0 sagas retried, 1 already")
	l.run("", "saga", "show", a).want(exitOK, "ticket 12", "PENDING", "backstep saga cancel "+a)
	l.work(a, 2)
	do("skip", a, "--step", "create-shipment").want(exitFailed, "it is COMPLETED", "compensate undoes it")
	do("cancel", a).want(exitFailed, "too late to cancel it; compensate undoes it")
	do("compensate", "--all").want(exitOK, "saga "+b+": compensated", "1 saga compensated") // not those that have completed
	do("compensate", "--type", "place-order", "--status", "completed", "--max", "1").want(exitOK, "saga "+a+": compensated: it is undone; it goes on to compensate step create-shipment")
	l.work(a, 3)
	l.work(b, 1)
	if got := l.statuses(); got != "2 COMPENSATED" {
		t.Errorf("sagas %s", got)
	}
	if v, err := handlers.Verify(t.Context(), l.db); err != nil || len(v) > 0 {
		t.Errorf("%+v, %v", v, err)
	}

	// Four that cannot be done: it stops after two, and leaves the others alone.
	l.clear()
	for _, request := range []string{"c", "d", "e", "f"} {
		l.park(l.work(l.place(request), 1), "gateway away")
	}
	do("resolve", "--all", "--as", "completed", "--max-failures", "2", "--max", "3", "--json").
		want(exitFailed, "there are more (--max)", "stopped after 2 failures (--max-failures 2); 1 saga is left as it is").decode(&r)
	if r.Counts[fateNot] != 2 || r.Left != 1 || !r.More {
		t.Errorf("%+v", r)
	}
	l.run("", "saga", "resolve", "--all", "--as", "completed", "--dry-run").want(exitFailed, "would be left as it is: ", "4 of 4 sagas would not be resolved")
}

// TestSagasThatFailAgain stop a run: something is wrong yet.
func TestSagasThatFailAgain(t *testing.T) {
	t.Parallel()
	l := sagasOf(t)
	var ids []string
	for _, request := range []string{"c", "d", "e", "f"} {
		ids = append(ids, l.park(l.work(l.place(request), 1), "gateway away"))
	}
	ctx, stop := context.WithCancel(t.Context())
	b := l.start("backstep", "saga", "retry", "--all", "--reason", "x", "--rate", "1", "--max-failures", "1", "--json")
	failed := make(chan error, 1)
	go func() { // a worker that parks what comes
		failed <- func() error {
			for ctx.Err() == nil {
				list, err := saga.Choose(ctx, l.db, saga.Filter{}, []saga.Status{saga.Running})
				if err != nil {
					return err
				}
				for _, id := range list {
					d, err := saga.Get(ctx, l.db, id)
					if err != nil {
						return err
					}
					m := message.Message{Properties: message.Properties{MessageID: d.CommandID}, Headers: message.Headers{message.HeaderSagaID: id}}
					if err := sqltx.WithTx(ctx, l.db, func(ctx context.Context, tx *sqltx.Tx) error {
						return l.engine.CommandParked(ctx, tx, &m, "gateway still away")
					}); err != nil {
						return err
					}
				}
				time.Sleep(5 * time.Millisecond) // nothing tells when a saga goes on: it is looked for, not all the time
			}
			return nil
		}()
	}()
	code := b.wait()
	stop()
	if err := <-failed; err != nil && ctx.Err() == nil {
		t.Error(err)
	}
	b.says("stopped after 1 failure (--max-failures 1); 3 sagas are left as they are")
	b.says(string(fateRelapsed))
	if got := l.statuses(); code != exitFailed || got != "4 MANUAL_ACTION" || len(ids) != 4 {
		t.Errorf("exit code %d, sagas %s", code, got)
	}
	var actions int
	if err := l.db.QueryRowContext(t.Context(), `SELECT COUNT(*) FROM saga_actions`).Scan(&actions); err != nil || actions != 1 {
		t.Errorf("%d actions, %v, want 1", actions, err)
	}
}

// TestPaceOfSagas: --rate is how many sagas a second are gone through at most. The first does not wait.
func TestPaceOfSagas(t *testing.T) {
	t.Parallel()
	l := sagasOf(t)
	const sagas, perSecond = 5, 10
	for i := range sagas {
		l.place(fmt.Sprint(i))
	}
	begun := time.Now()
	l.run("", "saga", "cancel", "--status", "running", "--reason", "x", "--rate", fmt.Sprint(perSecond)).want(exitOK, "5 sagas cancelled")
	if took, least := time.Since(begun), time.Second*(sagas-1)/perSecond; took < least {
		t.Errorf("%d sagas in %s, want %s at least", sagas, took, least)
	}
}

// TestWatchingSagas: a line of JSON for each look, until Ctrl-C.
func TestWatchingSagas(t *testing.T) {
	t.Parallel()
	l := sagasOf(t, "BACKSTEP_JAEGER_URL=http://jaeger:16686/")
	id := l.place("a")
	execute(t, l.db, "UPDATE saga_instances SET trace_id = 'abc'")
	for _, args := range [][]string{{"list"}, {"show", id}, {"versions"}} {
		b := l.start("backstep", slices.Concat([]string{"saga"}, args, []string{"--watch", "--interval", "10ms", "--json"})...)
		eventually(t, "it has looked twice", func() error {
			if n := strings.Count(b.text(), "\n"); n < 2 {
				return fmt.Errorf("%d lines", n)
			}
			return nil
		})
		if code := b.stop(syscall.SIGINT); code != exitOK {
			t.Errorf("%v: exit code %d", args, code)
		}
		if line, _, _ := strings.Cut(b.text(), "\n"); !json.Valid([]byte(line)) {
			t.Errorf("%v: %s", args, line)
		}
		if args[0] == "show" && !strings.Contains(b.text(), `"trace_url":"http://jaeger:16686/trace/abc"`) {
			t.Errorf("no link: %s", b.text())
		}
	}
}

// TestHelpOfSagaVerbs: it fits a screen, and a status that nothing can be done about is not offered.
func TestHelpOfSagaVerbs(t *testing.T) {
	o := newOperator(t)
	for verb, statuses := range map[string]string{
		"retry": "RUNNING, COMPENSATING, MANUAL_ACTION", "skip": "RUNNING, COMPENSATING, MANUAL_ACTION", "cancel": "RUNNING, MANUAL_ACTION",
		"compensate": "RUNNING, COMPLETED, MANUAL_ACTION", "resolve": "MANUAL_ACTION",
	} {
		help := o.run("", "saga", verb, "--help").want(exitOK, "only those with this status: "+statuses+"\n").stdout
		for line := range strings.Lines(help) {
			if len(line) > 125 {
				t.Errorf("a line of saga %s --help has %d bytes: %s", verb, len(line), line)
			}
		}
		if verb == "cancel" || verb == "compensate" {
			o.run("", "saga", verb, "--status", "COMPENSATING", "--reason", "x").want(exitUsage, "there is nothing to "+verb+" about those")
		}
	}
}

// TestInSum: what a dry run prints of statements.
func TestInSum(t *testing.T) {
	got := inSum([]saga.Written{{Verb: "INSERT", Table: "a", Rows: 1}, {Verb: "DELETE", Table: "a"}, {Verb: "INSERT", Table: "a"}, {Verb: "UPDATE", Table: "a", Rows: -1},
		{Verb: "INSERT", Table: "b", Rows: 1}, {Verb: "INSERT", Table: "a", Rows: 2}, {Verb: "DELETE", Table: "a"}, {Verb: "UPDATE", Table: "a", Rows: -1}})
	want := []saga.Written{{Verb: "INSERT", Table: "a", Rows: 3}, {Verb: "DELETE", Table: "a"}, {Verb: "INSERT", Table: "a"},
		{Verb: "UPDATE", Table: "a", Rows: -1}, {Verb: "INSERT", Table: "b", Rows: 1}, {Verb: "UPDATE", Table: "a", Rows: -1}}
	if !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}
