package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"backstep/internal/amqp"
	"backstep/internal/inbox"
	"backstep/internal/message"
)

func newParked() *cobra.Command {
	cmd := group("parked", "Look at parked messages, replay or drop them")
	cmd.Long = "A parked message is in the queue <queue>.parked, with the reason why a worker could not process it,\n" +
		"or the broker's. What these verbs change is audited."
	cmd.AddCommand(newParkedList(), newParkedShow(), newParkedReplay(), newParkedDrop())
	return cmd
}

// parkedLot is where the parked messages are. db is nil for a verb that needs no more than them.
type parkedLot struct {
	config
	db       *sql.DB
	broker   *broker
	consumer *amqp.Consumer
}

// withParked runs a verb that needs the parked queues and the database with the schema.
func withParked(cmd *cobra.Command, fn func(ctx context.Context, l *parkedLot) error) error {
	c, err := loadConfig(needsMySQL, needsAMQP)
	if err != nil {
		return err
	}
	db, err := c.openSchema(cmd.Context())
	if err != nil {
		return err
	}
	defer db.Close() //nolint:errcheck // the process ends
	return c.withLot(cmd, db, fn)
}

func (c config) withLot(cmd *cobra.Command, db *sql.DB, fn func(ctx context.Context, l *parkedLot) error) error {
	b, err := c.connect(cmd.Context())
	if err != nil {
		return err
	}
	defer b.close()
	return fn(cmd.Context(), &parkedLot{config: c, db: db, broker: b, consumer: amqp.NewConsumer(b.client, "backstep-cli")})
}

// look is how far a parked queue was looked through.
type look struct {
	Queue string `json:"queue"` // its messages were parked from
	There int    `json:"there"` // when it began
	Seen  int    `json:"seen"`

	// Others is how many consumers it had then: what they had in hand is neither there nor seen.
	Others int `json:"others"`

	short bool // others have taken some of what was there
	limit int  // 0: it was not looked at
}

// held reports whether somebody else had messages of a queue in hand.
func held(looks []look) bool {
	return slices.ContainsFunc(looks, func(k look) bool { return k.short || k.Others > 0 })
}

// maxLook is the most messages of one queue that a verb goes through; all that is in a queue
// has to be, or it would change its order.
const maxLook = 200_000

// walk shows see the messages that were parked from these queues when it began, so nothing that
// is parked meanwhile. Those of which see says that they are taken are removed. After
// amqp.ErrEnough see is not called any more. Queues that are missing are its error when all
// others have been looked through.
func (l *parkedLot) walk(
	cmd *cobra.Command, queues []string, limit int, what string, see func(*inbox.Parked) (taken bool, err error),
) ([]look, error) {
	looks, total, missing, err := l.depths(cmd.Context(), queues)
	if err != nil {
		return nil, err
	}
	bar := newProgress(cmd.ErrOrStderr(), total, what)
	defer bar.done()
	done, enough := 0, false
	for i := range looks {
		k := &looks[i]
		k.limit = limit
		before := done
		b, err := l.consumer.Browse(cmd.Context(), amqp.ParkedQueue(k.Queue), min(k.There, limit), func(d *message.Delivery) (bool, error) {
			p := inbox.Unpark(d, k.Queue)
			taken, err := see(&p)
			enough = enough || errors.Is(err, amqp.ErrEnough)
			done++
			bar.set(done)
			return taken, err
		})
		k.Seen = b.Seen
		if err != nil {
			return looks, errors.Join(err, missing)
		}
		if enough {
			return looks, missing
		}
		k.Others, k.short = b.Others, b.Short
		done = before + k.There
	}
	return looks, missing
}

// depths returns how much there is to look at, and apart from other errors which queues are
// missing.
func (l *parkedLot) depths(ctx context.Context, queues []string) (looks []look, total int, missing, err error) {
	session, err := l.broker.client.Session(ctx)
	if err != nil {
		return nil, 0, nil, err
	}
	for _, q := range queues {
		n, err := session.Depth(ctx, amqp.ParkedQueue(q))
		if errors.Is(err, amqp.ErrMissing) {
			missing = errors.Join(missing, fmt.Errorf("%w; run: backstep topology apply", err))
			continue
		}
		if err != nil {
			return nil, 0, nil, err
		}
		looks, total = append(looks, look{Queue: q, There: n}), total+n
	}
	return looks, total, missing, nil
}

// sayWhatIsMissing says of which messages nothing was seen, and reports whether of any.
func sayWhatIsMissing(cmd *cobra.Command, looks []look) (missing bool) {
	for _, k := range looks {
		name := amqp.ParkedQueue(k.Queue)
		switch {
		case k.limit == 0:
			continue
		case k.Seen == k.limit && k.There > k.limit:
			fmt.Fprintf(cmd.ErrOrStderr(), "%s has %s; these were the first %d, and come last now\n", name, plural(k.There, "message"), k.limit)
		case k.short:
			fmt.Fprintf(cmd.ErrOrStderr(), "%s had %s, and only %d came: somebody else has the others in hand (the management UI, or a verb like this one)\n",
				name, plural(k.There, "message"), k.Seen)
		case k.Others > 0:
			fmt.Fprintf(cmd.ErrOrStderr(), "%s has %s besides this one (the management UI, or a verb like this one); how many messages they have in hand "+
				"the broker does not say, and they were not seen\n", name, plural(k.Others, "consumer"))
		default:
			continue
		}
		missing = true
	}
	return missing
}

// parkedAge is when a message was parked, and how long ago.
func parkedAge(at, now time.Time) string {
	if at.IsZero() {
		return "unknown"
	}
	return fmt.Sprintf("%s UTC, %s ago", clock(at), short(now.Sub(at)))
}
