package outbox

import (
	"context"
	"database/sql"
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
	freeShardsSQL = `
UPDATE outbox_shards
   SET owner = NULL, leased_until = NULL, renewals = renewals + 1, recalled = FALSE
 WHERE `
	asSeenSQL = `(shard = ? AND epoch = ? AND renewals = ? AND owner <=> ?)`
)

// balance takes free and abandoned shards up to our fair share, and offers what is over it.
//
// Whoever has watched a relay stand still for a TTL says so to all, by removing it from the
// members and freeing what it does not take itself. So a relay that has just started and has to
// watch for a TTL of its own does not keep its part of the dead one's shards waiting.
func (l *leases) balance(ctx context.Context) error {
	var live []string
	for id, m := range l.seen.members {
		if time.Since(m.moved) <= l.cfg.LeaseTTL {
			live = append(live, id)
			continue
		}
		// A member that comes back inserts itself again.
		if _, err := l.db.ExecContext(ctx, buryMemberSQL, []byte(id), m.count); err != nil {
			return fmt.Errorf("remove dead relay %s: %w", id, err)
		}
	}
	share := fairShare(live, l.cfg.ID)
	return l.takeShards(ctx, share-l.offer(share))
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

// takeShards takes at most n shards that are free or abandoned, and frees the abandoned ones
// that are left.
func (l *leases) takeShards(ctx context.Context, n int) error {
	var take, free asSeen
	for id := range message.Shards {
		switch s := l.seen.shards[id]; {
		case s.owner == nil:
			if len(take.conds) < n {
				take.add(id, s)
			}
		case *s.owner == l.cfg.ID || time.Since(s.moved) <= l.cfg.LeaseTTL:
		case len(take.conds) < n:
			l.cfg.Log.Info("relay takes over a shard", "shard", id, "from", *s.owner)
			take.add(id, s)
		default:
			l.cfg.Log.Info("relay frees a shard for others", "shard", id, "from", *s.owner)
			free.add(id, s)
		}
	}
	if err := free.update(ctx, l.db, freeShardsSQL); err != nil {
		return fmt.Errorf("free %d shards: %w", len(free.conds), err)
	}
	if len(take.conds) == 0 {
		return nil
	}
	if err := take.update(ctx, l.db, takeShardsSQL, []byte(l.cfg.ID), l.cfg.LeaseTTL.Microseconds()); err != nil {
		return fmt.Errorf("take %d shards: %w", len(take.conds), err)
	}
	// Which of them are ours now, the table says.
	if err := l.seen.look(ctx, l.db, l.cfg.LeaseTTL); err != nil {
		return err
	}
	l.confirm()
	return nil
}

// asSeen are shards that are changed if they are as we last saw them.
type asSeen struct {
	conds []string
	args  []any
}

func (a *asSeen) add(id int, s shard) {
	var owner []byte
	if s.owner != nil {
		owner = []byte(*s.owner)
	}
	a.conds = append(a.conds, asSeenSQL)
	a.args = append(a.args, id, s.epoch, s.count, owner)
}

// update changes them; query ends where its conditions begin, and args go before theirs.
func (a *asSeen) update(ctx context.Context, db *sql.DB, query string, args ...any) error {
	if len(a.conds) == 0 {
		return nil
	}
	_, err := db.ExecContext(ctx, query+strings.Join(a.conds, "\n    OR "), append(args, a.args...)...)
	return err
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
