package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/handlers"
	"backstep/internal/inbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

func newParkedDrop() *cobra.Command {
	v := parkedTake{done: "dropped"}
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
			return v.run(cmd, args, func(ctx context.Context, l *parkedLot, _ time.Time) error {
				return v.each(ctx, cmd, l, &parkedDropper{&v, l, handlers.NewEngine(slog.New(slog.DiscardHandler))})
			})
		}),
	}
	v.add(cmd, "only say which messages would be dropped")
	return cmd
}

// parkedDropper removes messages.
type parkedDropper struct {
	*parkedTake
	lot    *parkedLot
	engine *saga.Engine
}

func (d *parkedDropper) take(ctx context.Context, p *inbox.Parked) (taken bool, err error) {
	if !d.dryRun {
		// First the audit: a message that is in both is dropped once more, one in neither is lost.
		err := sqltx.WithTx(ctx, d.lot.db, func(ctx context.Context, tx *sqltx.Tx) error {
			if err := p.Audit(ctx, tx, inbox.ParkedDrop, d.Operator); err != nil {
				return err
			}
			return d.engine.CommandParked(ctx, tx, &p.Original, fmt.Sprintf("dropped by %s: %s", d.Actor, d.Reason))
		})
		if err != nil {
			return false, fmt.Errorf("drop parked message %q: %w", p.Name(), err)
		}
	}
	d.fates.add(p, fateDropped, "it was parked: "+p.Reason)
	return !d.dryRun, nil
}

// missed: that somebody has dropped it, or that it had been processed, is what was asked for.
func (d *parkedDropper) missed(gone *past) fate {
	if gone.last != nil && gone.last.Verb != inbox.ParkedReplay {
		return fateDone
	}
	return fateMissing
}
