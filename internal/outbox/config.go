package outbox

import (
	"context"
	"log/slog"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Config is a relay's. Zero fields mean the defaults.
type Config struct {
	ID   string // this relay, unique for ever; default <host>-<pid>-<random>
	Host string // shown to operators; default the host's name

	Window    int           // messages in flight; default 1000
	Page      int           // rows of one read; default 1000
	PollMin   time.Duration // between reads when busy; default 5 ms
	PollMax   time.Duration // between reads when idle; default 250 ms
	LeaseTTL  time.Duration // how long a shard is ours after a renewal; default 5 s
	ParkAfter time.Duration // how long unroutable rows are tried; default 15 min

	ConfirmTimeout time.Duration // until a confirm that does not come is taken for lost; default 30 s
	DrainTimeout   time.Duration // for what is in hand at the end; default 10 s

	DeletePublished bool // instead of marking; nothing can be published again then

	// Parked is called in the transaction that parks a row, to tell whoever waits for it.
	Parked func(ctx context.Context, tx *sqltx.Tx, m *message.Message, reason string) error

	// Promoted is called when messages that were due have come to the outbox. Only the leader
	// moves them, and most are in shards of others, who would not look before their next poll.
	// It must not wait.
	Promoted func()

	Log *slog.Logger

	idle beat // of PollMax

	// Only tests set these.
	bound        int
	stretchTTL   time.Duration
	leftOutMax   int
	schedulePoll time.Duration
	scheduleRest time.Duration
}

// Per key as many rows, and per destination as many keys, are kept in memory while they cannot
// be published. The pass walks on beyond them, so they delay nobody else.
const bound = 64

const (
	holdMin = 100 * time.Millisecond // first wait of a destination that refused
	holdMax = 4 * time.Second        // all shall flow within 5 s of its taking messages again
)

func (c Config) withDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	if c.Host == "" {
		c.Host = hostname()
	}
	if c.ID == "" {
		c.ID = newRelayID(c.Host)
	}
	if c.Window == 0 {
		c.Window = 1000
	}
	if c.Page == 0 {
		c.Page = 1000
	}
	def(&c.PollMin, 5*time.Millisecond)
	def(&c.PollMax, 250*time.Millisecond)
	def(&c.LeaseTTL, 5*time.Second)
	def(&c.ParkAfter, 15*time.Minute)
	def(&c.ConfirmTimeout, 30*time.Second)
	def(&c.DrainTimeout, 10*time.Second)
	def(&c.stretchTTL, stretchTTL)
	def(&c.schedulePoll, schedulePoll)
	def(&c.scheduleRest, scheduleRest)
	c.idle = newBeat(c.PollMax)
	if c.bound == 0 {
		c.bound = bound
	}
	if c.leftOutMax == 0 {
		c.leftOutMax = leftOutMax
	}
	if c.Parked == nil {
		c.Parked = func(context.Context, *sqltx.Tx, *message.Message, string) error { return nil }
	}
	if c.Promoted == nil {
		c.Promoted = func() {}
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	return c
}

// Publisher is what a relay needs of a broker.
type Publisher interface {
	// Ready reports whether publishing makes sense now: connected, and not blocked by an alarm.
	Ready() bool
	// Acquire waits for the broker and returns a confirm channel for this relay's use alone.
	Acquire(ctx context.Context) (Channel, error)
}

// Channel is a confirm channel. It is used by one goroutine at a time.
type Channel interface {
	// Publish writes m and does not wait, unless the socket is full and the broker does not read;
	// then it gives up when ctx ends. After nil exactly one Result with this tag follows,
	// also when the channel dies. ErrRefused means m can never be published; after any other
	// error the channel is of no more use and no Result follows for this tag.
	Publish(ctx context.Context, tag uint64, m *message.Message) error
	// Results delivers what became of each publish, in any order.
	Results() <-chan message.Result
	// Release hands the channel back; nothing may be in flight.
	Release()
	// Destroy closes the channel after any doubt; its Results no longer matter.
	Destroy()
}
