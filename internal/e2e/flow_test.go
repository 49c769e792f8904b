package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// flow is a steady stream of rows from the outbox into queues of the test's own.
type flow struct {
	w    *wheel
	ttl  time.Duration // of the relays' leases
	stop func()        // and wait until the last transaction has committed

	mu        sync.Mutex // guards what follows
	committed map[string][]*item
	items     map[string]*item // by message id
	copies    int              // beyond the first of each
}

// item is a row of a flow and what became of it.
type item struct {
	key, id string
	at      time.Time // its transaction committed; zero: it may not have
	first   *amqp091.Delivery
	arrived time.Time
	nth     int // first delivery of its key
}

const (
	flowKeys    = 200
	flowWriters = 8                     // each has the transactions of its keys one after the other
	flowPause   = 30 * time.Millisecond // of a writer between two
)

var flowQueues = []string{"flow-0", "flow-1"}

// newFlow starts a flow; the exchanges must exist.
func newFlow(w *wheel, ttl time.Duration) *flow {
	w.t.Helper()
	f := &flow{w: w, ttl: ttl, committed: map[string][]*item{}, items: map[string]*item{}}
	conn, err := amqp091.Dial(w.broker.URL)
	if err != nil {
		w.t.Fatal(err)
	}
	var consumers, writers sync.WaitGroup
	w.t.Cleanup(func() { _ = conn.Close(); consumers.Wait() })
	for _, queue := range flowQueues {
		w.sink(queue)
		ch, err := conn.Channel()
		if err != nil {
			w.t.Fatal(err)
		}
		deliveries, err := ch.Consume(queue, "", true, false, false, false, nil)
		if err != nil {
			w.t.Fatal(err)
		}
		consumers.Go(func() {
			nth := map[string]int{}
			for d := range deliveries {
				f.arrive(&d, nth)
			}
		})
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	for n := range flowWriters {
		writers.Go(func() { f.write(ctx, n) })
	}
	f.stop = sync.OnceFunc(func() { cancel(); writers.Wait() })
	w.t.Cleanup(f.stop)
	return f
}

// write adds rows, a transaction of a key at a time, until ctx ends.
func (f *flow) write(ctx context.Context, writer int) {
	tick := time.NewTicker(flowPause)
	defer tick.Stop()
	for n := 0; ctx.Err() == nil; n++ {
		key := (n*flowWriters + writer) % flowKeys
		var msgs []message.Message
		var items []*item
		for i := range 1 + n%3 {
			it := &item{key: fmt.Sprintf("key-%d", key), id: fmt.Sprintf("%d/%d/%d", key, n, i)}
			items = append(items, it)
			msgs = append(msgs, message.Message{
				Properties: message.Properties{MessageID: it.id, Type: "test"}, OrderingKey: it.key, Body: fmt.Appendf(nil, "%q", it.id),
				Exchange: message.CommandsExchange, RoutingKey: flowQueues[key%len(flowQueues)], Mandatory: true,
			})
		}
		f.expect(items)
		// It is not for ctx to end a transaction: nobody would know what became of it.
		err := sqltx.WithTx(context.WithoutCancel(ctx), f.w.db, func(ctx context.Context, tx *sqltx.Tx) error {
			return outbox.Add(ctx, tx, msgs...)
		})
		if err != nil {
			f.w.t.Errorf("writer %d: %v", writer, err)
			return
		}
		f.commit(items)
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

func (f *flow) expect(items []*item) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, it := range items {
		f.items[it.id] = it
	}
}

func (f *flow) commit(items []*item) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, it := range items {
		it.at = time.Now()
		f.committed[it.key] = append(f.committed[it.key], it)
	}
}

// arrive notes a delivery. nth counts the first ones of each key.
func (f *flow) arrive(d *amqp091.Delivery, nth map[string]int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	it := f.items[d.MessageId]
	switch {
	case it == nil:
		f.w.t.Errorf("%q arrived, which nobody has sent", d.MessageId)
	case it.first == nil:
		it.first, it.arrived, it.nth = d, time.Now(), nth[it.key]
		nth[it.key]++
	default:
		f.copies++
		if err := sameCopy(*it.first, *d); err != nil {
			f.w.t.Errorf("copies of %s differ: %v", it.id, err)
		}
	}
}

// each calls visit for each row that has committed.
func (f *flow) each(visit func(it *item)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, items := range f.committed {
		for _, it := range items {
			visit(it)
		}
	}
}

// settle waits until all has arrived that has committed when it is called.
func (f *flow) settle() {
	f.w.t.Helper()
	now := time.Now()
	f.w.eventually(60*time.Second, "what has committed arrives", func() error {
		late := 0
		f.each(func(it *item) {
			if it.at.Before(now) && it.first == nil {
				late++
			}
		})
		if late > 0 {
			return fmt.Errorf("%d rows have not", late)
		}
		return nil
	})
}

// flows waits until something of each shard has arrived that committed after from.
func (f *flow) flows(from time.Time) {
	f.w.t.Helper()
	f.w.eventually(60*time.Second, "rows of each shard commit and arrive", func() error {
		seen := map[int]bool{}
		f.each(func(it *item) {
			if it.first != nil && it.at.After(from) {
				seen[message.Shard(it.key)] = true
			}
		})
		if len(seen) < message.Shards {
			return fmt.Errorf("%d shards have", len(seen))
		}
		return nil
	})
}

// during demands that no shard that changes hands stalls for longer than limit while do runs and
// until all that has committed meanwhile has arrived, and returns the longest stall. A row
// waits from its COMMIT to its first delivery. How slow the machine is the shards show that stay
// with their relay: what they stall for, the others may stall in addition.
func (f *flow) during(what string, limit time.Duration, do func()) (longest time.Duration) {
	f.w.t.Helper()
	from, before := time.Now(), f.w.epochs()
	do()
	f.flows(from)
	f.settle()
	after, stalls := f.w.epochs(), map[int]time.Duration{}
	f.each(func(it *item) {
		if it.first != nil && it.arrived.After(from) {
			shard := message.Shard(it.key)
			stalls[shard] = max(stalls[shard], it.arrived.Sub(it.at))
		}
	})
	var machine time.Duration
	for shard, stall := range stalls {
		if after[shard] == before[shard] {
			machine = max(machine, stall)
		}
	}
	for shard, stall := range stalls {
		limit := limit + machine
		if after[shard] == before[shard] {
			limit = f.ttl + time.Second
		}
		if stall > limit {
			f.w.t.Errorf("%s: shard %d stalled for %s, want at most %s", what, shard, stall, limit)
		}
		longest = max(longest, stall)
	}
	f.w.t.Logf("%s: took %s, longest stall %s, of shards that stayed %s", what,
		time.Since(from).Round(time.Millisecond), longest.Round(time.Millisecond), machine.Round(time.Millisecond))
	return longest
}

// copied returns how many deliveries were copies of earlier ones.
func (f *flow) copied() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.copies
}

