package main

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"backstep/internal/handlers"
	"backstep/internal/saga"
)

func newSagaList() *cobra.Command {
	var f saga.Filter
	var status string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List sagas, those that changed last first",
		Long: `Lists the sagas in the database in BACKSTEP_MYSQL_DSN: those that changed last come first. With
--older it is the other way round: what has been where it is for longest needs somebody most.`,
		Example: `  backstep saga list --status MANUAL_ACTION
  backstep saga list --status RUNNING --older 10m
  backstep saga list --json --limit 1000 | jq -r '.[] | select(.last_error) | .id'`,
		Args: cobra.NoArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			f.Status = saga.Status(strings.ToUpper(status))
			switch {
			case status != "" && !slices.Contains(saga.Statuses, f.Status):
				return usagef("--status %q is none; the statuses are %s", status, joinStatuses())
			case f.OlderThan < 0:
				return usagef("--older is %s; it must be positive", f.OlderThan)
			case f.Limit < 1:
				return usagef("--limit is %d; it must be 1 or more", f.Limit)
			}
			return withSchema(cmd, func(ctx context.Context, _ config, db *sql.DB) error {
				list, err := saga.List(ctx, db, f)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), append([]saga.Summary{}, list...))
				}
				printSagas(cmd, list, f.Limit)
				return nil
			})
		}),
	}
	cmd.Flags().StringVar(&status, "status", "", "only those with this status: "+joinStatuses())
	cmd.Flags().StringVar(&f.Type, "type", "", "only those of this type, such as place-order")
	cmd.Flags().DurationVar(&f.OlderThan, "older", 0, "only those unchanged for so long, such as 10m")
	cmd.Flags().IntVar(&f.Limit, "limit", 50, "so many at most")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the list as JSON")
	return cmd
}

func printSagas(cmd *cobra.Command, list []saga.Summary, limit int) {
	out := cmd.OutOrStdout()
	if len(list) == 0 {
		fmt.Fprintln(out, "no sagas")
		return
	}
	t := newTable("id", "type", "status", "step", "attempt", "unchanged", "reason")
	t.SetColumnConfigs([]table.ColumnConfig{wrapAt("reason", 60)})
	for _, s := range list {
		step, attempt := "", ""
		if s.Status != saga.Completed && s.Status != saga.Compensated {
			step, attempt = stepName(s), fmt.Sprint(s.Attempt)
			if s.Direction == saga.Compensate {
				step = "undo " + step
			}
		}
		t.AppendRow([]any{s.ID, s.Type, s.Status, step, attempt, short(s.Unchanged.Round(time.Millisecond)), s.LastError})
	}
	render(out, t)
	if len(list) == limit {
		fmt.Fprintf(cmd.ErrOrStderr(), "that is as many as --limit %d allows; there may be more\n", limit)
	}
}

// stepName returns the name of the step a saga is at, or its number if this binary does not
// know the definition.
func stepName(s saga.Summary) string {
	if names := stepNames(s); s.CurrentStep < len(names) {
		return names[s.CurrentStep]
	}
	return fmt.Sprintf("step %d", s.CurrentStep+1)
}

// stepNames returns the names of a saga's steps, none if this binary does not know the definition.
func stepNames(s saga.Summary) []string {
	d, err := handlers.NewEngine(slog.New(slog.DiscardHandler)).Definition(s.Type, s.Version)
	if err != nil {
		return nil // the only error: unknown
	}
	return d.StepNames()
}

func joinStatuses() string {
	names := make([]string, len(saga.Statuses))
	for i, s := range saga.Statuses {
		names[i] = string(s)
	}
	return strings.Join(names, ", ")
}
