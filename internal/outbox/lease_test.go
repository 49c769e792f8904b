package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/testenv"
)

func TestFairShare(t *testing.T) {
	t.Parallel()
	tests := []struct {
		live []string
		id   string
		want int
	}{
		{nil, "a", 16},
		{[]string{"a"}, "a", 16},
		{[]string{"b"}, "a", 8},
		{[]string{"b", "a"}, "b", 8},
		{[]string{"a", "b", "c"}, "a", 6},
		{[]string{"c", "b", "a"}, "b", 5},
		{[]string{"a", "b", "c"}, "c", 5},
		{names("r", 16), "r7", 1},
		{names("r", 20), "r0", 1},
		{names("r", 20), "r9", 0},
	}
	for _, tt := range tests {
		if got := outbox.FairShare(tt.live, tt.id); got != tt.want {
			t.Errorf("fairShare(%v, %s) = %d, want %d", tt.live, tt.id, got, tt.want)
		}
	}
	for n := 1; n < 40; n++ {
		sum := 0
		for _, id := range names("r", n) {
			sum += outbox.FairShare(names("r", n), id)
		}
		if sum != message.Shards {
			t.Errorf("%d relays share %d shards", n, sum)
		}
	}
}

// B02, B24: a relay that joins gets its share, never a shard that another still publishes,
// and a row is not published again because its shard changed hands in an orderly way.
func TestRelaysShare(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	one := start(t, db, f, outbox.Config{LeaseTTL: time.Second})
	eventually(t, "the first has all shards", func() bool { return one.Shards() == message.Shards })

	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	added := 0
	wg.Go(func() {
		for ; ctx.Err() == nil; added += 20 {
			var msgs []message.Message
			for i := range 20 {
				msgs = append(msgs, command("q", fmt.Sprintf("m%d", added+i)))
			}
			add(t, db, msgs...)
		}
	})
	defer wg.Wait()
	defer cancel()
	eventually(t, "rows are published", func() bool { return len(f.all()) > 100 })
	two := start(t, db, f, outbox.Config{LeaseTTL: time.Second})
	shared := func() bool {
		a, b := one.Shards(), two.Shards()
		if a+b > message.Shards {
			t.Errorf("%d and %d shards at a time", a, b)
		}
		return a == 8 && b == 8
	}
	eventually(t, "they share the shards", shared)
	if one.Leads() == two.Leads() {
		t.Error("not exactly one leads")
	}
	eventually(t, "both live", func() bool { return number(t, db, `SELECT COUNT(*) FROM relay_members`) == 2 })

	one.stop()
	eventually(t, "the other has all shards", func() bool { return two.Shards() == message.Shards })
	cancel()
	wg.Wait()
	published(t, db, added)
	if n := len(f.all()); n != added {
		t.Errorf("%d publishes of %d rows", n, added)
	}
	f.look(func() {
		if f.lent > 1 {
			t.Errorf("%d channels are lent to one relay", f.lent)
		}
	})
}

// A relay that stops hands everything over at once, not only after the TTL.
func TestStoppedRelayReleasesAtOnce(t *testing.T) {
	t.Parallel()
	db, f := database(t), &fake{}
	one := start(t, db, f, outbox.Config{LeaseTTL: time.Minute})
	eventually(t, "it has all shards", func() bool { return one.Shards() == message.Shards })
	one.stop()
	if n := number(t, db, `SELECT COUNT(*) FROM outbox_shards WHERE owner IS NULL AND leased_until IS NULL`); n != message.Shards {
		t.Errorf("%d shards are free, want all", n)
	}
	if n := number(t, db, `SELECT COUNT(*) FROM relay_members`); n != 0 {
		t.Errorf("%d members, want none", n)
	}
	two := start(t, db, f, outbox.Config{LeaseTTL: time.Minute})
	eventually(t, "another takes them", func() bool { return two.Shards() == message.Shards })
	if n := number(t, db, `SELECT COUNT(*) FROM outbox_shards WHERE epoch = 2`); n != message.Shards {
		t.Errorf("%d shards have epoch 2, want all", n)
	}
}

