package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
)

// shown is a saga as saga show tells of it.
type shown struct {
	saga.Detail
	Places    []outbox.Place  `json:"awaited_message_at"` // where the message it awaits is
	Consumers []saga.Consumer `json:"consumers"`          // of the queue it was published to
	TraceURL  string          `json:"trace_url,omitempty"`
	Advice    []string        `json:"advice"` // what is going on and what can be done, in words
}

func newSagaShow() *cobra.Command {
	var w watchFlags
	cmd := &cobra.Command{
		Use:   "show ID|REQUEST",
		Short: "Show one saga: its steps, what it waits for, and what can be done",
		Long: `Shows a saga's steps with what they returned or failed with, the message it awaits and where that is,
its deadlines by the clock on the wall, its calls to other systems, what operators did to it, and
the commands that help. With BACKSTEP_JAEGER_URL its trace is a link.`,
		Example: `  backstep saga show 0194f1a4-5c00-7000-8000-000000000001
  backstep saga show 0194f1a4-5c00-7000-8000-000000000001 --json | jq .steps
  backstep saga show my-order-1 --watch    # by the id of the request that made the order`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.ExactArgs(1)(cmd, args); err != nil {
				return usagef("%w: name a saga, by its id or that of the request that made its order; backstep saga list shows the sagas there are", err)
			}
			return nil
		},
		RunE: verb(func(cmd *cobra.Command, args []string) error {
			if err := w.check(); err != nil {
				return err
			}
			return withSchema(cmd, func(ctx context.Context, c config, db *sql.DB) error {
				return w.run(ctx, func(ctx context.Context) error {
					s, err := c.show(ctx, db, args[0])
					if err != nil {
						return err
					}
					return w.print(cmd.OutOrStdout(), s, s.print)
				})
			})
		}),
	}
	w.add(cmd)
	return cmd
}

// show returns all there is to say of a saga.
func (c config) show(ctx context.Context, db *sql.DB, id string) (s shown, err error) {
	if s.Detail, err = findSaga(ctx, db, id); err != nil {
		return s, err
	}
	if s.CommandID != "" {
		if s.Places, err = placesOf(ctx, db, s.Detail); err != nil {
			return s, err
		}
	}
	s.Consumers = []saga.Consumer{}
	commands, _ := withoutReply(s.Places)
	for _, p := range commands {
		if p.Status == string(outbox.StatusPublished) && p.Exchange == message.CommandsExchange {
			if s.Consumers, err = saga.Consumers(ctx, db, p.RoutingKey); err != nil {
				return s, err
			}
		}
	}
	if c.JaegerURL != "" && s.TraceID != "" {
		s.TraceURL = strings.TrimSuffix(c.JaegerURL, "/") + "/trace/" + url.PathEscape(s.TraceID)
	}
	s.Steps = withPending(s.Detail)
	s.Advice = advice(s.Detail, s.Places, s.Consumers, offersFor(ctx, db, s.Detail))
	return s, nil
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
			"says whether it was parked, and why, and backstep parked show %[2]s what became of it and what helps. Else it may still be in its queue (is a worker running?), have gone to "+
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
	names := sagas().StepNames(d)
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
	field("type", "%s, version %d", printable(s.Type), s.Version)
	field("correlation id", "%s", printable(s.CorrelationID))
	field("status", "%s", s.Status)
	if s.LastError != "" {
		field("because", "%s", printable(s.LastError))
	}
	if s.CancelReason != "" && s.Status == saga.Running {
		field("to be cancelled", "%s (when its open call ends, or its message comes again)", printable(s.CancelReason))
	}
	field("started", "%s UTC", clock(s.CreatedAt))
	if s.FinishedAt.IsZero() {
		field("unchanged for", "%s", short(s.Unchanged))
	} else {
		field("finished", "%s UTC, after %s", clock(s.FinishedAt), short(s.FinishedAt.Sub(s.CreatedAt)))
	}
	if s.CommandID != "" {
		field("awaits", "message %s since %s UTC", printable(s.CommandID), clock(s.AwaitedSince))
		field("", "attempt %d to %s step %s", s.Attempt, s.Direction, stepOf(s.Detail, s.CurrentStep))
	}
	if !s.DeadlineAt.IsZero() {
		field("deadline", "%s UTC%s; an outage puts it off", clock(s.DeadlineAt), in(s.UntilDue))
	}
	if !s.SagaDeadline.IsZero() && !s.SagaDeadline.Equal(s.DeadlineAt) {
		field("of the saga", "%s UTC", clock(s.SagaDeadline))
	}
	switch {
	case s.Rescues > 0 && remote(s.Detail):
		field("sent again", "%s: half of the deadline had passed without a reply", times(s.Rescues))
	case s.Rescues > 0:
		field("rescued", "%s: the message it awaits was lost and sent again", times(s.Rescues))
	}
	switch {
	case s.TraceID == "":
		field("trace id", "none: whoever submitted it started no trace")
	case s.TraceURL != "":
		field("trace", "%s", s.TraceURL)
	default:
		field("trace id", "%s", s.TraceID)
	}
	field("input", "%s", printable(abbreviate(string(s.Payload), 300)))
	_ = w.Flush() // as for all that is printed: nobody is left to tell

	s.printSteps(out)
	s.printCalls(out)
	s.printActions(out)
	fmt.Fprintln(out)
	for _, a := range s.Advice {
		fmt.Fprintln(out, printable(a))
	}
}

