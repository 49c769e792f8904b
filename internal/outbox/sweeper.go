package outbox

import (
	"context"
	"errors"
	"time"
)

// SweepBatch is how many rows one transaction of a sweep deletes at most: its locks are short,
// and so is what it makes replicas wait.
const SweepBatch = 500

const (
	sweepPause = 100 * time.Millisecond // between batches while there is more: up to 5000 rows a second
	sweepRest  = time.Minute            // after the last of them
	sweepIdle  = time.Second            // until the next look whether we lead
)

// SweepFunc deletes at most limit rows of some table that are past their retention, in one
// transaction, and returns how many it deleted.
type SweepFunc func(ctx context.Context, limit int) (int64, error)

// RunSweeps calls the sweeps in turn, again and again, while this relay leads, until ctx ends;
// it returns nil. So of any number of relays one sweeps, and a batch at a time. (One that was
// paused in a batch ends it when it wakes up; the next leader's waits for its rows, at most.)
func (r *Relay) RunSweeps(ctx context.Context, sweeps ...SweepFunc) error {
	var trouble trouble
	for ctx.Err() == nil {
		wait := sweepIdle // it may be about to lead
		if r.Leads() {
			more, err := r.sweepOnce(ctx, sweeps)
			if ctx.Err() != nil {
				return nil
			}
			trouble.report(r.cfg.Log, "history not swept; trying again", err)
			if wait = sweepRest; more {
				wait = sweepPause
			}
		}
		pause(ctx, wait)
	}
	return nil
}

// sweepOnce takes one batch of each, and reports whether there may be more. What fails holds
// up none of the others.
func (r *Relay) sweepOnce(ctx context.Context, sweeps []SweepFunc) (more bool, err error) {
	for _, sweep := range sweeps {
		if !r.Leads() {
			return true, err // whoever leads now goes on
		}
		n, e := sweep(ctx, SweepBatch)
		err = errors.Join(err, e)
		more = more || n >= SweepBatch
	}
	return more, err
}
