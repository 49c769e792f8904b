package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/handlers"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

func newOutboxDrop() *cobra.Command {
	var o operatorFlags
	d := outbox.Dropper{}
	cmd := &cobra.Command{
		Use:   "drop ID...",
		Short: "Delete rows that must never be sent",
		Long: `Deletes PARKED or PENDING rows, named by row id or message id; the audit keeps all of them. A saga
that awaits the message goes to MANUAL_ACTION: somebody must decide about it.

A relay may hold a PENDING row in memory, or have it in flight. So the row is parked first, its
shard is called back from the relay, which takes a fraction of a second, and only then it is deleted. If it
was in flight, and the broker has it, it is not dropped, and said to be PUBLISHED. If the relay does
not answer within --patience the row stays PARKED; the same command goes on from there.

It exits with 1 if any row was not dropped. A row that was dropped before counts as dropped.`,
		Example: `  backstep outbox drop 4711 --reason 'poison, see ticket 12'
  backstep outbox drop 0194f1a4-5c00-7000-8000-000000000001 --dry-run`,
		Args: cobra.MinimumNArgs(1),
		RunE: verb(func(cmd *cobra.Command, args []string) error {
			if d.Patience <= 0 {
				return usagef("--patience is %s; it must be positive", d.Patience)
			}
			if err := o.check(); err != nil {
				return err
			}
			return withSchema(cmd, func(ctx context.Context, _ config, db *sql.DB) error {
				ids, err := droppable(ctx, db, args)
				if err != nil {
					return err
				}
				if o.dryRun {
					return dryDrop(cmd, db, ids, o.asJSON)
				}
				d.Operator = o.Operator
				d.Parked = handlers.NewEngine(slog.New(slog.DiscardHandler)).CommandParked
				fates, err := d.Drop(ctx, db, ids)
				if err != nil {
					fmt.Fprintln(cmd.ErrOrStderr(), "not finished: rows may be PARKED and not deleted yet; the same command goes on from there")
					return errors.Join(printFates(cmd, fates, o.asJSON), err)
				}
				return printFates(cmd, fates, o.asJSON)
			})
		}),
	}
	cmd.Flags().DurationVar(&d.Patience, "patience", 45*time.Second, "how long the relays may take to hand over the rows' shards")
	o.add(cmd, "only say which rows would be dropped")
	return cmd
}

// droppable returns the rows that a person names, those that were dropped before included. Of
// a message with several rows it must be one that can be dropped.
func droppable(ctx context.Context, q sqltx.Querier, names []string) ([]uint64, error) {
	var ids []uint64
	var faults []error
	for _, name := range names {
		id, err := droppableRow(ctx, q, name)
		if err != nil {
			faults = append(faults, err)
			continue
		}
		ids = append(ids, id)
	}
	return ids, errors.Join(faults...)
}

func droppableRow(ctx context.Context, q sqltx.Querier, name string) (uint64, error) {
	found, err := outbox.Resolve(ctx, q, name)
	if errors.Is(err, outbox.ErrNoRow) {
		past, err := pastActions(ctx, q, name)
		if err != nil {
			return 0, err
		}
		if n := len(past); n > 0 && past[n-1].Action == "drop" {
			return past[n-1].RowID, nil
		}
		return 0, noRow(ctx, q, name)
	}
	if err != nil {
		return 0, err
	}
	items, err := outbox.Items(ctx, q, found)
	if err != nil {
		return 0, err
	}
	var open []uint64
	for i := range items {
		if items[i].Status != outbox.StatusPublished {
			open = append(open, items[i].ID)
		}
	}
	switch len(open) {
	case 0:
		return found[0], nil // what keeps it from being dropped is said of it
	case 1:
		return open[0], nil
	}
	return 0, fmt.Errorf("message %q has the rows %v that are not published; name one of them", name, open)
}

func dryDrop(cmd *cobra.Command, db *sql.DB, ids []uint64, asJSON bool) error {
	items, err := outbox.Items(cmd.Context(), db, ids)
	if err != nil {
		return err
	}
	if asJSON {
		return printJSON(cmd.OutOrStdout(), struct {
			Rows []outbox.Item `json:"rows"`
		}{append([]outbox.Item{}, items...)})
	}
	if len(items) > 0 {
		itemTable(cmd, items)
	}
	fmt.Fprintln(cmd.OutOrStdout(), "those that are not PUBLISHED would be dropped; nothing was done (--dry-run)")
	return nil
}

func printFates(cmd *cobra.Command, fates []outbox.Fate, asJSON bool) error {
	failed := 0
	for _, f := range fates {
		if !f.Dropped {
			failed++
		}
		if !asJSON {
			fmt.Fprintf(cmd.OutOrStdout(), "row %d%s: %s\n", f.RowID, prefixed(", message ", printable(f.MessageID)), f.Detail)
		}
	}
	if asJSON {
		if err := printJSON(cmd.OutOrStdout(), struct {
			Dropped int           `json:"dropped"`
			Rows    []outbox.Fate `json:"rows"`
		}{len(fates) - failed, append([]outbox.Fate{}, fates...)}); err != nil {
			return err
		}
	}
	if failed > 0 {
		return fmt.Errorf("not dropped: %d of %s", failed, plural(len(fates), "row"))
	}
	return nil
}

// prefixed is s behind prefix, or nothing at all.
func prefixed(prefix, s string) string {
	if s == "" {
		return ""
	}
	return prefix + s
}