// B02: the shards of a relay that shows no sign of life are taken over after the TTL and not
// before; those of one that does, never. No clock of the database is asked.
func TestTakeOver(t *testing.T) {
	t.Parallel()
	const ttl = time.Second
	db, f := database(t), &fake{}
	exec(t, db, `UPDATE outbox_shards SET owner = IF(shard < 15, 'dead', 'alive'), epoch = 7, leased_until = NOW(6) + INTERVAL 1 YEAR`)
	exec(t, db, `INSERT INTO relay_members VALUES ('dead', 'host', 1, NOW(6), NOW(6) + INTERVAL 1 YEAR)`)
	add(t, db, command("q", "a"), command("q", "b"), command("q", "c"))

	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(ttl / 5)
		defer tick.Stop()
		for {
			if _, err := db.ExecContext(ctx, `UPDATE outbox_shards SET renewals = renewals + 1 WHERE owner = 'alive'`); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	})
	defer wg.Wait()
	defer cancel()
	began := time.Now()
	r := start(t, db, f, outbox.Config{LeaseTTL: ttl})
	eventually(t, "it takes over from the dead", func() bool { return r.Shards() > 0 })
	if took := time.Since(began); took < ttl {
		t.Errorf("it took over after %s, before the TTL of %s", took, ttl)
	}
	eventually(t, "it has what the dead had", func() bool { return r.Shards() == 15 })
	eventually(t, "the dead is buried", func() bool { return number(t, db, `SELECT COUNT(*) FROM relay_members`) == 1 })
	never(t, "it takes over from the living", 2*ttl, func() bool { return r.Shards() > 15 })
	if n := number(t, db, `SELECT COUNT(*) FROM outbox_shards WHERE owner = ? AND epoch = 8`, []byte(r.ID())); n != 15 {
		t.Errorf("%d shards have the next epoch, want 15", n)
	}
	cancel()
	wg.Wait()
	eventually(t, "it takes over from whom has died", func() bool { return r.Shards() == message.Shards })
	published(t, db, 3)
}

// B02: a shard stalls no longer than the TTL and a second, at whatever moment between two of the
// survivor's looks its owner dies.
func TestTakeOverTakesTheTTLAndASecond(t *testing.T) {
	t.Parallel()
	const ttl, deaths = 10 * time.Second, 2 // so long that a fifth of it is more than a second
	for i := range deaths {
		t.Run(fmt.Sprintf("death %d", i), func(t *testing.T) {
			t.Parallel()
			db := database(t)
			victim := leases(db, "victim", ttl)
			renew(t, victim)
			survivor := start(t, db, &fake{}, outbox.Config{LeaseTTL: ttl, PollMax: 250 * time.Millisecond})
			eventually(t, "the survivor lives", func() bool { return number(t, db, `SELECT COUNT(*) FROM relay_members`) == 2 })
			// The survivor's heartbeat is a fifth of the TTL, and its first was just now.
			<-time.After(time.Duration(i) * ttl / 5 / deaths)
			renew(t, victim)
			died := time.Now()
			eventually(t, "the survivor has all shards", func() bool { return survivor.Shards() == message.Shards })
			if took := time.Since(died); took > ttl+time.Second {
				t.Errorf("the shards stalled for %s, want at most %s", took, ttl+time.Second)
			}
		})
	}
}

// A relay that has joined after another died cannot have watched that one for a TTL. It need not:
// it goes by those who have, and its part of the shards stalls no longer than theirs.
func TestTakeOverWithANewcomer(t *testing.T) {
	t.Parallel()
	const ttl = 3 * time.Second
	db := database(t)
	cfg := outbox.Config{LeaseTTL: ttl, PollMax: 250 * time.Millisecond}
	victim := leases(db, "victim", ttl)
	renew(t, victim)
	survivor := start(t, db, &fake{}, cfg)
	eventually(t, "the survivor lives", func() bool { return number(t, db, `SELECT COUNT(*) FROM relay_members`) == 2 })
	renew(t, victim)
	died := time.Now()
	<-time.After(ttl / 2)
	newcomer := start(t, db, &fake{}, cfg)
	eventually(t, "they share all shards", func() bool { return survivor.Shards() == 8 && newcomer.Shards() == 8 })
	if took := time.Since(died); took > ttl+time.Second {
		t.Errorf("the shards stalled for %s, want at most %s", took, ttl+time.Second)
	}
}

// A shard is not handed over while rows of it are in flight: its next owner would publish them
// again.
func TestHandOverWaitsForWhatIsInFlight(t *testing.T) {
	t.Parallel()
	db := database(t)
	var slow atomic.Bool
	slow.Store(true)
	later := make(chan func(), 1000)
	f := &fake{PublishFunc: func(c *fakeChannel, tag uint64, _ *message.Message) error {
		if slow.Load() {
			later <- func() { c.answer(tag, message.Confirmed, "") }
		} else {
			c.answer(tag, message.Confirmed, "")
		}
		return nil
	}}
	one := start(t, db, f, outbox.Config{})
	eventually(t, "it has all shards", func() bool { return one.Shards() == message.Shards })
	ids := names("m", 300) // of all shards
	add(t, db, commands("q", ids)...)
	eventually(t, "they are in flight", func() bool { return len(f.all()) == len(ids) })
	two := start(t, db, f, outbox.Config{})
	eventually(t, "its surplus is to be handed over", func() bool { return one.Shards() == 8 })
	never(t, "it is handed over", time.Second, func() bool { return two.Shards() > 0 })
	slow.Store(false)
	for len(later) > 0 {
		(<-later)()
	}
	eventually(t, "they share the shards", func() bool { return two.Shards() == 8 })
	published(t, db, len(ids))
	if n := len(f.all()); n != len(ids) {
		t.Errorf("%d publishes of %d rows", n, len(ids))
	}
}

