package main

import (
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"

	"github.com/spf13/cobra"

	"backstep/internal/handlers"
	"backstep/internal/saga"
)

// rehearsed is what would become of one saga.
type rehearsed struct {
	ID      string          `json:"id"`
	Refused string          `json:"refused,omitempty"`
	Would   *saga.Rehearsal `json:"would,omitempty"`
}

// rehearse says what would be done to sagas; of many, to the first.
func (a *sagaAction) rehearse(cmd *cobra.Command, c config, db *sql.DB, ids []string, more bool, op saga.Operation) error {
	var gateway *handlers.Gateway
	if c.Payment.URL != "" {
		var err error
		if gateway, err = handlers.NewGateway(c.Payment.URL); err != nil {
			return usagef("BACKSTEP_PAYMENT_URL: %w", err)
		}
	}
	// It is not called: the engine has to know that workers would.
	engine, refusals := handlers.NewEngineWithGateway(slog.New(slog.DiscardHandler), gateway), 0
	list, cashless := []rehearsed{}, false
	for _, id := range ids[:min(len(ids), maxFaults)] {
		r, err := engine.Rehearse(cmd.Context(), db, id, op)
		said := rehearsed{ID: id, Would: &r}
		if no := notDone(err); no != "" {
			refusals++
			said = rehearsed{ID: id, Refused: no}
			err = nil
		}
		switch {
		case errors.Is(err, saga.ErrMovedOn):
			continue // since it was chosen
		case err != nil:
			return fmt.Errorf("%s saga %s: %w", a.verb, id, err)
		}
		list = append(list, said)
		cashless = cashless || gateway == nil && r.Run != nil && r.Run.Queue == handlers.PaymentQueue
	}
	if cashless {
		fmt.Fprintln(cmd.ErrOrStderr(), "BACKSTEP_PAYMENT_URL is not set, so this is what workers without a payment gateway do; set it if yours have it")
	}
	out := cmd.OutOrStdout()
	if a.asJSON {
		if err := printJSON(out, struct {
			Chosen int         `json:"chosen"`
			More   bool        `json:"more"`
			DryRun bool        `json:"dry_run"`
			Sagas  []rehearsed `json:"sagas"`
		}{len(ids), more, true, list}); err != nil {
			return err
		}
	} else {
		for i := range list {
			list[i].print(out)
		}
		if n := len(ids) - maxFaults; n > 0 {
			fmt.Fprintf(out, "and %s more that nothing was tried with\n", plural(n, "saga"))
		}
		fmt.Fprintf(out, "%s chosen; nothing was done (--dry-run)\n", plural(len(ids), "saga"))
	}
	if more {
		fmt.Fprintln(cmd.ErrOrStderr(), "there are more (--max)")
	}
	if refusals > 0 {
		return fmt.Errorf("%d of %s would not be %s", refusals, plural(len(list), "saga"), a.done)
	}
	return nil
}

// notDone says why something cannot be done to a saga; "": nothing is known against it.
func notDone(err error) string {
	if no, ok := errors.AsType[*saga.RefusedError](err); ok {
		return no.Error()
	}
	if failed, ok := errors.AsType[*saga.HookError](err); ok {
		return hookFailed(failed)
	}
	return ""
}

func (r *rehearsed) print(out io.Writer) {
	switch {
	case r.Refused != "":
		fmt.Fprintf(out, "saga %s would be left as it is: %s\n\n", r.ID, printable(r.Refused))
		return
	case !r.Would.Changed:
		fmt.Fprintf(out, "saga %s: already so: %s\n\n", r.ID, printable(r.Would.Detail))
		return
	}
	fmt.Fprintf(out, "saga %s: %s\n", r.ID, printable(r.Would.Detail))
	printDoing(out, r.Would.Doing)
	if run := r.Would.Run; run != nil {
		fmt.Fprintf(out, "then its worker would %s step %s:\n", run.Direction, printable(run.Step))
		switch {
		case run.NotRun != "":
			fmt.Fprintf(out, "  not tried: %s\n", printable(run.NotRun))
		default:
			printDoing(out, run.Doing)
			if run.Error != "" {
				fmt.Fprintf(out, "  it fails, and what it wrote is taken back: %s\n", printable(run.Error))
			}
			fmt.Fprintf(out, "  the saga is %s then\n", run.Status)
		}
	}
	fmt.Fprintln(out)
}

func printDoing(out io.Writer, d saga.Doing) {
	for _, w := range inSum(d.Writes) {
		fmt.Fprintf(out, "  %s %s: %s\n", w.Verb, w.Table, plural(int(w.Rows), "row"))
	}
	for _, m := range d.Messages {
		after := ""
		if m.After > 0 {
			after = " after " + short(m.After)
		}
		fmt.Fprintf(out, "  message %s to exchange %s, routing key %s%s\n", printable(m.Type), printable(m.Exchange), printable(m.RoutingKey), after)
	}
}

// inSum returns what was done to each table, in the order of the first. What found no row to change is
// told apart: that may be what somebody looks for.
func inSum(writes []saga.Written) (sum []saga.Written) {
	for _, w := range writes {
		same := func(s saga.Written) bool {
			return s.Verb == w.Verb && s.Table == w.Table && (s.Rows == 0) == (w.Rows == 0) && s.Rows >= 0 && w.Rows >= 0
		}
		if i := slices.IndexFunc(sum, same); i >= 0 {
			sum[i].Rows += w.Rows
		} else {
			sum = append(sum, w)
		}
	}
	return sum
}
