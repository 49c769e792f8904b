package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/amqp"
	"backstep/internal/inbox"
	"backstep/internal/outbox"
)

// parkedTake is one call of a verb that takes messages out of the parked queues.
type parkedTake struct {
	parkedFilter
	operatorFlags
	done  string // what becomes of a message: "dropped"
	all   bool
	limit int // 0: none

	began time.Time
	fates parkedFates
}

// parkedTaker is what such a verb does.
type parkedTaker interface {
	// take does it to one message, and says whether that leaves its parked queue.
	take(ctx context.Context, p *inbox.Parked) (taken bool, err error)
	// missed says what it is for the verb that a message is parked nowhere.
	missed(gone *past) fate
}

func (v *parkedTake) add(cmd *cobra.Command, dryRun string) {
	v.parkedFilter.add(cmd)
	cmd.Flags().BoolVar(&v.all, "all", false, "all that are parked")
	cmd.Flags().IntVar(&v.limit, "max", 0, "so many at most, the first that can be; 0 is all")
	v.operatorFlags.add(cmd, dryRun)
}

// run checks what was said and calls do, which calls each, with the server's time.
func (v *parkedTake) run(cmd *cobra.Command, ids []string, do func(ctx context.Context, l *parkedLot, now time.Time) error) error {
	v.ids = append(v.ids, ids...)
	if !v.given() && !v.all {
		return usagef("%s needs ids, flags that choose messages, or --all; see %s --help", cmd.Name(), cmd.CommandPath())
	}
	if err := cmp.Or(checkMax(v.limit), v.parkedFilter.check(), v.operatorFlags.check()); err != nil {
		return err
	}
	return withParked(cmd, func(ctx context.Context, l *parkedLot) error {
		now, err := outbox.Now(ctx, l.db)
		if err == nil {
			err = v.resolve(now)
		}
		if err != nil {
			return err
		}
		return do(ctx, l, now)
	})
}

// each does the verb to all messages that are chosen, and says what became of them.
func (v *parkedTake) each(ctx context.Context, cmd *cobra.Command, l *parkedLot, t parkedTaker) error {
	v.began = time.Now()
	looks, err := l.walk(cmd, v.queues(), maxLook, "parked messages gone through", func(p *inbox.Parked) (bool, error) {
		if !v.chooses(p) {
			return false, nil
		}
		if late := time.Since(v.began) > maxRun; late || v.limit > 0 && v.fates.gone >= v.limit {
			v.fates.more, v.fates.late = true, late
			return false, amqp.ErrEnough
		}
		return t.take(ctx, p)
	})
	sayWhatIsMissing(cmd, looks)
	if err == nil {
		err = v.unseen(ctx, l, t)
	}
	if err == nil {
		err = v.fates.leftOver(&v.parkedFilter, looks)
	} else if !v.dryRun {
		fmt.Fprintln(cmd.ErrOrStderr(), "not finished; the same command goes on with the rest")
	}
	return errors.Join(err, v.print(cmd))
}

// maxRun is how long one run takes messages of a queue: what it looks at is unacked, and the
// broker's consumer time-out is 30 minutes.
const maxRun = 20 * time.Minute

// unseen says what is known of ids that are parked nowhere.
func (v *parkedTake) unseen(ctx context.Context, l *parkedLot, t parkedTaker) error {
	for _, id := range v.fates.without(v.ids) {
		gone, err := l.lookBack(ctx, id, v.queues())
		if err != nil {
			return err
		}
		v.fates.addID(id, gone.queue, t.missed(&gone), gone.words)
	}
	return nil
}

func (v *parkedTake) print(cmd *cobra.Command) error {
	f, done := &v.fates, v.done
	if v.dryRun {
		done = "would be " + done
	}
	if err := f.print(cmd, v.asJSON, done, v.dryRun); err != nil {
		return err
	}
	if n := f.count(fateRefused, fateMissing, fateKept); n > 0 {
		again := ""
		if k := f.count(fateKept); k > 0 {
			again = fmt.Sprintf("; of %d this run sent a copy: run the same command again for them", k)
		}
		return fmt.Errorf("not %s: %d of %s%s", v.done, n, plural(len(f.list), "message"), again)
	}
	return nil
}