// in says how long until then, or since when.
func in(d time.Duration) string {
	if d < 0 {
		return ", " + short(-d) + " ago"
	}
	return ", in " + short(d)
}

func (s shown) printSteps(out io.Writer) {
	fmt.Fprintln(out)
	t := newTable("step", "status", "attempts", "began (UTC)", "changed (UTC)", "result", "error")
	t.SetColumnConfigs([]table.ColumnConfig{wrapAt("result", 50), wrapAt("error", 50)})
	for _, st := range s.Steps {
		attempts := ""
		if st.Attempts > 0 {
			attempts = fmt.Sprint(st.Attempts)
		}
		t.AppendRow([]any{printable(st.Name), st.Status, attempts, clock(st.StartedAt), clock(st.UpdatedAt),
			printable(abbreviate(string(st.Result), 200)), printable(st.Error)})
	}
	render(out, t)
}

// printCalls prints the journal of calls to systems that are not ours.
func (s shown) printCalls(out io.Writer) {
	if len(s.Calls) == 0 {
		return
	}
	fmt.Fprintln(out)
	t := newTable("call of step", "to", "status", "times", "since (UTC)", "outcome", "error")
	t.SetColumnConfigs([]table.ColumnConfig{wrapAt("outcome", 50), wrapAt("error", 50)})
	for _, c := range s.Calls {
		status := c.Status
		switch {
		case status == "OPEN" && s.undone(c):
			status = "OPEN: if it happened, it has been undone"
		case status == "OPEN":
			status = "OPEN: it may have happened"
		}
		t.AppendRow([]any{stepOf(s.Detail, c.Step), c.Direction, status, c.Calls, clock(c.OpenedAt), printable(abbreviate(string(c.Outcome), 200)), printable(c.Error)})
	}
	render(out, t)
}

// undone reports whether the call that compensates another has been made.
func (s shown) undone(c saga.ExternalCall) bool {
	return slices.ContainsFunc(s.Calls, func(o saga.ExternalCall) bool {
		return c.Direction == saga.Execute && o.Direction == saga.Compensate && o.Step == c.Step && o.Status == "DONE"
	})
}

// printActions prints what was done to the saga from outside.
func (s shown) printActions(out io.Writer) {
	if len(s.Actions) == 0 {
		return
	}
	fmt.Fprintln(out)
	t := newTable("at (UTC)", "action", "by", "reason")
	t.SetColumnConfigs([]table.ColumnConfig{wrapAt("reason", 80)})
	for _, a := range s.Actions {
		t.AppendRow([]any{clock(a.At), printable(a.Action), printable(a.Actor), printable(a.Reason)})
	}
	render(out, t)
}

// abbreviate cuts a text to about n bytes.
func abbreviate(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + fmt.Sprintf("… (%d bytes; --json has all)", len(s))
}
