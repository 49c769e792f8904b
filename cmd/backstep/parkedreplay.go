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
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

func newParkedReplay() *cobra.Command {
	var f parkedFilter
	var o operatorFlags
	var all, giveID bool
	var limit, perSecond int
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
			f.ids = append(f.ids, args...)
			if !f.given() && !all {
				return usagef("replay needs ids, flags that choose messages, or --all; see backstep parked replay --help")
			}
			if err := checkLimits(limit, perSecond); err != nil {
				return err
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
				pub := amqp.NewPublisher(l.broker.client, amqp.PublisherConfig{Channels: 1, Window: 1})
				defer pub.Close()
				r := replayer{
					parkedJudge: parkedJudge{db: l.db, retention: l.Inbox.Retention, now: now, giveID: giveID},
					filter:      &f, by: o.Operator, dryRun: o.dryRun, limit: limit,
					pub: pub, pace: rate.NewLimiter(rate.Limit(perSecond), 1), began: time.Now(), sent: map[string]bool{},
				}
				looks, err := l.walk(cmd, f.queues(), maxLook, "parked messages gone through", func(p *inbox.Parked) (bool, error) { return r.see(ctx, p) })
				sayWhatIsMissing(cmd, looks)
				if err == nil {
					err = r.unseen(ctx, l, f.ids)
				}
				if err == nil {
					err = r.fates.leftOver(&f, looks)
				} else if !o.dryRun {
					fmt.Fprintln(cmd.ErrOrStderr(), "not finished; the same command goes on with the rest")
				}
				return errors.Join(err, r.print(cmd, o.asJSON))
			})
		}),
	}
	f.add(cmd)
	cmd.Flags().BoolVar(&all, "all", false, "all that are parked")
	cmd.Flags().BoolVar(&giveID, "give-id", false, "send messages that had no message_id with the one they have in <queue>.parked")
	cmd.Flags().IntVar(&limit, "max", 0, "so many at most, the first that can be; 0 is all")
	cmd.Flags().IntVar(&perSecond, "rate", 20, "so many messages a second at most")
	o.add(cmd, "only say what would become of the messages")
	return cmd
}

// replayer replays messages, one after the other.
type replayer struct {
	parkedJudge
	filter *parkedFilter
	by     outbox.Operator
	dryRun bool
	limit  int // 0: none
	pub    *amqp.Publisher
	pace   *rate.Limiter
	began  time.Time
	sent   map[string]bool // by this run: what comes back must not go round

	fates parkedFates
}

// maxRun is how long one run takes messages of a queue: what it looks at is unacked, and the
// broker's consumer time-out is 30 minutes.
const maxRun = 20 * time.Minute

// confirmPatience is how long the broker may take to confirm a message.
const confirmPatience = 30 * time.Second

// see does what is to be done with one message.
func (r *replayer) see(ctx context.Context, p *inbox.Parked) (taken bool, err error) {
	if !r.filter.chooses(p) {
		return false, nil
	}
	if late := time.Since(r.began) > maxRun; late || r.limit > 0 && r.fates.gone >= r.limit {
		r.fates.more, r.fates.late = true, late
		return false, amqp.ErrEnough
	}
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
	return sqltx.WithTx(ctx, r.db, func(ctx context.Context, tx *sqltx.Tx) error { return p.Audit(ctx, tx, verb, r.by) })
}

// unseen says what is known of ids that are parked nowhere: to replay one that is processed, or
// on its way, changes nothing.
func (r *replayer) unseen(ctx context.Context, l *parkedLot, ids []string) error {
	for _, id := range r.fates.without(ids) {
		gone, err := l.lookBack(ctx, id, r.filter.queues())
		if err != nil {
			return err
		}
		switch {
		case gone.last != nil && gone.last.Verb == inbox.ParkedDrop:
			r.fates.addID(id, gone.queue, fateRefused, gone.words)
		case gone.queue != "":
			r.fates.addID(id, gone.queue, fateDone, gone.words)
		default:
			r.fates.addID(id, "", fateMissing, gone.words)
		}
	}
	return nil
}

func (r *replayer) print(cmd *cobra.Command, asJSON bool) error {
	f := &r.fates
	done := "replayed"
	if r.dryRun {
		done = "would be replayed"
	}
	if err := f.print(cmd, asJSON, done, r.dryRun); err != nil {
		return err
	}
	if n := f.count(fateRefused, fateMissing, fateKept); n > 0 {
		again := ""
		if k := f.count(fateKept); k > 0 {
			again = fmt.Sprintf("; of %d this run sent a copy: run the same command again for them", k)
		}
		return fmt.Errorf("not replayed: %d of %s%s", n, plural(len(f.list), "message"), again)
	}
	return nil
}
