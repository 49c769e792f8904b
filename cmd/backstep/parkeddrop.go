package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"backstep/internal/amqp"
	"backstep/internal/handlers"
	"backstep/internal/inbox"
	"backstep/internal/outbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

func newParkedDrop() *cobra.Command {
	var f parkedFilter
	var o operatorFlags
	var all bool
	var limit int
	cmd := &cobra.Command{
		Use:   "drop [ID...]",
		Short: "Remove parked messages that must never be processed",
		Long: `Removes parked messages, those named by id or chosen by the flags. The audit keeps all of each, body
included, and backstep parked show ID shows it from there. A saga that awaits one goes to MANUAL_ACTION, if
it is not there yet.

It exits with 1 if a message that was named is not there. One that was dropped before counts as dropped.`,
		Example: `  backstep parked drop 0194f1a4-5c00-7000-8000-000000000001 --reason 'poison, see ticket 12'
  backstep parked drop --queue orders --because 'does not decode' --dry-run
  backstep parked drop --queue orders --because 'does not decode' --reason 'a client sent nonsense, ticket 12'`,
		RunE: verb(func(cmd *cobra.Command, args []string) error {
			f.ids = append(f.ids, args...)
			if !f.given() && !all {
				return usagef("drop needs ids, flags that choose messages, or --all; see backstep parked drop --help")
			}
			if limit < 0 {
				return usagef("--max is %d; it must be 0 or more", limit)
			}
			if err := f.check(); err != nil {
				return err
			}
			if err := o.check(); err != nil {
				return err
			}
			return withParked(cmd, func(ctx context.Context, l *parkedLot) error {
				now, err := outbox.Now(ctx, l.db)
				if err != nil {
					return err
				}
				if err := f.resolve(now); err != nil {
					return err
				}
				d := parkedDropper{lot: l, filter: &f, by: o.Operator, dryRun: o.dryRun, limit: limit, engine: handlers.NewEngine(slog.New(slog.DiscardHandler))}
				looks, err := l.walk(cmd, f.queues(), maxLook, "parked messages gone through", func(p *inbox.Parked) (bool, error) { return d.see(ctx, p) })
				sayWhatIsMissing(cmd, looks)
				if err == nil {
					err = d.unseen(ctx, f.ids)
				}
				if err == nil {
					err = d.fates.leftOver(&f, looks)
				} else if !o.dryRun {
					fmt.Fprintln(cmd.ErrOrStderr(), "not finished; the same command goes on with the rest")
				}
				return errors.Join(err, d.print(cmd, o.asJSON))
			})
		}),
	}
	f.add(cmd)
	cmd.Flags().BoolVar(&all, "all", false, "all that are parked")
	cmd.Flags().IntVar(&limit, "max", 0, "so many at most, the first ones; 0 is all")
	o.add(cmd, "only say which messages would be dropped")
	return cmd
}

// parkedDropper removes messages.
type parkedDropper struct {
	lot    *parkedLot
	filter *parkedFilter
	by     outbox.Operator
	dryRun bool
	limit  int // 0: none
	engine *saga.Engine

	fates parkedFates
}

func (d *parkedDropper) see(ctx context.Context, p *inbox.Parked) (taken bool, err error) {
	if !d.filter.chooses(p) {
		return false, nil
	}
	if d.limit > 0 && d.fates.gone >= d.limit {
		d.fates.more = true
		return false, amqp.ErrEnough
	}
	if !d.dryRun {
		// First the audit: a message that is in both is dropped once more, one in neither is lost.
		err := sqltx.WithTx(ctx, d.lot.db, func(ctx context.Context, tx *sqltx.Tx) error {
			if err := p.Audit(ctx, tx, inbox.ParkedDrop, d.by); err != nil {
				return err
			}
			return d.engine.CommandParked(ctx, tx, &p.Original, fmt.Sprintf("dropped by %s: %s", d.by.Actor, d.by.Reason))
		})
		if err != nil {
			return false, fmt.Errorf("drop parked message %q: %w", p.Name(), err)
		}
	}
	d.fates.add(p, fateDropped, "it was parked: "+p.Reason)
	return !d.dryRun, nil
}

// unseen says what is known of ids that are parked nowhere.
func (d *parkedDropper) unseen(ctx context.Context, ids []string) error {
	for _, id := range d.fates.without(ids) {
		gone, err := d.lot.lookBack(ctx, id, d.filter.queues())
		if err != nil {
			return err
		}
		what := fateMissing
		if gone.last != nil && gone.last.Verb != inbox.ParkedReplay {
			what = fateDone
		}
		d.fates.addID(id, gone.queue, what, gone.words)
	}
	return nil
}

func (d *parkedDropper) print(cmd *cobra.Command, asJSON bool) error {
	done := "dropped"
	if d.dryRun {
		done = "would be dropped"
	}
	if err := d.fates.print(cmd, asJSON, done, d.dryRun); err != nil {
		return err
	}
	if n := d.fates.count(fateMissing); n > 0 {
		return fmt.Errorf("not dropped: %d of %s", n, plural(len(d.fates.list), "message"))
	}
	return nil
}