// verify ends the flow and demands that every row arrived, that the first deliveries of each key
// came in the order of its commits, and that the outbox knows it.
func (f *flow) verify() {
	f.w.t.Helper()
	f.stop()
	f.settle()
	rows := 0
	f.each(func(*item) { rows++ })
	f.w.eventually(30*time.Second, "all rows are PUBLISHED", func() error {
		all := f.w.count(`SELECT COUNT(*) FROM outbox_events WHERE routing_key LIKE 'flow-%'`)
		if n := f.w.count(`SELECT COUNT(*) FROM outbox_events WHERE routing_key LIKE 'flow-%' AND status = 'PUBLISHED'`); n != rows || all != rows {
			return fmt.Errorf("%d of %d, and %d were added", n, all, rows)
		}
		return nil
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, want := range f.committed {
		got := slices.Clone(want)
		slices.SortFunc(got, func(a, b *item) int { return a.nth - b.nth })
		if !slices.Equal(got, want) {
			f.w.t.Errorf("first deliveries of %s were\n%s\nbut the commits\n%s", key, ids(got), ids(want))
		}
	}
	f.w.t.Logf("%d rows, %d copies", rows, f.copies)
}

func ids(items []*item) string {
	var out []string
	for _, it := range items {
		out = append(out, it.id)
	}
	return strings.Join(out, " ")
}
