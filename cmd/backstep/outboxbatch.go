package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/time/rate"

	"backstep/internal/amqp"
)

// rowsPerBatch is how many rows one transaction changes.
const rowsPerBatch = 100

// inBatches calls do with the ids, batch after batch, at no more than so many rows a second.
// What is done stays done if it is interrupted.
func inBatches(cmd *cobra.Command, ids []uint64, perSecond int, what string, do func(context.Context, []uint64) error) error {
	size := min(rowsPerBatch, perSecond)
	limiter := rate.NewLimiter(rate.Limit(perSecond), size)
	bar := newProgress(cmd.ErrOrStderr(), len(ids), what)
	defer bar.done()
	done := 0
	for batch := range slices.Chunk(ids, size) {
		err := limiter.WaitN(cmd.Context(), len(batch))
		if err == nil {
			err = do(cmd.Context(), batch)
		}
		if err != nil {
			bar.done()
			fmt.Fprintf(cmd.ErrOrStderr(), "%d of %d %s; the same command goes on with the rest\n", done, len(ids), what)
			return err
		}
		done += len(batch)
		bar.set(done)
	}
	return nil
}

// ringTimeout is how long the doorbell may take: without it the relays look by themselves soon.
const ringTimeout = 3 * time.Second

// ring tells the relays that there is something to publish, if the broker is known.
func (c config) ring(cmd *cobra.Command) {
	if c.AMQP.URL == "" {
		return
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), ringTimeout)
	defer cancel()
	b, err := c.connect(ctx)
	if err == nil {
		err = amqp.NewBell(b.client).RingOnce(ctx, amqp.AllShards)
		b.close()
	}
	if err != nil && !errors.Is(cmd.Context().Err(), context.Canceled) {
		fmt.Fprintf(cmd.ErrOrStderr(), "note: the relays' doorbell was not rung (%v); they find the rows at their next look\n", err)
	}
}
