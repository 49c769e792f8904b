package outbox_test

import (
	"database/sql"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// backlogSQL inserts 2,500 rows to q, each of one of so many keys, in the order of their numbers.
const backlogSQL = `
INSERT INTO outbox_events (message_id, ordering_key, exchange, routing_key, properties, headers, payload)
WITH d AS (SELECT 0 n UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4
           UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9),
     i AS (SELECT 1000 * a.n + 100 * b.n + 10 * c.n + e.n + ? AS n FROM d a, d b, d c, d e WHERE a.n < 2 OR a.n = 2 AND b.n < 5)
SELECT CONCAT('key', n MOD ?, '-', n, '-0'), CONCAT('key', n MOD ?), 'backstep.commands', 'q', '{}', '{}', '{}' FROM i ORDER BY n`

// addBacklog adds n rows, of which 2,500 go into a statement, and returns their ids by key.
func addBacklog(t testing.TB, db *sql.DB, n, keys, from int) map[string][]string {
	t.Helper()
	ids := map[string][]string{}
	for i := from; i < from+n; i += 2500 {
		exec(t, db, backlogSQL, i, keys, keys)
	}
	for i := from; i < from+n; i++ {
		key := fmt.Sprintf("key%d", i%keys)
		ids[key] = append(ids[key], fmt.Sprintf("%s-%d-0", key, i))
	}
	return ids
}

// gate is a door that keeps the order in which it let messages through, each once.
type gate struct {
	*door
	mu     sync.Mutex // guards below
	passed []string
	seen   map[string]bool
}

func newGate(key string, kind message.ResultKind) *gate {
	g := &gate{door: newDoor(key, kind), seen: map[string]bool{}}
	answer := g.PublishFunc
	g.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		g.mu.Lock()
		if !g.seen[m.MessageID] && (m.RoutingKey != key || message.ResultKind(g.kind.Load()) == message.Confirmed) {
			g.seen[m.MessageID] = true
			g.passed = append(g.passed, m.MessageID)
		}
		g.mu.Unlock()
		return answer(c, tag, m)
	}
	return g
}

// slow has answers come only a while after their publish: as many rows as may be are in flight
// when the first is refused.
func (g *gate) slow(d time.Duration) {
	if d == 0 {
		return
	}
	answer := g.PublishFunc
	g.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		time.AfterFunc(d, func() { _ = answer(c, tag, m) }) // the door's never fails
		return nil
	}
}

func (g *gate) through() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.passed)
}

func (g *gate) has(id string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.seen[id]
}

// adding returns a transaction that has added messages and is not committed yet.
func adding(t testing.TB, db *sql.DB, msgs ...message.Message) *sql.Tx {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := outbox.Add(t.Context(), sqltx.Join(tx), msgs...); err != nil {
		t.Fatal(err)
	}
	return tx
}

func commit(t testing.TB, tx *sql.Tx) {
	t.Helper()
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
}

