package outbox

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"backstep/internal/message"
)

const (
	buryMemberSQL = `DELETE FROM relay_members WHERE relay_id = ? AND heartbeats = ?`

	// Each shard only if it is as we last saw it: somebody may be faster, or its owner live.
	takeShardsSQL = `
UPDATE outbox_shards
   SET owner = ?, epoch = epoch + 1, renewals = renewals + 1, leased_until = NOW(6) + INTERVAL ? MICROSECOND
 WHERE `
	asSeenSQL = `(shard = ? AND epoch = ? AND renewals = ? AND owner <=> ?)`
)

// balance takes free and abandoned shards up to our fair share, and offers what is over it.
func (l *leases) balance(ctx context.Context) error {
	var live []string
	for id, m := range l.seen.members {
		if id != l.cfg.ID && time.Since(m.moved) > 2*l.cfg.LeaseTTL {
			// Only tidiness: a member that comes back inserts itself again.
			if _, err := l.db.ExecContext(ctx, buryMemberSQL, []byte(id), m.count); err != nil {
				return fmt.Errorf("remove dead relay %s: %w", id, err)
			}
		}
		if time.Since(m.moved) <= l.cfg.LeaseTTL {
			live = append(live, id)
		}
	}
	share := fairShare(live, l.cfg.ID)
	if have := l.offer(share); have < share {
		return l.takeShards(ctx, share-have)
	}
	return nil
}

// offer gives up what is recalled or over our share, or takes back what was, and returns what
// is left.
func (l *leases) offer(share int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	have := len(l.held) - len(l.giveUp)
	for shard := range l.held {
		recalled := l.seen.shards[shard].recalled
		if (recalled || have > share) && !l.giveUp[shard] {
			l.giveUp[shard] = true
			have--
			l.notify()
		}
		if have < share && l.giveUp[shard] && !recalled {
			delete(l.giveUp, shard)
			have++
		}
	}
	return have
}

// takeShards takes at most n shards that are free or abandoned.
func (l *leases) takeShards(ctx context.Context, n int) error {
	var conds []string
	args := []any{[]byte(l.cfg.ID), l.cfg.LeaseTTL.Microseconds()}
	for id := 0; id < message.Shards && len(conds) < n; id++ {
		s := l.seen.shards[id]
		var owner []byte
		if s.owner != nil {
			if *s.owner == l.cfg.ID || time.Since(s.moved) <= l.cfg.LeaseTTL {
				continue
			}
			owner = []byte(*s.owner)
			l.cfg.Log.Info("relay takes over a shard", "shard", id, "from", *s.owner)
		}
		conds = append(conds, asSeenSQL)
		args = append(args, id, s.epoch, s.count, owner)
	}
	if len(conds) == 0 {
		return nil
	}
	if _, err := l.db.ExecContext(ctx, takeShardsSQL+strings.Join(conds, "\n    OR "), args...); err != nil {
		return fmt.Errorf("take %d shards: %w", len(conds), err)
	}
	// Which of them are ours now, the table says.
	if err := l.seen.look(ctx, l.db, l.cfg.LeaseTTL); err != nil {
		return err
	}
	l.confirm()
	return nil
}

// fairShare returns how many shards relay id should hold among the live ones: all get the
// same, the first by name get one more until the shards are used up.
func fairShare(live []string, id string) int {
	if !slices.Contains(live, id) {
		live = append(live, id)
	}
	slices.Sort(live)
	share := message.Shards / len(live)
	if slices.Index(live, id) < message.Shards%len(live) {
		share++
	}
	return share
}
