package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// writeKeys adds rows of many keys to queues, each key's transactions one after the other, as
// writers do that hold a lock on the key. It returns the ids of each key as they committed.
func writeKeys(t testing.TB, db *sql.DB, keys, transactions int, queues ...string) map[string][]string {
	t.Helper()
	var mu sync.Mutex // guards committed
	committed := map[string][]string{}
	var wg sync.WaitGroup
	for _, key := range names("key", keys) {
		wg.Go(func() {
			var ids []string
			for i := range transactions {
				var msgs []message.Message
				for j := range 1 + rand.IntN(3) {
					id := fmt.Sprintf("%s-%d-%d", key, i, j)
					ids = append(ids, id)
					msgs = append(msgs, keyed(command(queues[rand.IntN(len(queues))], id), key))
				}
				long := 0
				if rand.IntN(20) == 0 {
					long = 6
				}
				err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
					if err := outbox.Add(ctx, tx, msgs...); err != nil {
						return err
					}
					return sqltx.Pause(ctx, long) // others commit meanwhile
				})
				if err != nil {
					t.Error(err)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			committed[key] = ids
		})
	}
	wg.Wait()
	return committed
}

// inOrder demands that the first deliveries of each key came in the order of their commits.
func inOrder(t testing.TB, committed map[string][]string, key func(id string) string, arrived []string) {
	t.Helper()
	got := map[string][]string{}
	for _, id := range arrived {
		k := key(id)
		got[k] = append(got[k], id)
	}
	for k, want := range committed {
		equal(t, "first deliveries of "+k, got[k], want)
	}
}

func keyOf(id string) string {
	var key, i, j int
	if _, err := fmt.Sscanf(id, "key%d-%d-%d", &key, &i, &j); err != nil {
		panic(err)
	}
	return fmt.Sprintf("key%d", key)
}

func count(committed map[string][]string) (n int) {
	for _, ids := range committed {
		n += len(ids)
	}
	return n
}

// P1, P4: with any number of relays, a queue that is full now and then, a binding that comes and
// goes and connections that are lost, every row arrives, and each key's rows in the order of
// their commits.
func TestOrderPerKey(t *testing.T) {
	t.Parallel()
	for _, relays := range []int{1, 2, 4} {
		t.Run(fmt.Sprintf("%d relays", relays), func(t *testing.T) {
			t.Parallel()
			orderPerKey(t, relays)
		})
	}
}

func orderPerKey(t *testing.T, n int) {
	db := database(t)
	b, link := proxiedBroker(t)
	b.queue(t, "q", amqp091.Table{"x-max-length": 5, "x-overflow": "reject-publish"})
	var relays []*relay
	cfg := outbox.Config{LeaseTTL: 2 * time.Second, Window: 100, Page: 32}.WithBound(4)
	for range n {
		relays = append(relays, start(t, db, b, cfg))
	}
	s := b.consume(t, "q")
	b.Unbind(t, message.CommandsExchange, "q", "q") // before there is anything to publish
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		// Until a row was returned, and others were left out because of it and jumped over: the
		// relays may spend a pause of any length on connecting.
		eventually(t, "a row is returned, and others are jumped over", func() bool {
			return work(relays).jumps > 0 && number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE attempts > 0`) > 0
		})
		b.Bind(t, message.CommandsExchange, "q", "q")
		for i := 0; ctx.Err() == nil; i++ {
			if i%2 == 0 {
				link.cut()
				link.mend()
			} else {
				b.Unbind(t, message.CommandsExchange, "q", "q")
				_ = sqltx.Pause(ctx, 3)
				b.Bind(t, message.CommandsExchange, "q", "q")
			}
			<-tick.C
		}
	})
	committed := writeKeys(t, db, 200, 10, "q")
	cancel()
	wg.Wait()
	published(t, db, count(committed))
	inOrder(t, committed, keyOf, s.await(t, count(committed)))
}

// The same with a broker whose every answer is drawn by lot, a database that goes away, relays
// that come and go, and so little memory that a pass takes many reads.
func TestOrderWhateverTheBrokerSays(t *testing.T) {
	t.Parallel()
	db, direct, link := proxied(t)
	var calm atomic.Bool
	var mu sync.Mutex // guards what arrived
	var arrived []string
	seen := map[string]bool{}
	f := &fake{}
	deliver := func(m *message.Message) {
		mu.Lock()
		defer mu.Unlock()
		if !seen[m.MessageID] {
			seen[m.MessageID] = true
			arrived = append(arrived, m.MessageID)
		}
	}
	f.PublishFunc = func(c *fakeChannel, tag uint64, m *message.Message) error {
		n := rand.IntN(1000)
		if m.RoutingKey == "q0" && n < 500 {
			n = 900 + n%60 // this queue is full or missing half of the time, and much waits for it
		}
		switch {
		case calm.Load() || n < 600:
			deliver(m)
			c.answer(tag, message.Confirmed, "")
		case n < 900: // late, and in another order
			deliver(m)
			time.AfterFunc(time.Duration(rand.IntN(10))*time.Millisecond, func() { c.answer(tag, message.Confirmed, "") })
		case n < 930:
			c.answer(tag, message.Nacked, "full")
		case n < 960:
			c.answer(tag, message.Returned, "no queue")
		case n < 970: // the queue has it, and we are not told
			deliver(m)
			c.end(message.Lost, "connection lost")
		case n < 980:
			c.end(message.Lost, "connection lost")
		case n < 985:
			return errGone
		case n < 990: // no answer comes
			deliver(m)
		case n < 995: // as for a missing exchange
			c.answer(tag, message.Returned, "no exchange")
			c.end(message.Lost, "channel closed")
		default:
			deliver(m)
			c.end(message.Lost, "channel closed")
		}
		return nil
	}
	cfg := outbox.Config{LeaseTTL: 2 * time.Second, Window: 16, Page: 32, ConfirmTimeout: 200 * time.Millisecond}.WithBound(4)
	relays := []*relay{start(t, db, f, cfg)}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			r := start(t, db, f, cfg)
			relays = append(relays, r)
			_ = sqltx.Pause(ctx, 10)
			r.stop()
		}
	})
	wg.Go(func() {
		for ctx.Err() == nil {
			_ = sqltx.Pause(ctx, 10)
			link.cut()
			link.mend()
		}
	})
	committed := writeKeys(t, direct, 60, 30, names("q", 20)...)
	_ = sqltx.Pause(ctx, 10)
	cancel()
	wg.Wait()
	calm.Store(true)
	published(t, direct, count(committed))
	if w := work(relays); w.jumps == 0 {
		t.Errorf("%+v: nothing was jumped over: the test proves little", w)
	} else {
		t.Logf("%+v", w)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(arrived) != count(committed) {
		t.Errorf("%d of %d rows arrived", len(arrived), count(committed))
	}
	inOrder(t, committed, keyOf, arrived)
}
