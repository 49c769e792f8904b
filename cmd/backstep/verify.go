package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"backstep/internal/amqp"
	"backstep/internal/handlers"
	"backstep/internal/inbox"
	"backstep/internal/outbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

func newVerify() *cobra.Command {
	var asJSON bool
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Check every invariant; exit 1 and a table of what is wrong",
		Long: `Checks, on the database in BACKSTEP_MYSQL_DSN and the broker in BACKSTEP_AMQP_URL, at a moment of
rest: stock is conserved; confirmed orders are charged once and shipped; cancelled ones hold
nothing; every saga has ended; outbox and queues are empty; each message that was published to a
queue of ours, within BACKSTEP_INBOX_RETENTION, was processed or parked. What is parked, and sagas
that need somebody, are shown and are no violation.`,
		Example: `  backstep verify
  backstep verify --wait 30s          # first wait until nothing is in flight
  backstep verify --json | jq .violations`,
		Args: cobra.NoArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			c, err := loadConfig()
			if err != nil {
				return err
			}
			db, err := c.openSchema(ctx)
			if err != nil {
				return err
			}
			defer db.Close() //nolint:errcheck // the process ends
			b, err := c.connect(ctx)
			if err != nil {
				return err
			}
			defer b.close()
			v := verifier{db: db, broker: b, retention: c.Inbox.Retention}
			if wait > 0 {
				if err := v.await(ctx, wait); err != nil {
					fmt.Fprintln(cmd.ErrOrStderr(), "backstep:", err)
				}
			}
			f, err := v.verify(ctx)
			if err != nil {
				return err
			}
			if asJSON {
				err = printJSON(cmd.OutOrStdout(), f)
			} else {
				f.print(cmd.OutOrStdout())
			}
			if err == nil && !f.OK {
				err = errReported
			}
			return err
		}),
	}
	cmd.Flags().DurationVar(&wait, "wait", 0, "first wait so long at most until nothing is in flight")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print what was found as JSON")
	return cmd
}

// verifier checks every invariant.
type verifier struct {
	db        *sql.DB
	broker    *broker
	retention time.Duration // messages older than this are not looked for in the inbox
}

// findings are what verify found.
type findings struct {
	OK         bool              `json:"ok"`
	Violations []sqltx.Violation `json:"violations"`
	Warnings   []string          `json:"warnings"`
	Checked    struct {
		Orders   map[string]int      `json:"orders"`
		Sagas    map[saga.Status]int `json:"sagas"`
		Messages int                 `json:"published_messages"`
		Parked   map[string]int      `json:"parked_queues"`
	} `json:"checked"`
}

func (v verifier) verify(ctx context.Context) (*findings, error) {
	f := &findings{Violations: []sqltx.Violation{}, Warnings: []string{}}
	for _, check := range []func(context.Context, sqltx.Querier) ([]sqltx.Violation, error){
		handlers.Verify, saga.Verify, outbox.Verify,
	} {
		found, err := check(ctx, v.db)
		if err != nil {
			return nil, err
		}
		f.Violations = append(f.Violations, found...)
	}
	for _, check := range []func(context.Context, *findings) error{v.processed, v.queues, v.counts} {
		if err := check(ctx, f); err != nil {
			return nil, err
		}
	}
	f.OK = len(f.Violations) == 0
	return f, nil
}

// page is how many published messages are compared with the inbox at a time.
const page = 1000

// processed looks for what was published and neither processed nor parked.
func (v verifier) processed(ctx context.Context, f *findings) error {
	for after := uint64(0); ; {
		published, err := outbox.PublishedCommands(ctx, v.db, after, v.retention, page)
		if err != nil {
			return err
		}
		byQueue := map[string][]string{}
		for _, p := range published {
			after = p.RowID
			if slices.Contains(handlers.Queues, p.Queue) { // another's queue has another's inbox
				byQueue[p.Queue] = append(byQueue[p.Queue], p.MessageID)
				f.Checked.Messages++
			}
		}
		for queue, ids := range byQueue {
			if err := v.missing(ctx, f, queue, ids); err != nil {
				return err
			}
		}
		if len(published) < page {
			return nil
		}
	}
}

func (v verifier) missing(ctx context.Context, f *findings, queue string, ids []string) error {
	seen, err := inbox.Recorded(ctx, v.db, queue, ids)
	if err != nil {
		return err
	}
	ids = slices.DeleteFunc(ids, func(id string) bool { return seen[id] })
	parked, err := outbox.ParkedCopies(ctx, v.db, queue, ids)
	if err != nil {
		return err
	}
	for _, id := range ids {
		if !parked[id] {
			f.Violations = append(f.Violations, sqltx.Violation{
				Rule: "what was published was processed or parked", Subject: strings.ToValidUTF8(id, "\uFFFD"),
				Detail: fmt.Sprintf("published to %s and not in its inbox; if the broker dead-lettered it, it is in %[1]s.parked", queue),
			})
		}
	}
	return nil
}

// queues looks for messages that no consumer has taken.
func (v verifier) queues(ctx context.Context, f *findings) error {
	f.Checked.Parked = map[string]int{}
	for _, q := range handlers.Queues {
		n, err := v.depth(ctx, q, f)
		if err != nil {
			return err
		}
		if n > 0 {
			f.Violations = append(f.Violations, sqltx.Violation{Rule: "every queue is empty", Subject: q, Detail: plural(n, "message") + " ready"})
		}
		parked := amqp.ParkedQueue(q)
		if n, err = v.depth(ctx, parked, f); err != nil {
			return err
		}
		f.Checked.Parked[parked] = n
		if n > 0 {
			f.Warnings = append(f.Warnings, plural(n, "message")+" in "+parked+": the header x-parked-reason says why")
		}
	}
	return nil
}

