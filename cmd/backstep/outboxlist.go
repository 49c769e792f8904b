package main

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"backstep/internal/outbox"
)

var rowStatuses = []outbox.Status{outbox.StatusPending, outbox.StatusParked, outbox.StatusPublished}

func newOutboxList() *cobra.Command {
	var f rowFilter
	var status []string
	var limit int
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List outbox rows: those that need somebody first",
		Long: `Lists outbox rows. Without --status it lists what is not published: PARKED rows, then PENDING ones,
the oldest first. Of PUBLISHED rows the last comes first, and their times are those of publishing.`,
		Example: `  backstep outbox list
  backstep outbox list --status PARKED --queue payment
  backstep outbox list --status PENDING --older 10m
  backstep outbox list --status PENDING,PARKED,PUBLISHED --key 0194f1a4-5c00-7000-8000-000000000001
  backstep outbox list --status PUBLISHED --since 5m --json | jq -r '.rows[].message_id'`,
		Args: cobra.NoArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			statuses, err := parseStatuses(status)
			if err != nil {
				return err
			}
			if limit < 1 {
				return usagef("--max is %d; it must be 1 or more", limit)
			}
			return withSchema(cmd, func(ctx context.Context, _ config, db *sql.DB) error {
				if _, err := f.resolve(ctx, db); err != nil {
					return err
				}
				list, more, err := outbox.List(ctx, db, f.Filter, limit, statuses...)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), struct {
						Rows []outbox.Item `json:"rows"`
						More bool          `json:"more"`
					}{append([]outbox.Item{}, list...), more})
				}
				if len(list) == 0 {
					fmt.Fprintf(cmd.OutOrStdout(), "no such rows are %s\n", joinRowStatuses(statuses))
					return nil
				}
				itemTable(cmd, list)
				if more {
					fmt.Fprintf(cmd.ErrOrStderr(), "there are more; these are the first %d (--max)\n", limit)
				}
				return nil
			})
		}),
	}
	cmd.Flags().StringSliceVar(&status, "status", nil, "only those with one of these statuses: "+joinRowStatuses(rowStatuses)+" (default PARKED,PENDING)")
	f.add(cmd, "older", "only those from before: 10m ago, or 2026-11-29T14:05:00Z")
	cmd.Flags().IntVar(&limit, "max", 50, "so many at most")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the list as JSON")
	return cmd
}

func parseStatuses(names []string) ([]outbox.Status, error) {
	if len(names) == 0 {
		return []outbox.Status{outbox.StatusParked, outbox.StatusPending}, nil
	}
	var statuses []outbox.Status
	for _, n := range names {
		s := outbox.Status(strings.ToUpper(strings.TrimSpace(n)))
		if !slices.Contains(rowStatuses, s) {
			return nil, usagef("--status %q is none; the statuses are %s", n, joinRowStatuses(rowStatuses))
		}
		if !slices.Contains(statuses, s) {
			statuses = append(statuses, s)
		}
	}
	return statuses, nil
}

func joinRowStatuses(list []outbox.Status) string {
	names := make([]string, len(list))
	for i, s := range list {
		names[i] = string(s)
	}
	return strings.Join(names, ", ")
}
