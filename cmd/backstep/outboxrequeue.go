package main

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"

	"github.com/spf13/cobra"

	"backstep/internal/outbox"
)

// changedRow is what became of a row that was named.
type changedRow struct {
	ID        uint64 `json:"id"`
	MessageID string `json:"message_id"`
	Done      bool   `json:"requeued"`
	Detail    string `json:"detail"`
}

func newOutboxRequeue() *cobra.Command {
	var f rowFilter
	var o operatorFlags
	var all bool
	var limit, perSecond int
	cmd := &cobra.Command{
		Use:   "requeue [ID...]",
		Short: "Let the relays try parked rows again",
		Long: `Makes PARKED rows PENDING again, with their attempts at 0: those that are named, by row id or
message id, or those that the flags choose. Cure first what the rows were parked for (backstep
outbox show ID says it), or they are parked again. A saga that stands in MANUAL_ACTION because its
command was parked moves on by itself when the command arrives. A row that is not PARKED is left
as it is, so doing it twice is doing it once.`,
		Example: `  backstep outbox requeue 4711 --reason 'queue payment is bound again'
  backstep outbox requeue --queue payment --since 2h --dry-run
  backstep outbox requeue --queue payment --since 2h --reason 'queue payment is bound again'
  backstep outbox requeue --all --rate 50 --reason 'broker is back'`,
		RunE: verb(func(cmd *cobra.Command, args []string) error {
			chosen := f.given() || all
			if err := checkChoice(cmd, "rows", len(args) > 0, chosen); err != nil {
				return err
			}
			if err := checkLimits(limit, perSecond); err != nil {
				return err
			}
			if err := o.check(); err != nil {
				return err
			}
			return withSchema(cmd, func(ctx context.Context, c config, db *sql.DB) error {
				ids, err := resolveRows(ctx, db, args)
				if err != nil {
					return err
				}
				more := false
				if chosen {
					if _, err := f.resolve(ctx, db); err != nil {
						return err
					}
					if ids, more, err = choose(ctx, db, f.Filter, outbox.StatusParked, limit); err != nil {
						return err
					}
				}
				if o.dryRun {
					return dryRequeue(cmd, db, ids, more, o.asJSON)
				}
				rows, err := requeue(cmd, db, ids, perSecond, o.Operator)
				if len(rows) > 0 {
					c.ring(cmd)
				}
				if err != nil {
					return err
				}
				return printRequeued(cmd, rows, more, o.asJSON)
			})
		}),
	}
	f.add(cmd, "older", "only those created before: 10m ago, or 2026-11-29T14:05:00Z")
	cmd.Flags().BoolVar(&all, "all", false, "all that are PARKED")
	addLimits(cmd, &limit, &perSecond)
	o.add(cmd, "only list the rows that would be requeued")
	return cmd
}

// checkChoice demands ids or flags that choose.
func checkChoice(cmd *cobra.Command, noun string, named, chosen bool) error {
	switch {
	case !named && !chosen:
		return usagef("%s needs ids, flags that choose %s, or --all; see %s --help", cmd.Name(), noun, cmd.CommandPath())
	case named && chosen:
		return usagef("%s takes ids or flags that choose %s, not both", cmd.Name(), noun)
	}
	return nil
}

func addLimits(cmd *cobra.Command, limit, perSecond *int) {
	cmd.Flags().IntVar(limit, "max", 0, "so many at most, the oldest; 0 is all")
	cmd.Flags().IntVar(perSecond, "rate", 500, "so many rows a second at most")
}

func checkMax(limit int) error {
	if limit < 0 {
		return usagef("--max is %d; it must be 0 or more", limit)
	}
	return nil
}

func checkRate(perSecond int) error {
	if perSecond < 1 {
		return usagef("--rate is %d; it must be 1 or more", perSecond)
	}
	return nil
}

func checkLimits(limit, perSecond int) error { return cmp.Or(checkMax(limit), checkRate(perSecond)) }

// choose returns the rows that a filter chooses, and whether there are more than the limit.
func choose(ctx context.Context, db *sql.DB, f outbox.Filter, s outbox.Status, limit int) (ids []uint64, more bool, err error) {
	return atMost(limit, func(n int) ([]uint64, error) { return outbox.Choose(ctx, db, f, s, n) })
}

// atMost asks for one more than the limit, if there is one, to know whether there are more.
func atMost[T any](limit int, ask func(limit int) ([]T, error)) (list []T, more bool, err error) {
	if limit == 0 {
		list, err = ask(0)
		return list, false, err
	}
	list, err = ask(limit + 1)
	return list[:min(len(list), limit)], len(list) > limit, err
}

// requeue requeues rows and says what became of each.
func requeue(cmd *cobra.Command, db *sql.DB, ids []uint64, perSecond int, op outbox.Operator) (rows []changedRow, err error) {
	err = inBatches(cmd, ids, perSecond, "rows requeued", func(ctx context.Context, batch []uint64) error {
		were, err := outbox.Requeue(ctx, db, batch, op)
		for i := range were {
			rows = append(rows, changed(&were[i]))
		}
		return err
	})
	return rows, err
}

// changed says what requeueing does to a row that was like this.
func changed(was *outbox.Item) changedRow {
	r := changedRow{ID: was.ID, MessageID: was.MessageID}
	switch was.Status {
	case outbox.StatusParked:
		r.Done, r.Detail = true, "it was parked: "+was.LastError
	case outbox.StatusPending:
		r.Detail = "it is PENDING already"
	default:
		r.Detail = "it is PUBLISHED already; backstep outbox republish sends it once more"
	}
	return r
}

func dryRequeue(cmd *cobra.Command, db *sql.DB, ids []uint64, more, asJSON bool) error {
	items, err := outbox.Items(cmd.Context(), db, ids[:min(len(ids), maxFaults)])
	if err != nil {
		return err
	}
	if asJSON {
		return printJSON(cmd.OutOrStdout(), struct {
			Chosen int      `json:"chosen"`
			More   bool     `json:"more"`
			IDs    []uint64 `json:"ids"`
		}{len(ids), more, append([]uint64{}, ids...)})
	}
	if len(items) > 0 {
		itemTable(cmd, items)
	}
	if n := len(ids) - len(items); n > 0 {
		fmt.Fprintf(cmd.OutOrStdout(), "and %s more\n", plural(n, "row"))
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s chosen; nothing was done (--dry-run)\n", plural(len(ids), "row"))
	return nil
}

func printRequeued(cmd *cobra.Command, rows []changedRow, more, asJSON bool) error {
	n := 0
	for _, r := range rows {
		if r.Done {
			n++
		}
	}
	if asJSON {
		return printJSON(cmd.OutOrStdout(), struct {
			Requeued int          `json:"requeued"`
			More     bool         `json:"more"`
			Rows     []changedRow `json:"rows"`
		}{n, more, append([]changedRow{}, rows...)})
	}
	out := cmd.OutOrStdout()
	printFirst(out, rows, "row", func(r *changedRow) string {
		verb := "left as it is"
		if r.Done {
			verb = "requeued"
		}
		return fmt.Sprintf("row %d, message %s: %s: %s", r.ID, printable(r.MessageID), verb, printable(clipText(r.Detail, 200)))
	})
	fmt.Fprintf(out, "%s requeued\n", plural(n, "row"))
	if more {
		fmt.Fprintln(cmd.ErrOrStderr(), "there are more (--max)")
	}
	return nil
}
