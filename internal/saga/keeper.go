package saga

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"backstep/internal/attempt"
	"backstep/internal/message"
)

// Keeper keeps sagas from being stuck. In each worker process one does, every second, what no
// message triggers: it writes down how far the process has come with its queues, keeps the pulse,
// ends what has come to its deadline, emits lost commands again, and those that a participant has not
// answered by half of its deadline, and warns of sagas that are overdue and not known here.
type Keeper struct {
	engine *Engine
	db     *sql.DB
	cfg    KeeperConfig

	told   map[string]told     // by queue; used by the pulse's goroutine alone
	beaten atomic.Bool         // this process kept the pulse since the deadlines were last looked at
	gone   map[string]absence  // of commands, by id; used by the rescue's goroutine alone
	turns  map[Status]position // where the rescue goes on; likewise
	due    position            // where the deadlines go on; likewise
	asked  position            // where what has no reply goes on; likewise
	broke  map[string]int      // connections in a row, in ending a saga at its deadline; likewise
	warned time.Time           // of sagas that nobody here knows; likewise
	swept  time.Time           // old consumers; likewise

	// What a transaction that calls hooks may take, and how long a hook has then to return; a test makes
	// them short.
	endLimit, grace time.Duration
}

// KeeperConfig is a Keeper's. Zero fields mean the defaults.
type KeeperConfig struct {
	Consumer string // this process among the consumers of its queues; default a new id
	// Queues are those that this process consumes, each with how far it has come.
	Queues map[string]func() Standing
	// Ready reports whether the session with the broker is. It must not wait. Default: always.
	Ready func() bool
	// Committed is called after a commit that added to the outbox, or brought back what was
	// published, to wake whoever publishes it: the shards, one bit each. It must not wait.
	Committed func(shards uint16)

	// RescueAfter is by how much later commands have been delivered, or for how long a queue has
	// had nothing to deliver, before one that was published earlier counts as lost; default 1 min.
	RescueAfter time.Duration
	// RescueAnyway is after how long a command is emitted again whatever its queue delivers, doubled
	// each time; outages do not count; default 1 h. So long after an outage deadlines wait for queues to
	// be worked off, at most, and a saga that has not changed for so long counts as overdue.
	RescueAnyway time.Duration
	// Settle is how long database and broker must have been up before a deadline fires, so that
	// participants that were cut off too can say what they did; default 30 s.
	Settle time.Duration

	Log *slog.Logger
}

func (c KeeperConfig) withDefaults() KeeperConfig {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	if c.Consumer == "" {
		c.Consumer = message.NewID()
	}
	if c.Ready == nil {
		c.Ready = func() bool { return true }
	}
	if c.Committed == nil {
		c.Committed = func(uint16) {}
	}
	def(&c.RescueAfter, time.Minute)
	def(&c.RescueAnyway, time.Hour)
	def(&c.Settle, 30*time.Second)
	if c.Log == nil {
		c.Log = slog.Default()
	}
	return c
}

// NewKeeper returns a keeper of the engine's sagas that is not running yet.
func NewKeeper(e *Engine, db *sql.DB, cfg KeeperConfig) *Keeper {
	return &Keeper{
		engine: e, db: db, cfg: cfg.withDefaults(),
		told: map[string]told{}, gone: map[string]absence{}, turns: map[Status]position{}, broke: map[string]int{}, endLimit: endLimit, grace: endGrace,
	}
}

const (
	beatPause  = time.Second
	lookPause  = 10 * time.Second // between looks for lost commands, at most
	beatLimit  = 10 * time.Second // that one round may take; the next is another connection's
	lookLimit  = time.Minute
	endLimit   = 15 * time.Second
	endGrace   = 5 * time.Second
	forgetting = 2 * time.Second
)

// Run works until ctx ends. Outages of the database or the broker never end it.
func (k *Keeper) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	// Apart: a long look must not look like an outage.
	wg.Go(func() {
		k.every(ctx, beatPause, "the pulse", func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, beatLimit)
			defer cancel()
			return k.beatOnce(ctx)
		})
	})
	rescued := time.Now()
	every := min(lookPause, k.cfg.RescueAfter/6)
	wg.Go(func() {
		k.every(ctx, min(beatPause, every), "deadlines and lost commands", func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, lookLimit)
			defer cancel()
			var err error
			if k.beaten.Swap(false) { // one process at a time does
				err = k.scanDeadlines(ctx)
			}
			if time.Since(rescued) >= every {
				rescued = time.Now()
				err = errors.Join(err, k.rescue(ctx))
			}
			return err
		})
	})
	wg.Wait()
	return k.forget(ctx)
}

// every calls do again and again until ctx ends, with some jitter: two processes in step would
// leave all the work to the one that is ahead. An error, or a panic, is logged when it begins, and when
// it ends.
func (k *Keeper) every(ctx context.Context, pause time.Duration, what string, do func(ctx context.Context) error) {
	failing := false
	for ctx.Err() == nil {
		switch err := guarded(func() error { return do(ctx) }); {
		case ctx.Err() != nil:
		case err != nil && !failing:
			failing = true
			log := k.cfg.Log
			if p, ok := errors.AsType[*attempt.Panic](err); ok {
				log = log.With("stack", string(p.Stack))
			}
			log.Warn("cannot keep "+what+"; trying again", "error", err)
		case err == nil && failing:
			failing = false
			k.cfg.Log.Info("keeping " + what + " again")
		}
		t := time.NewTimer(pause/2 + rand.N(pause))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
		}
	}
}
