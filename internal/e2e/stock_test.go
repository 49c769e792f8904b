package e2e

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/internal/handlers"
)

// stock makes a SKU have so many pieces.
func (w *wheel) stock(sku string, pieces int) {
	w.t.Helper()
	if _, err := w.db.ExecContext(w.t.Context(), `
INSERT INTO inventory (sku, initial, available) VALUES (?, ?, ?)
    ON DUPLICATE KEY UPDATE initial = VALUES(initial), available = VALUES(available)`, []byte(sku), pieces, pieces); err != nil {
		w.t.Fatal(err)
	}
}

// left returns what inventory says of a SKU.
func (w *wheel) left(sku string) (out struct{ available, reserved, shipped int }) {
	w.t.Helper()
	if err := w.db.QueryRowContext(w.t.Context(), `SELECT available, reserved, shipped FROM inventory WHERE sku = ?`, []byte(sku)).
		Scan(&out.available, &out.reserved, &out.shipped); err != nil {
		w.t.Fatal(err)
	}
	return out
}

// lines makes an order of lines of one piece for a cent each.
func lines(skus ...string) func(*handlers.CreateOrder) {
	return func(o *handlers.CreateOrder) {
		o.Items, o.TotalCents = nil, int64(len(skus))
		for _, sku := range skus {
			o.Items = append(o.Items, handlers.Item{SKU: sku, Quantity: 1, PriceCents: 1})
		}
	}
}

// B103: lines of one SKU are one quantity, when it is looked whether there is enough, when it is
// taken and when it is given back.
func TestSameSKUOnSeveralLines(t *testing.T) {
	w := newWheel(t)
	w.start("relay")
	w.start("worker")
	w.awaitQueues()
	twice := func(n int64) func(o *handlers.CreateOrder) {
		return func(o *handlers.CreateOrder) {
			it := handlers.Item{SKU: o.Items[0].SKU, Quantity: n, PriceCents: 1}
			o.Items, o.TotalCents = []handlers.Item{it, it}, 2*n
		}
	}
	fifty := func(o *handlers.CreateOrder) { lines(slices.Repeat([]string{o.Items[0].SKU}, 50)...)(o) }
	tests := []struct {
		sku           string
		stock         int
		order         func(o *handlers.CreateOrder)
		fails         bool // at the last step
		shipped, left int
	}{
		{"three and three of five", 5, twice(3), false, 0, 5},
		{"two and two of five", 5, twice(2), false, 4, 1},
		{"fifty lines of fifty", 50, fifty, false, 50, 0},
		{"two and two of five, given back", 5, twice(2), true, 0, 5},
		{"fifty lines of fifty, given back", 50, fifty, true, 0, 50},
	}
	for _, tt := range tests {
		w.stock(tt.sku, tt.stock)
		w.submit(request(t, func(o *handlers.CreateOrder) {
			o.Items[0].SKU = tt.sku
			tt.order(o)
			if tt.fails {
				o.ShipTo.Country = "ZZ"
			}
		}))
	}
	w.rest(len(tests), 60*time.Second)
	w.verify(expectation{confirmed: 2, noStock: 1, refused: 2})
	for _, tt := range tests {
		if got := w.left(tt.sku); got.available != tt.left || got.reserved != 0 || got.shipped != tt.shipped {
			t.Errorf("%s: %+v, want %d available and %d shipped", tt.sku, got, tt.left, tt.shipped)
		}
	}
}

// B105: orders whose lines cross, and ten lines in any order, never deadlock: no transaction of
// any worker has to be run again.
func TestCrossedOrdersNeverDeadlock(t *testing.T) {
	w := newWheel(t)
	w.start("relay")
	workers := w.together("worker", 4, "BACKSTEP_LANES=4", "BACKSTEP_QUEUES=inventory", "BACKSTEP_BATCH=4")
	w.start("worker", "BACKSTEP_QUEUES=orders,payment,shipping")
	w.awaitQueues()
	var msgs []amqp091.Publishing
	for range 100 {
		a, b := handlers.SKU(0), handlers.SKU(1)
		msgs = append(msgs, request(t, lines(a, b)), request(t, lines(b, a)))
	}
	for range 100 {
		var ten []string
		for _, i := range rand.Perm(10) {
			ten = append(ten, handlers.SKU(i))
		}
		msgs = append(msgs, request(t, lines(ten...)))
	}
	w.submit(msgs...)
	w.rest(len(msgs), 120*time.Second)
	w.verify(expectation{confirmed: len(msgs)})
	w.nothingSpent()
	shared := 0
	for _, p := range workers {
		stats := p.stats()
		if stats.Conflicts > 0 {
			t.Errorf("a worker had %d deadlocks or lock waits; the server's last deadlock:\n%s", stats.Conflicts, w.lastDeadlock())
		}
		if stats.Done > 0 {
			shared++
		}
	}
	if shared < 2 {
		t.Errorf("%d workers reserved stock: nothing could have deadlocked", shared)
	}
}

// lastDeadlock is what the server has to say about it; nothing if all were waits on a machine that was busy.
func (w *wheel) lastDeadlock() string {
	var typ, name, status string
	if err := w.db.QueryRowContext(w.t.Context(), `SHOW ENGINE INNODB STATUS`).Scan(&typ, &name, &status); err != nil {
		return err.Error()
	}
	_, status, _ = strings.Cut(status, "LATEST DETECTED DEADLOCK")
	status, _, _ = strings.Cut(status, "\nTRANSACTIONS\n")
	return status
}