// depth returns how many messages are ready in a queue; that it is missing is a violation.
func (v verifier) depth(ctx context.Context, queue string, f *findings) (int, error) {
	s, err := v.broker.client.Session(ctx)
	if err != nil {
		return 0, err
	}
	n, err := s.Depth(ctx, queue)
	if errors.Is(err, amqp.ErrMissing) {
		f.Violations = append(f.Violations, sqltx.Violation{
			Rule: "every queue exists", Subject: queue, Detail: "it does not; run: backstep topology apply",
		})
		return 0, nil
	}
	return n, err
}

func (v verifier) counts(ctx context.Context, f *findings) (err error) {
	if f.Checked.Orders, err = handlers.Counts(ctx, v.db); err != nil {
		return err
	}
	if f.Checked.Sagas, err = saga.Counts(ctx, v.db); err != nil {
		return err
	}
	rows, err := outbox.Counts(ctx, v.db)
	if err != nil {
		return err
	}
	if n := f.Checked.Sagas[saga.ManualAction]; n > 0 {
		f.Warnings = append(f.Warnings, plural(n, "saga")+" in MANUAL_ACTION; run: backstep saga list --status MANUAL_ACTION")
	}
	if n := rows["PARKED"]; n > 0 {
		f.Warnings = append(f.Warnings, plural(n, "outbox row")+" PARKED by the relay: last_error says why")
	}
	return nil
}

// restPoll is how often it is looked whether all is at rest.
const restPoll = 200 * time.Millisecond

// await waits until nothing is in flight. Twice in a row, because what a worker has in hand
// is in no queue and not yet in a table. The error says what still moved.
func (v verifier) await(ctx context.Context, limit time.Duration) error {
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(restPoll)
	defer tick.Stop()
	for quiet := 0; ; {
		f := &findings{}
		open, err := v.open(ctx, f)
		if err != nil {
			return err
		}
		if open == "" {
			if quiet++; quiet == 2 {
				return nil
			}
		} else {
			quiet = 0
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			if open == "" {
				return nil
			}
			return fmt.Errorf("not at rest after %s: %s", short(limit), open)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// open says what is in flight, or "".
func (v verifier) open(ctx context.Context, f *findings) (string, error) {
	sagas, err := saga.Verify(ctx, v.db)
	if err != nil {
		return "", err
	}
	rows, err := outbox.Verify(ctx, v.db)
	if err != nil {
		return "", err
	}
	if err := v.queues(ctx, f); err != nil {
		return "", err
	}
	var parts []string
	if n := len(sagas); n > 0 {
		parts = append(parts, atLeast(n, saga.MaxViolations)+" not ended")
	}
	for _, x := range slices.Concat(rows, f.Violations) {
		parts = append(parts, x.Subject+": "+x.Detail)
	}
	if len(parts) > 3 {
		parts = append(parts[:3], fmt.Sprintf("and %d more", len(parts)-3))
	}
	return strings.Join(parts, "; "), nil
}

func atLeast(n, most int) string {
	s := plural(n, "saga")
	if n == most {
		return s + " or more"
	}
	return s
}

// perRule is how many violations of one rule are printed.
const perRule = 20

func (f *findings) print(out io.Writer) {
	if len(f.Violations) > 0 {
		t := newTable("what should be", "where", "what is")
		t.SetColumnConfigs([]table.ColumnConfig{wrapAt("what should be", 40), wrapAt("where", 40), wrapAt("what is", 60)})
		for rule, list := range byRule(f.Violations) {
			for _, v := range list[:min(len(list), perRule)] {
				t.AppendRow([]any{rule, v.Subject, v.Detail})
			}
			if len(list) > perRule {
				t.AppendRow([]any{rule, fmt.Sprintf("… and %d more", len(list)-perRule), "--json has them"})
			}
		}
		render(out, t)
		fmt.Fprintln(out)
	}
	for _, w := range f.Warnings {
		fmt.Fprintln(out, "note:", w)
	}
	checked := fmt.Sprintf("%s, %s, %s, %s", plural(sum(f.Checked.Orders), "order"), plural(sum(f.Checked.Sagas), "saga"),
		plural(f.Checked.Messages, "published command"), plural(2*len(handlers.Queues), "queue"))
	if f.OK {
		fmt.Fprintf(out, "every invariant holds: %s\n", checked)
		return
	}
	fmt.Fprintf(out, "%s found in %s\n", plural(len(f.Violations), "violation"), checked)
}

// byRule yields violations by rule, in the order in which the rules come first.
func byRule(violations []sqltx.Violation) func(yield func(string, []sqltx.Violation) bool) {
	return func(yield func(string, []sqltx.Violation) bool) {
		var rules []string
		lists := map[string][]sqltx.Violation{}
		for _, v := range violations {
			if lists[v.Rule] == nil {
				rules = append(rules, v.Rule)
			}
			lists[v.Rule] = append(lists[v.Rule], v)
		}
		for _, r := range rules {
			if !yield(r, lists[r]) {
				return
			}
		}
	}
}

func sum[K comparable](counts map[K]int) int {
	n := 0
	for _, c := range counts {
		n += c
	}
	return n
}
