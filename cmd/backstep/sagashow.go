package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"backstep/internal/handlers"
	"backstep/internal/outbox"
	"backstep/internal/saga"
)

// shown is a saga as saga show tells of it.
type shown struct {
	saga.Detail
	Places []outbox.Place `json:"awaited_message_at"` // where the message it awaits is
	Advice []string       `json:"advice"`             // what is going on and what can be done, in words
}

func newSagaShow() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "show ID|REQUEST",
		Short: "Show one saga: its steps, what it waits for, and what can be done",
		Example: `  backstep saga show 0194f1a4-5c00-7000-8000-000000000001
  backstep saga show 0194f1a4-5c00-7000-8000-000000000001 --json | jq .steps
  backstep saga show my-order-1    # by the id of the request that made the order`,
		Args: cobra.ExactArgs(1),
		RunE: verb(func(cmd *cobra.Command, args []string) error {
			return withSchema(cmd, func(ctx context.Context, _ config, db *sql.DB) error {
				d, err := findSaga(ctx, db, args[0])
				if err != nil {
					return err
				}
				s := shown{Detail: d}
				if d.CommandID != "" {
					if s.Places, err = outbox.Find(ctx, db, d.CommandID); err != nil {
						return err
					}
				}
				s.Steps = withPending(d)
				s.Advice = advice(d, s.Places)
				if asJSON {
					return printJSON(cmd.OutOrStdout(), s)
				}
				s.print(cmd.OutOrStdout())
				return nil
			})
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print it as JSON")
	return cmd
}

// findSaga returns the saga with this id, or the one of the order that a request of this id made.
func findSaga(ctx context.Context, db *sql.DB, id string) (saga.Detail, error) {
	d, err := saga.Get(ctx, db, id)
	if errors.Is(err, saga.ErrNotFound) {
		var of string
		if of, err = handlers.SagaOf(ctx, db, id); err == nil {
			d, err = saga.Get(ctx, db, of)
		}
	}
	if errors.Is(err, saga.ErrNotFound) {
		return d, fmt.Errorf("no saga has the id %[1]q, and no order was made by a request of that id. backstep outbox show %[2]s "+
			"says whether it was parked, and why. Else it may still be in its queue (is a worker running?), have gone to "+
			"no queue, or repeat an earlier request with its x-request-id. backstep saga list shows the sagas there are",
			id, quote(id))
	}
	return d, err
}

// withPending returns the saga's steps with those of its definition that have no row yet, and
// with the status of the one that is awaited.
func withPending(d saga.Detail) []saga.StepState {
	byOrder := map[int]saga.StepState{}
	n := 0
	for _, s := range d.Steps {
		byOrder[s.Order] = s
		n = max(n, s.Order+1)
	}
	names := stepNames(d.Summary)
	n = max(n, len(names))
	steps := make([]saga.StepState, 0, n)
	for i := range n {
		s, ok := byOrder[i]
		if !ok {
			s = saga.StepState{Order: i, Status: saga.StepPending}
			if i < len(names) {
				s.Name = names[i]
			}
		}
		if i == d.CurrentStep && d.CommandID != "" {
			switch {
			case d.Status == saga.Running && !ok:
				s.Status = saga.StepRunning
			case d.Status == saga.Compensating && s.Status == saga.StepCompleted:
				s.Status = saga.StepCompensating
			}
		}
		steps = append(steps, s)
	}
	return steps
}

func (s shown) print(out io.Writer) {
	w := columns(out)
	field := func(name, format string, args ...any) { fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	field("saga", "%s", s.ID)
	field("type", "%s, version %d", s.Type, s.Version)
	field("correlation id", "%s", s.CorrelationID)
	field("status", "%s", s.Status)
	if s.LastError != "" {
		field("because", "%s", s.LastError)
	}
	field("started", "%s UTC", clock(s.CreatedAt))
	if s.FinishedAt.IsZero() {
		field("unchanged for", "%s", short(s.Unchanged))
	} else {
		field("finished", "%s UTC, after %s", clock(s.FinishedAt), short(s.FinishedAt.Sub(s.CreatedAt)))
	}
	if s.CommandID != "" {
		field("awaits", "message %s since %s UTC", s.CommandID, clock(s.AwaitedSince))
		field("", "attempt %d to %s step %s", s.Attempt, s.Direction, stepName(s.Summary))
	}
	if s.Rescues > 0 {
		field("rescued", "%d times", s.Rescues)
	}
	if s.TraceID == "" {
		field("trace id", "none: whoever submitted it started no trace")
	} else {
		field("trace id", "%s", s.TraceID)
	}
	field("input", "%s", abbreviate(string(s.Payload), 300))
	_ = w.Flush() // as for all that is printed: nobody is left to tell

	fmt.Fprintln(out)
	t := newTable("step", "status", "attempts", "changed (UTC)", "result", "error")
	t.SetColumnConfigs([]table.ColumnConfig{wrapAt("result", 50), wrapAt("error", 50)})
	for _, st := range s.Steps {
		attempts := ""
		if st.Attempts > 0 {
			attempts = fmt.Sprint(st.Attempts)
		}
		t.AppendRow([]any{st.Name, st.Status, attempts, clock(st.UpdatedAt), abbreviate(string(st.Result), 200), st.Error})
	}
	render(out, t)
	fmt.Fprintln(out)
	for _, a := range s.Advice {
		fmt.Fprintln(out, a)
	}
}

// abbreviate cuts a text to about n bytes.
func abbreviate(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + fmt.Sprintf("… (%d bytes; --json has all)", len(s))
}