// Rows that cannot go, at the head of all others, are read once, and not again by each pass.
// What commits late among them is found all the same, in order; nobody overtakes within a
// key; and all go when they can.
func TestBacklogIsNotReadAgain(t *testing.T) {
	t.Parallel()
	const n, others = 5000, 40
	for _, tt := range []struct {
		name   string
		keys   int
		kind   message.ResultKind
		relays int
		cfg    outbox.Config
		slow   time.Duration // answers of the broker
	}{
		{"blocked key", 1, message.Nacked, 1, outbox.Config{}, 0},
		{"blocked key, two relays", 1, message.Nacked, 2, outbox.Config{}, 0},
		{"full queue", n, message.Nacked, 1, outbox.Config{DeletePublished: true}, 0},
		{"full queue, two relays", n / 5, message.Nacked, 2, outbox.Config{Page: 200}, 0},
		{"unroutable", n / 5, message.Returned, 1, outbox.Config{Page: 200}, 0},
		{"unroutable, two relays", n, message.Returned, 2, outbox.Config{}, 0},
		{"unroutable, all known, two relays", n, message.Returned, 2, outbox.Config{}, 50 * time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			db, g := database(t), newGate("q", tt.kind)
			g.slow(tt.slow)
			// Keys of the shard that has a backlog in any case.
			var keys []string
			for i := 1_000_000; len(keys) < 2; i++ {
				if k := fmt.Sprintf("key%d", i); message.Shard(k) == message.Shard("key0") {
					keys = append(keys, k)
				}
			}
			loneKey, lateKey := keys[0], keys[1]
			committed := addBacklog(t, db, n/2, tt.keys, 0)
			lone := adding(t, db, keyed(command("free", "other-lone"), loneKey))
			early := adding(t, db, keyed(command("free", lateKey+"-0-0"), lateKey))
			for key, ids := range addBacklog(t, db, n/2, tt.keys, n/2) {
				committed[key] = append(committed[key], ids...)
			}
			var relays []*relay
			for range tt.relays {
				tt.cfg.LeaseTTL = 20 * time.Second // on a busy machine it would be lost, and all read anew
				relays = append(relays, start(t, db, g, tt.cfg))
			}
			// One after the other, so that each has to be found for itself.
			for _, id := range names("other", others) {
				add(t, db, command("free", id))
				eventually(t, id+" is published", func() bool { return g.has(id) })
				exec(t, lone, `DO 0`) // or the server takes them for lost
				exec(t, early, `DO 0`)
			}
			commit(t, lone)
			eventually(t, "a row that committed late is published", func() bool { return g.has("other-lone") })
			commit(t, early)
			add(t, db, keyed(command("free", lateKey+"-1-0"), lateKey))
			committed[lateKey] = []string{lateKey + "-0-0", lateKey + "-1-0"}
			blocked := fmt.Sprintf("key0-%d-0", n)
			add(t, db, keyed(command("free", blocked), "key0"))
			committed["key0"] = append(committed["key0"], blocked)
			eventually(t, "the rows of the key that committed late are published", func() bool { return g.has(lateKey + "-1-0") })
			closed := work(relays)
			if closed.jumps == 0 || closed.doubts == 0 {
				t.Errorf("%+v: the test proves little", closed)
			}

			g.set(message.Confirmed)
			eventually(t, "all rows are published", func() bool { return having(t, db, "PENDING") == 0 })
			var arrived []string
			for _, id := range g.through() {
				if !strings.HasPrefix(id, "other") {
					arrived = append(arrived, id)
				}
			}
			if len(arrived) != n+3 {
				t.Errorf("%d rows arrived, want %d", len(arrived), n+3)
			}
			inOrder(t, committed, keyOf, arrived)
			drained := work(relays)
			t.Logf("while the backlog waited: %+v; in all: %+v", closed, drained)
			// Two relays share the shards only in time. While rows of many keys go, those in flight
			// are read again and again; one key has few of them.
			if closed.rows > 4*n || tt.keys == 1 && drained.rows > 8*n {
				t.Errorf("%d rows were read while %d waited, and %d in all", closed.rows, n, drained.rows)
			}
		})
	}
}

// A few rows that wait for another destination, behind a backlog, have it read again no more than
// if they were not there: of what waits there is room for more.
func TestBacklogIsNotReadAgainForAFew(t *testing.T) {
	t.Parallel()
	const n, others = 5000, 40
	db, g := database(t), newGate("q", message.Nacked)
	answer := g.PublishFunc
	var open atomic.Bool
	g.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		if m.RoutingKey == "few" && !open.Load() {
			c.answer(tag, message.Nacked, "few")
			return nil
		}
		return answer(c, tag, m)
	}
	addBacklog(t, db, n, n, 0)
	few := map[int]string{}
	for i := 0; len(few) < message.Shards; i++ {
		if k := fmt.Sprintf("few%d", i); few[message.Shard(k)] == "" {
			few[message.Shard(k)] = k
			add(t, db, keyed(command("few", k), k))
		}
	}
	r := start(t, db, g, outbox.Config{LeaseTTL: 20 * time.Second})
	look := func(id string) {
		t.Helper()
		add(t, db, command("free", id))
		eventually(t, id+" is published", func() bool { return g.has(id) })
	}
	look("first")
	before := r.RowsRead()
	for _, id := range names("other", others) {
		look(id)
	}
	t.Logf("%d rows were read, then %d; %d jumps", before, r.RowsRead()-before, r.Jumps())
	if read := r.RowsRead() - before; read > n || r.Jumps() == 0 {
		t.Errorf("%d rows were read while %d waited, with %d jumps", read, n, r.Jumps())
	}

	// What was jumped over with the backlog is found again when a shard had changed hands meanwhile, and
	// none waits for the backlog's end.
	steal(t, r, db, 3)
	exec(t, db, `UPDATE outbox_shards SET owner = NULL WHERE shard = 3`)
	eventually(t, "the shard is ours again", func() bool { return r.Shards() == message.Shards })
	look("last")
	open.Store(true)
	for _, id := range few {
		eventually(t, id+" is published", func() bool { return g.has(id) })
	}
}

// done is what relays have done.
type done struct{ rows, jumps, doubts int }