// B106: ten pieces of each of some SKUs and a hundred orders for one, each delivered twice, by
// workers that are killed at random: exactly ten are confirmed, and at no moment is more given
// away than there was.
func TestLastPieces(t *testing.T) {
	const skus, pieces, each = 5, 10, 100
	w := newWheel(t)
	w.together("relay", 2)
	workers := w.together("worker", 3, "BACKSTEP_BATCH=8")
	w.awaitQueues()
	var msgs []amqp091.Publishing
	for i := range skus {
		w.stock(handlers.SKU(i), pieces)
		for range each {
			msgs = append(msgs, request(t, line(handlers.SKU(i), 1, 100)))
		}
	}
	msgs = append(msgs, msgs...)
	rand.Shuffle(len(msgs), func(i, j int) { msgs[i], msgs[j] = msgs[j], msgs[i] })
	w.submit(msgs...)
	const kills = 8
	for n := range kills {
		// After each eighth of the orders: a worker is killed in the middle of the work.
		w.eventually(60*time.Second, "orders end", func() error {
			if ended := w.count(`SELECT COUNT(*) FROM orders WHERE status <> 'PENDING'`); ended < (n+1)*skus*each/(kills+1) {
				return fmt.Errorf("%d have", ended)
			}
			return nil
		})
		i := rand.IntN(len(workers))
		workers[i].signal(syscall.SIGKILL)
		workers[i] = w.start("worker", "BACKSTEP_BATCH="+strconv.Itoa(1+rand.IntN(32)))
		if n := w.count(`
SELECT COUNT(*) FROM inventory
 WHERE initial <> available + reserved + shipped OR LEAST(available, reserved, shipped) < 0`); n > 0 {
			t.Errorf("stock of %d SKUs does not add up", n)
		}
	}
	w.rest(skus*each, 120*time.Second)
	w.verify(expectation{confirmed: skus * pieces, noStock: skus * (each - pieces)})
	for i := range skus {
		if got := w.left(handlers.SKU(i)); got.available != 0 || got.reserved != 0 || got.shipped != pieces {
			t.Errorf("%s: %+v, want all %d shipped", handlers.SKU(i), got, pieces)
		}
	}
}

// B108: an unknown SKU is a business refusal at the first try that names it, and what else was
// ordered stays in stock; also when the SKU goes after the order was taken, and comes back later.
func TestUnknownSKU(t *testing.T) {
	w := newWheel(t)
	w.start("relay")
	w.start("worker", "BACKSTEP_QUEUES=orders")
	w.awaitQueues()
	msg := request(t, lines(handlers.SKU(0), handlers.SKU(1)))
	w.submit(msg)
	w.eventually(30*time.Second, "the order is taken", func() error {
		if w.count(`SELECT COUNT(*) FROM orders`) == 0 {
			return fmt.Errorf("no order")
		}
		return nil
	})
	if _, err := w.db.ExecContext(t.Context(), `DELETE FROM inventory WHERE sku = ?`, []byte(handlers.SKU(1))); err != nil {
		t.Fatal(err)
	}
	w.start("worker")
	w.rest(1, 60*time.Second)
	w.stock(handlers.SKU(1), 5) // too late
	w.submit(msg)               // and a repeat does not try again
	w.rest(1, 60*time.Second)
	w.verifyInvariants()
	if n := w.count(`SELECT COUNT(*) FROM orders WHERE status = 'CANCELLED' AND reason LIKE ?`, "%unknown SKU \""+handlers.SKU(1)+"\"%"); n != 1 {
		t.Error("the order is not cancelled with the SKU named")
	}
	if n := w.count(`SELECT attempts FROM saga_steps WHERE step_order = 0`); n != 1 {
		t.Errorf("%d attempts to reserve an unknown SKU, want 1", n)
	}
	if got := w.left(handlers.SKU(0)); got.available != 1_000 {
		t.Errorf("the SKU that is known: %+v, want all available", got)
	}
}

// B100: the database refuses what no order may be, even if somebody went round the intake.
func TestDatabaseRefusesNonsense(t *testing.T) {
	w := newWheel(t)
	for _, query := range []string{
		`INSERT INTO order_items (order_id, line, sku, quantity, price_cents) VALUES ('o', 0, 'A', -1, 100)`,
		`INSERT INTO order_items (order_id, line, sku, quantity, price_cents) VALUES ('o', 0, 'A', 0, 100)`,
		`INSERT INTO order_items (order_id, line, sku, quantity, price_cents) VALUES ('o', 0, 'A', 1, -1)`,
		`INSERT INTO orders (id, request_id, customer, total_cents, payment_token, ship_to) VALUES ('o', 'r', '', -1, '', '{}')`,
		`INSERT INTO payments (id, order_id, amount_cents, status) VALUES ('p', 'o', -1, 'CHARGED')`,
		`UPDATE inventory SET available = available - 1001`,
		`UPDATE inventory SET reserved = reserved - 1`,
		`UPDATE inventory SET shipped = shipped - 1`,
	} {
		if _, err := w.db.ExecContext(t.Context(), query); err == nil {
			t.Errorf("accepted: %s", query)
		}
	}
}

// The same orders by two connections at the same time: one of each.
func TestSameOrderAtOnce(t *testing.T) {
	w := newWheel(t)
	w.start("relay")
	w.together("worker", 2, "BACKSTEP_LANES=4", "BACKSTEP_BATCH=1")
	w.awaitQueues()
	var msgs []amqp091.Publishing
	for range 50 {
		msgs = append(msgs, request(t, nil))
	}
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() { w.submit(msgs...) })
	}
	both.Wait()
	w.rest(len(msgs), 60*time.Second)
	w.verify(expectation{confirmed: len(msgs)})
}