// A relay that joins or stops is noticed at once, however long the TTL and so the time between
// two heartbeats is.
func TestHandOverDoesNotWaitForAHeartbeat(t *testing.T) {
	t.Parallel()
	const ttl = 5 * time.Minute // heartbeats are a minute apart
	db, f := database(t), &fake{}
	one := start(t, db, f, outbox.Config{LeaseTTL: ttl})
	eventually(t, "the first has all shards", func() bool { return one.Shards() == message.Shards })
	began := time.Now()
	two := start(t, db, f, outbox.Config{LeaseTTL: ttl})
	eventually(t, "they share the shards", func() bool { return one.Shards() == 8 && two.Shards() == 8 })
	two.stop()
	eventually(t, "the first has all shards again", func() bool { return one.Shards() == message.Shards })
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("joining and leaving took %s, as if it had waited for a heartbeat", took)
	}
}

// The owner may have renewed while an observer was still reading. That does not count as time in
// which it was seen to stand still.
func TestSlowLookTakesNothingThatIsTrusted(t *testing.T) {
	t.Parallel()
	const ttl = 2 * time.Second
	dsn := testenv.Database(t)
	db, narrow := open(t, dsn), open(t, dsn)
	narrow.SetMaxOpenConns(1)
	owner, observer := leases(db, "owner", ttl), leases(narrow, "observer", ttl)
	renew(t, owner)
	renew(t, observer)
	busy, err := narrow.Conn(t.Context()) // whoever looks now waits
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { watch(t, observer) })
	<-time.After(ttl * 3 / 5)
	renew(t, owner)
	if err := busy.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	eventually(t, "the observer takes over", func() bool {
		watch(t, observer)
		took := number(t, db, `SELECT COUNT(*) FROM outbox_shards WHERE owner = 'observer'`) > 0
		if took && len(owner.Owned()) > 0 {
			t.Fatal("it took over what the owner still trusts")
		}
		return took
	})
}

// A lease that cannot be renewed is trusted for less than the TTL.
func TestLeaseIsNotTrustedForTTL(t *testing.T) {
	t.Parallel()
	const ttl = 2 * time.Second
	l := outbox.NewLeases(database(t), outbox.Config{LeaseTTL: ttl})
	renew(t, l)
	if n := len(l.Owned()); n != message.Shards {
		t.Fatalf("%d shards, want all", n)
	}
	renewed := time.Now() // the renewal began before that
	eventually(t, "they are not trusted", func() bool {
		asked := time.Now() // a busy machine may look late, but it must not find them then
		trusted := len(l.Owned()) > 0
		if age := asked.Sub(renewed); trusted && age > ttl {
			t.Fatalf("it is trusted %s after its renewal, want less than %s", age, ttl)
		}
		return !trusted
	})
}

func renew(t *testing.T, l outbox.Leases) {
	t.Helper()
	if err := l.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func watch(t *testing.T, l outbox.Leases) {
	t.Helper()
	if err := l.Watch(t.Context()); err != nil {
		t.Error(err)
	}
}

func leases(db *sql.DB, id string, ttl time.Duration) outbox.Leases {
	return outbox.NewLeases(db, outbox.Config{ID: id, LeaseTTL: ttl})
}

// A renewal that began before a shard was released must not bring the lease back.
func TestReleaseDuringRenewal(t *testing.T) {
	t.Parallel()
	db := database(t)
	l := leases(db, "a", time.Minute)
	renew(t, l)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			if err := l.Renew(ctx); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		}
	})
	defer wg.Wait()
	defer cancel()
	for i := range 500 {
		shard := i % message.Shards
		var epoch uint64
		eventually(t, "the shard is ours", func() bool { epoch = l.Owned()[shard]; return epoch > 0 })
		if err := l.Release(t.Context(), shard); err != nil {
			t.Fatal(err)
		}
		if l.Owned()[shard] == epoch && // the renewal was first and found that it is no surplus
			number(t, db, `SELECT COUNT(*) FROM outbox_shards WHERE shard = ? AND owner = 'a' AND epoch = ?`, shard, epoch) == 0 {
			t.Fatal("a lease that was released is trusted")
		}
	}
}

