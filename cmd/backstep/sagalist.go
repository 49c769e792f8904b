package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"regexp"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/saga"
)

func newSagaList() *cobra.Command {
	var f sagaFilter
	var w watchFlags
	var limit int
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List sagas, those that changed last first",
		Long: `Lists the sagas in the database in BACKSTEP_MYSQL_DSN: those that changed last come first. With
--older it is the other way round: what has been where it is for longest needs somebody most.
With --step only sagas that have not ended are meant, unless --status says else. The reason is why a
saga is where it is, or why its step is tried again, and --error looks there. Of a long one it shows the
start; backstep saga show ID and --json have all of it.

Status and age are looked up in an index; --type, --step and --error are compared with one saga
after the other, with 100,000 of each status at most. If that was not all, it says so.`,
		Example: `  backstep saga list --status MANUAL_ACTION
  backstep saga list --status RUNNING --older 10m
  backstep saga list --step charge-payment --error 'gateway away' --watch
  backstep saga list --json --limit 1000 | jq -r '.[] | select(.step_error) | .id'`,
		Args: cobra.NoArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			if err := w.check(); err != nil {
				return err
			}
			chosen, err := f.filter()
			if err != nil {
				return err
			}
			if chosen.Limit = limit; limit < 1 {
				return usagef("--limit is %d; it must be 1 or more", limit)
			}
			f.warn(cmd)
			return withSchema(cmd, func(ctx context.Context, _ config, db *sql.DB) error {
				return w.run(ctx, func(ctx context.Context) error {
					list, partial, err := saga.List(ctx, db, chosen)
					if err != nil {
						return err
					}
					err = w.print(cmd.OutOrStdout(), append([]saga.Summary{}, list...), func(out io.Writer) { printSagas(out, list) })
					switch {
					case partial:
						fmt.Fprintln(cmd.ErrOrStderr(), "not all sagas were looked at, only the first 100,000 of a status; --status, --older and a higher --limit help")
					case len(list) == limit && !w.asJSON:
						fmt.Fprintf(cmd.ErrOrStderr(), "that is as many as --limit %d allows; there may be more\n", limit)
					}
					return err
				})
			})
		}),
	}
	f.add(cmd, saga.Statuses)
	cmd.Flags().IntVar(&limit, "limit", 50, "so many at most")
	w.add(cmd)
	return cmd
}

func printSagas(out io.Writer, list []saga.Summary) {
	if len(list) == 0 {
		fmt.Fprintln(out, "no sagas")
		return
	}
	t := newTable("id", "type", "status", "step", "attempt", "unchanged", "reason")
	for _, s := range list {
		step, attempt := "", ""
		if s.Status != saga.Completed && s.Status != saga.Compensated {
			step, attempt = stepName(s), fmt.Sprint(s.Attempt)
			if s.Direction == saga.Compensate {
				step = "undo " + step
			}
		}
		t.AppendRow([]any{s.ID, printable(s.Type), s.Status, step, attempt, short(s.Unchanged.Round(time.Millisecond)), reasonCell(reasonOf(s))})
	}
	render(out, t)
}

// failedAt is what the list has in columns of its own; in front of a reason it would leave no room for it.
var failedAt = regexp.MustCompile(`^compensation of step \S+ failed at attempt [0-9]+: `)

// reasonOf says why a saga is where it is, and still is.
func reasonOf(s saga.Summary) string {
	switch {
	case s.LastError == "" && s.CancelReason != "":
		return "to be undone: " + s.CancelReason
	case s.StepError != "":
		return s.StepError
	}
	return failedAt.ReplaceAllString(s.LastError, "")
}

// stepName returns the name of the step a saga is at, or its number if this binary does not
// know the definition.
func stepName(s saga.Summary) string { return stepOf(saga.Detail{Summary: s}, s.CurrentStep) }

// stepOf returns the name of a step of a saga, likewise.
func stepOf(d saga.Detail, i int) string {
	if names := sagas().StepNames(d); i < len(names) {
		return names[i]
	}
	return fmt.Sprintf("step %d", i+1)
}