func work(relays []*relay) (d done) {
	for _, r := range relays {
		d.rows += r.RowsRead()
		d.jumps += r.Jumps()
		d.doubts += r.Doubts()
	}
	return d
}

// The sums that tell whether something has changed among what was left out look at no row.
func TestSumsUseTheIndexAlone(t *testing.T) {
	t.Parallel()
	db := database(t)
	exec(t, db, fillSQL, "PENDING")
	many := make([]uint64, 2500)
	for i := range many {
		many[i] = uint64(2 * i)
	}
	for _, known := range [][]uint64{nil, {5, 6}, many} {
		query, args := outbox.SumQuery(map[int]uint64{3: math.MaxUint64, 7: 17}, known...)
		lines := plan(t, db, query, args...)
		parts := 0
		for _, line := range lines {
			if line["table"] == "" { // of the whole
				continue
			}
			if parts++; line["key"] != "ix_outbox_relay" {
				t.Errorf("%v", line)
			}
			contains(t, "Extra", line["Extra"], "Using index")
		}
		if parts != 2 {
			t.Errorf("%d parts use the index, want 2", parts)
		}
	}
}

// What others do to rows that were left out is noticed: an operator's drop and requeue, and
// what a thief of the shard has published.
func TestBacklogChangesBehindOurBack(t *testing.T) {
	t.Parallel()
	const n = 2500
	db, g := database(t), newGate("q", message.Nacked)
	addBacklog(t, db, n, n, 0)
	exec(t, db, `UPDATE outbox_events SET status = 'PARKED' WHERE id MOD 100 = 0`)
	r := start(t, db, g, outbox.Config{Page: 50, LeaseTTL: 2 * time.Second})
	look := func(id string) {
		t.Helper()
		add(t, db, command("free", id))
		eventually(t, id+" is published", func() bool { return g.has(id) })
	}
	look("first")
	before := r.Doubts()
	exec(t, db, `UPDATE outbox_events SET status = 'PENDING', generation = generation + 1 WHERE id MOD 100 = 0`)
	exec(t, db, `DELETE FROM outbox_events WHERE id MOD 100 = 1 AND id > 1500`)
	look("second")
	eventually(t, "it is noticed", func() bool { return r.Doubts() > before })
	steal(t, r, db, 3)
	exec(t, db, `UPDATE outbox_events SET status = 'PUBLISHED' WHERE shard = 3`)
	exec(t, db, `UPDATE outbox_shards SET owner = NULL WHERE shard = 3`)
	eventually(t, "the shard is ours again", func() bool { return r.Shards() == message.Shards })
	stolen := number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE status = 'PUBLISHED' AND routing_key = 'q'`)
	gone := n - number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE routing_key = 'q'`)
	look("third")
	g.set(message.Confirmed)
	eventually(t, "all rows are published", func() bool { return having(t, db, "PENDING") == 0 })
	if got, want := len(g.through()), n-stolen-gone+3; got != want || stolen == 0 || gone == 0 {
		t.Errorf("%d rows arrived, want %d (%d stolen, %d gone)", got, want, stolen, gone)
	}
}

// A row that was left out and is changed in place, which no sum tells, is noticed too.
func TestBacklogIsReadAgainAfterAWhile(t *testing.T) {
	t.Parallel()
	const n = 2500
	db, g := database(t), newGate("q", message.Nacked)
	addBacklog(t, db, n, n, 0)
	r := start(t, db, g, outbox.Config{Page: 50}.WithStretchTTL(100*time.Millisecond))
	add(t, db, command("free", "first"))
	eventually(t, "all rows were read", func() bool { return g.has("first") && r.Jumps() > 0 })
	exec(t, db, `UPDATE outbox_events SET routing_key = 'free' WHERE message_id = 'key2400-2400-0'`)
	eventually(t, "the row that was changed is published", func() bool { return g.has("key2400-2400-0") })
}

// What is remembered of rows that were left out has a bound. Beyond it the relay does not look,
// and goes on when there is room.
func TestBacklogHasABound(t *testing.T) {
	t.Parallel()
	const n = 2500
	db, g := database(t), newGate("q", message.Nacked)
	addBacklog(t, db, n, n, 0)
	r := start(t, db, g, outbox.Config{Page: 50}.WithLeftOutMax(200))
	add(t, db, command("free", "last"))
	eventually(t, "passes come to the bound", func() bool { return r.Jumps() > 100 })
	if g.has("last") {
		t.Error("a pass went on beyond the bound")
	}
	if read := r.RowsRead(); read > n {
		t.Errorf("%d rows were read", read)
	}
	g.set(message.Confirmed)
	published(t, db, n+1)
}
