package main

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/outbox"
)

// republished is what outbox republish did.
type republished struct {
	Republished int       `json:"republished"`
	Chosen      int       `json:"chosen"`
	More        bool      `json:"more"` // than --max
	Since       time.Time `json:"since,omitzero"`
	Until       time.Time `json:"until"`
	DryRun      bool      `json:"dry_run,omitempty"`
}

func newOutboxRepublish() *cobra.Command {
	var f rowFilter
	var o operatorFlags
	var limit, perSecond int
	cmd := &cobra.Command{
		Use:   "republish",
		Short: "Send published rows once more, after the broker has lost them",
		Long: `Makes PUBLISHED rows PENDING again, so that the relays send them once more with the ids they had:
whoever has processed one drops the copy. For when a broker has lost its disk or somebody purged a
queue. Only rows that are still kept can be sent again (24 hours, unless configured otherwise).

Only rows that were last published before --until are taken (by default: when the command starts).
Give the time at which the broker was well again: then doing it twice is doing it once, and an
interrupted run is finished by the same command.`,
		Example: `  backstep outbox republish --since 2026-11-29T13:55:00Z --until 2026-11-29T14:20:00Z --dry-run
  backstep outbox republish --since 2026-11-29T13:55:00Z --until 2026-11-29T14:20:00Z --reason 'disk of rabbit-1 lost'
  backstep outbox republish --since 1h --queue payment --rate 100 --reason 'queue payment was purged'
  backstep outbox republish --type order.confirmed --since 6h --max 1000 --reason 'the mailer lost its queue'`,
		Args: cobra.NoArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error {
			if !f.given() {
				return usagef("republish needs flags that choose rows, at least --since; see backstep outbox republish --help")
			}
			if err := checkLimits(limit, perSecond); err != nil {
				return err
			}
			if err := o.check(); err != nil {
				return err
			}
			return withSchema(cmd, func(ctx context.Context, c config, db *sql.DB) error {
				now, err := f.resolve(ctx, db)
				if err != nil {
					return err
				}
				if f.Before.IsZero() {
					f.Before = now
				}
				if f.Before.Before(f.Since) {
					return usagef("--until %s UTC is before --since %s UTC", clock(f.Before), clock(f.Since))
				}
				ids, more, err := choose(ctx, db, f.Filter, outbox.StatusPublished, limit)
				if err != nil {
					return err
				}
				done := republished{Chosen: len(ids), More: more, Since: f.Since, Until: f.Before, DryRun: o.dryRun}
				if o.dryRun {
					return done.print(cmd, o.asJSON)
				}
				err = inBatches(cmd, ids, perSecond, "rows republished", func(ctx context.Context, batch []uint64) error {
					n, err := outbox.Republish(ctx, db, batch, f.Before, o.Operator)
					done.Republished += n
					return err
				})
				if done.Republished > 0 {
					c.ring(cmd)
				}
				if err != nil {
					fmt.Fprintf(cmd.ErrOrStderr(), "give it --until %s and no row is sent a second time\n", done.Until.Format(time.RFC3339Nano))
					return err
				}
				return done.print(cmd, o.asJSON)
			})
		}),
	}
	f.add(cmd, "until", "only those published before: 10m ago, or 2026-11-29T14:05:00Z (default now)")
	addLimits(cmd, &limit, &perSecond)
	o.add(cmd, "only count the rows that would be sent again")
	return cmd
}

func (r *republished) print(cmd *cobra.Command, asJSON bool) error {
	if asJSON {
		return printJSON(cmd.OutOrStdout(), r)
	}
	out := cmd.OutOrStdout()
	window := fmt.Sprintf("published before %s UTC", clock(r.Until))
	if !r.Since.IsZero() {
		window = fmt.Sprintf("published from %s UTC to %s UTC", clock(r.Since), clock(r.Until))
	}
	switch {
	case r.DryRun:
		fmt.Fprintf(out, "%s would be sent again, %s; nothing was done (--dry-run)\n", plural(r.Chosen, "row"), window)
	case r.Republished < r.Chosen:
		fmt.Fprintf(out, "%s of %d sent again, %s; the others have changed meanwhile\n", plural(r.Republished, "row"), r.Chosen, window)
	default:
		fmt.Fprintf(out, "%s sent again, %s\n", plural(r.Republished, "row"), window)
	}
	if r.More {
		fmt.Fprintln(cmd.ErrOrStderr(), "there are more (--max)")
	}
	return nil
}