// While the database is away nobody can show a sign of life. Afterwards everybody keeps what
// it had.
func TestOutageOfTheDatabaseMovesNoShard(t *testing.T) {
	t.Parallel()
	const ttl = time.Second
	db := database(t)
	a, b := leases(db, "a", ttl), leases(db, "b", ttl)
	shared := func() bool {
		renew(t, a)
		renew(t, b)
		for _, l := range []outbox.Leases{a, b} {
			for _, s := range l.Surplus() {
				if err := l.Release(t.Context(), s); err != nil {
					t.Fatal(err)
				}
			}
		}
		return len(a.Owned()) == 8 && len(b.Owned()) == 8
	}
	eventually(t, "they share the shards", shared)
	had := b.Owned()
	away, cancel := context.WithCancel(t.Context())
	cancel()
	began := time.Now()
	eventually(t, "the outage is long", func() bool {
		if a.Renew(away) == nil || b.Renew(away) == nil {
			t.Fatal("renewed during an outage")
		}
		return time.Since(began) > 2*ttl
	})
	renew(t, a)
	renew(t, b)
	if now := b.Owned(); !maps.Equal(now, had) {
		t.Errorf("b had %v before the outage and has %v", had, now)
	}
	if n := len(a.Owned()); n != 8 {
		t.Errorf("a has %d shards, want 8", n)
	}
}

// What was taken, but not known to be, is released too.
func TestLeaveReleasesWhatTheTableSays(t *testing.T) {
	t.Parallel()
	db := database(t)
	l := leases(db, "a", time.Minute)
	exec(t, db, `UPDATE outbox_shards SET owner = IF(shard = 3, 'a', 'b')`)
	exec(t, db, `INSERT INTO relay_members VALUES ('a', 'host', 1, NOW(6), NOW(6))`)
	if err := l.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := number(t, db, `SELECT COUNT(*) FROM outbox_shards WHERE owner IS NULL AND shard = 3`); n != 1 {
		t.Error("the shard was not released")
	}
	if n := number(t, db, `SELECT (SELECT COUNT(*) FROM outbox_shards WHERE owner = 'b') + (SELECT COUNT(*) FROM relay_members)`); n != 15 {
		t.Error("more was released than was ours, or the member stayed")
	}
}

// A relay that cannot publish leaves its shards to one that can, and has its share again when it
// can itself. One that never could takes none.
func TestRelayWithoutBrokerStepsAside(t *testing.T) {
	t.Parallel()
	db, cut, well := database(t), &fake{}, &fake{}
	var away atomic.Bool
	cut.ReadyFunc = func() bool { return !away.Load() }
	start(t, db, &fake{ReadyFunc: func() bool { return false }}, outbox.Config{LeaseTTL: time.Second})
	a := start(t, db, cut, outbox.Config{LeaseTTL: time.Second})
	b := start(t, db, well, outbox.Config{LeaseTTL: time.Second})
	shared := func() bool { return a.Shards() == message.Shards/2 && b.Shards() == message.Shards/2 }
	eventually(t, "both have their share", shared)
	away.Store(true)
	add(t, db, commands("q", names("m", 64))...) // in all shards
	published(t, db, 64)
	eventually(t, "one has all", func() bool { return b.Shards() == message.Shards && a.Shards() == 0 })
	if n := number(t, db, `SELECT COUNT(*) FROM relay_members`); n != 1 {
		t.Errorf("%d members, want the one that can publish", n)
	}
	away.Store(false)
	eventually(t, "both have their share again", shared)
	if n := len(well.all()); n == 0 || n > 64 {
		t.Errorf("%d rows came from the one with a broker", n)
	}
}

// That it leaves its shards is said once, also if the database is away too and has to be told again and again.
func TestStepsAsideOnce(t *testing.T) {
	t.Parallel()
	db, cut, log := database(t), &fake{}, &journal{}
	var away atomic.Bool
	cut.ReadyFunc = func() bool { return !away.Load() }
	r := start(t, db, cut, outbox.Config{LeaseTTL: time.Second, Log: slog.New(slog.NewTextHandler(log, nil))})
	eventually(t, "it has all shards", func() bool { return r.Shards() == message.Shards })
	exec(t, db, `RENAME TABLE outbox_shards TO away`)
	away.Store(true)
	eventually(t, "it has none", func() bool { return r.Shards() == 0 })
	time.Sleep(time.Second) // some more tries, of which nothing tells
	exec(t, db, `RENAME TABLE away TO outbox_shards`)
	eventually(t, "it has left", func() bool { return number(t, db, `SELECT COUNT(*) FROM outbox_shards WHERE owner IS NOT NULL`) == 0 })
	if n := log.count("relay leaves its shards"); n != 1 {
		t.Errorf("said %d times", n)
	}
}

// journal keeps a log.
type journal struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

func (j *journal) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(b)
}

func (j *journal) count(words string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Count(j.text.String(), words)
}
