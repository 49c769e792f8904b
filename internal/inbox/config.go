package inbox

import (
	"context"
	"log/slog"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Handler does the work of a batch inside the lane's transaction and gives one Outcome for
// each message, in order. It must not keep tx. If the transaction was ended by the server
// (tx.Err) the outcomes do not matter: the batch is run again.
type Handler interface {
	HandleBatch(ctx context.Context, tx *sqltx.Tx, msgs []message.Message) []message.Outcome
}

// Source is what a lane needs of a broker.
type Source interface {
	// Subscribe waits for the broker and consumes queue on a channel of its own.
	Subscribe(ctx context.Context, queue string, prefetch int) (Subscription, error)
}

// Subscription is one consumer of one session. Its tags mean nothing to any other.
type Subscription interface {
	// Deliveries is closed when the channel, its session or the consumer is gone.
	Deliveries() <-chan message.Delivery
	Ack(tag uint64, multiple bool) error
	Nack(tag uint64, multiple, requeue bool) error
	// Reopen goes on with another prefetch.
	Reopen(ctx context.Context, prefetch int) error
	// Cancel stops new deliveries; Deliveries closes after those that had arrived.
	Cancel() error
	Close() error
	Err() error
}

// Config is a lane's. Zero fields mean the defaults.
type Config struct {
	Queue   string
	Handler Handler

	Batch     int           // most messages in one transaction; default 128
	Prefetch  int           // deliveries that may be unacked; default twice the batch
	MaxBody   int           // bytes; larger messages are parked; default 256 KiB
	Retention time.Duration // how long duplicates are known; older messages are parked; default 14 days
	Timeout   time.Duration // of one transaction, well above the pool's lock wait; a batch that
	// takes longer is run one by one, and for a message that does a failed attempt is counted;
	// default 40 s, less than the 45 s after which the server gives up a session that is silent
	Grace time.Duration // that a handler has to return in when its time is over; one that does not
	// heed its context is left behind, its transaction rolled back and its message parked; default 5 s
	Drain time.Duration // how long the transaction in hand may go on when the lane is to stop, before
	// it is rolled back; with Grace less than a supervisor's patience (Kubernetes: 30 s); default 20 s
	MaxHold time.Duration // how long deliveries are held while the database is away, before they
	// go back to the broker; well below its consumer time-out (30 min); default 10 min

	Calls       int           // most calls to systems that are not ours at a time; default 32
	CallTimeout time.Duration // of one such call whose outcome does not say; default 30 s

	MaxAttempts int           // of a message whose handler says Retry; default 10
	RetryBase   time.Duration // default 1 s
	RetryMax    time.Duration // default 5 min
	DeferLimit  time.Duration // how long a message is deferred in all before it is parked; default 15 min

	// Parked is called in the transaction that parks a message, to tell whoever waits for it.
	Parked func(ctx context.Context, tx *sqltx.Tx, m *message.Message, reason string) error

	// Committed is called after each commit, to wake whoever publishes what it added, with the
	// shards of that, one bit each. It must not wait.
	Committed func(shards uint16)

	// Progress is told how far the lane has come. Lanes of one queue share it.
	Progress *Progress

	Log *slog.Logger
}

func (c Config) withDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	if c.Batch == 0 {
		c.Batch = 128
	}
	if c.Prefetch == 0 {
		c.Prefetch = 2 * c.Batch
	}
	if c.MaxBody == 0 {
		c.MaxBody = message.MaxBody
	}
	if c.Calls == 0 {
		c.Calls = 32
	}
	if c.MaxAttempts == 0 {
		c.MaxAttempts = 10
	}
	def(&c.Retention, 14*24*time.Hour)
	def(&c.Timeout, 40*time.Second)
	def(&c.Grace, 5*time.Second)
	def(&c.Drain, 20*time.Second)
	def(&c.MaxHold, 10*time.Minute)
	def(&c.CallTimeout, 30*time.Second)
	def(&c.RetryBase, time.Second)
	def(&c.RetryMax, 5*time.Minute)
	def(&c.DeferLimit, 15*time.Minute)
	if c.Parked == nil {
		c.Parked = func(context.Context, *sqltx.Tx, *message.Message, string) error { return nil }
	}
	if c.Committed == nil {
		c.Committed = func(uint16) {}
	}
	if c.Progress == nil {
		c.Progress = &Progress{}
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	c.Log = c.Log.With("queue", c.Queue)
	return c
}
