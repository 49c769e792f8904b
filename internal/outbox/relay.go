package outbox

import (
	"context"
	"database/sql"
	"sync"
	"sync/atomic"
	"time"

	"backstep/internal/message"
)

// Relay publishes the rows of the shards it holds leases on. Any number of relays may run.
type Relay struct {
	db      *sql.DB
	pub     Publisher
	cfg     Config
	leases  *leases
	rungFor atomic.Uint32 // shards to look into, one bit each
	wake    chan struct{} // the pump
	rung    chan struct{} // the schedule
	tally   tally
}

// tally counts the work of reading, whatever time it takes.
type tally struct {
	rows   atomic.Int64 // read
	jumps  atomic.Int64 // over stretches of rows that were left out
	doubts atomic.Int64 // about them that made a pass begin again
}

// NewRelay returns a relay that is not running yet.
func NewRelay(db *sql.DB, pub Publisher, cfg Config) *Relay {
	cfg = cfg.withDefaults()
	return &Relay{db: db, pub: pub, cfg: cfg, leases: newLeases(db, cfg), wake: make(chan struct{}, 1), rung: make(chan struct{}, 1)}
}

// ID returns the relay's name in outbox_shards and relay_members.
func (r *Relay) ID() string { return r.cfg.ID }

// Shards returns how many shards this relay may publish now.
func (r *Relay) Shards() int { return len(r.leases.owned()) }

// Leads reports whether this relay is the one to do what only one should do, such as
// sweeping: it holds the lease on shard 0.
func (r *Relay) Leads() bool {
	_, ok := r.leases.owned()[0]
	return ok
}

// AllShards are the shards to ring for when it is not known which have new rows.
const AllShards uint16 = 1<<message.Shards - 1

// Wake makes the relay look for new rows in these shards, one bit each, now instead of at its
// next poll, and for scheduled messages soon.
func (r *Relay) Wake(shards uint16) {
	r.wakePump(shards)
	ring(r.rung)
}

func (r *Relay) wakePump(shards uint16) {
	r.rungFor.Or(uint32(shards))
	ring(r.wake)
}

func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default: // it has not been heard yet
	}
}

// Run publishes until ctx ends, then finishes what is in flight, releases its leases and
// returns nil. Outages of the database or the broker never end it.
func (r *Relay) Run(ctx context.Context) error {
	r.cfg.Log.Info("relay started", "relay", r.cfg.ID)
	// Leases are renewed until the last row in flight is settled.
	leasing, stopLeasing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopLeasing()

	var wg sync.WaitGroup
	wg.Go(func() { r.leases.run(leasing, r.pub.Ready) })
	wg.Go(func() { r.runSchedule(ctx) })
	newPump(r).run(ctx)
	stopLeasing()
	wg.Wait()

	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := r.leases.leave(end); err != nil {
		// Not worth an exit code: the others take over after the TTL.
		r.cfg.Log.Warn("relay leases not released", "error", err)
	}
	r.cfg.Log.Info("relay stopped", "relay", r.cfg.ID)
	return nil
}
