package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/time/rate"

	"backstep/internal/amqp"
	"backstep/internal/inbox"
	"backstep/internal/sqltx"
)

func newParkedReplay() *cobra.Command {
	v := parkedTake{done: "replayed"}
	var giveID bool
	var perSecond int
	cmd := &cobra.Command{
		Use:   "replay [ID...]",
		Short: "Send parked messages to the queues they were parked from once more",
		Long: `Sends parked messages, those named by id or chosen by the flags, to the queue they were parked from, with
the id, properties, headers and body they had. Cure first what they were parked for (backstep parked
show ID says it), or they are parked again; this run does not take them a second time. A saga that stands
in MANUAL_ACTION because its command was parked moves on by itself.

A message leaves <queue>.parked when the broker has confirmed that its queue has it. If that is
interrupted it may be in both, which changes nothing: the worker drops what it has processed.

What has been processed already is not sent: it is said, removed from <queue>.parked, and kept in the
audit. A message older than BACKSTEP_INBOX_RETENTION, or without a message_id, stays where it is, and the
exit code is 1. So it is if others have messages of the queues in hand, which are not seen: do not run two
replays at once.`,
		Example: `  backstep parked replay 0194f1a4-5c00-7000-8000-000000000001 --reason 'the definition is back'
  backstep parked replay --queue payment --because 'unknown message type' --since 2h --dry-run
  backstep parked replay --queue payment --because 'unknown message type' --since 2h --reason 'worker 1.4 knows it'
  backstep parked replay --all --rate 5 --max 100 --reason 'ticket 12'`,
		RunE: verb(func(cmd *cobra.Command, args []string) error {
			if err := checkRate(perSecond); err != nil {
				return err
			}
			return v.run(cmd, args, func(ctx context.Context, l *parkedLot, now time.Time) error {
				pub := amqp.NewPublisher(l.broker.client, amqp.PublisherConfig{Channels: 1, Window: 1})
				defer pub.Close()
				return v.each(ctx, cmd, l, &replayer{
					parkedTake:  &v,
					parkedJudge: parkedJudge{db: l.db, retention: l.Inbox.Retention, now: now, giveID: giveID},
					pub:         pub, pace: rate.NewLimiter(rate.Limit(perSecond), 1), sent: map[string]bool{},
				})
			})
		}),
	}
	v.add(cmd, "only say what would become of the messages")
	cmd.Flags().BoolVar(&giveID, "give-id", false, "send messages that had no message_id with the one they have in <queue>.parked")
	cmd.Flags().IntVar(&perSecond, "rate", 20, "so many messages a second at most")
	return cmd
}

// replayer replays messages, one after the other.
type replayer struct {
	*parkedTake
	parkedJudge
	pub  *amqp.Publisher
	pace *rate.Limiter
	sent map[string]bool // by this run: what comes back must not go round
}

// confirmPatience is how long the broker may take to confirm a message.
const confirmPatience = 30 * time.Second

func (r *replayer) take(ctx context.Context, p *inbox.Parked) (taken bool, err error) {
	v, why, err := r.verdict(ctx, p)
	if err != nil {
		return false, err
	}
	if v == wouldReplay && r.sent[p.Queue+" "+p.Original.MessageID] {
		r.fates.add(p, fateKept, "a copy of it was sent by this run already")
		return false, nil
	}
	switch v {
	case wouldRefuse:
		r.fates.add(p, fateRefused, why)
		return false, nil
	case wouldRepeat:
		if !r.dryRun {
			err = r.audit(ctx, p, inbox.ParkedDone)
		}
		if err == nil {
			r.fates.add(p, fateDone, why)
		}
		return err == nil && !r.dryRun, err
	}
	m, without := p.Replay()
	said := "it was parked: " + p.Reason
	if len(without) > 0 {
		said += "; without " + strings.Join(without, ", and without ")
	}
	if r.dryRun {
		r.sent[p.Queue+" "+p.Original.MessageID] = true
		r.fates.add(p, fateReplayed, said)
		return false, nil
	}
	if err := r.pace.Wait(ctx); err != nil {
		return false, err
	}
	err = r.publish(ctx, &m)
	if refused, ok := errors.AsType[*refusedError](err); ok {
		r.fates.add(p, fateRefused, refused.Error())
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("replay message %q to queue %s: %w", p.Name(), p.Queue, err)
	}
	r.sent[p.Queue+" "+p.Original.MessageID] = true
	r.fates.add(p, fateReplayed, said)
	if err := r.audit(ctx, p, inbox.ParkedReplay); err != nil {
		return false, fmt.Errorf("message %q was sent to queue %s and stays in %s too, because it could not be written down: %w",
			p.Name(), p.Queue, amqp.ParkedQueue(p.Queue), err)
	}
	return true, nil
}

func (r *replayer) audit(ctx context.Context, p *inbox.Parked, verb inbox.ParkedVerb) error {
	return sqltx.WithTx(ctx, r.db, func(ctx context.Context, tx *sqltx.Tx) error { return p.Audit(ctx, tx, verb, r.Operator) })
}

// missed: to replay one that is processed, or on its way, changes nothing.
func (r *replayer) missed(gone *past) fate {
	switch {
	case gone.last != nil && gone.last.Verb == inbox.ParkedDrop:
		return fateRefused
	case gone.queue != "":
		return fateDone
	}
	return fateMissing
}
