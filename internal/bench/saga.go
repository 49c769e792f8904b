package bench

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"backstep/internal/sqltx"
)

// Sagas are order sagas as somebody would write them by hand, in SQL and nothing else: the
// three steps of place-order, and every row that our system writes with them. There is no
// broker, no intake and no relay: orders, their lines and their sagas are there already, and
// each step knows what comes next. That is the ceiling of what a worker can do.
//
// They need our schema, and stock; it is all they share with us. The tables hold afterwards
// what they would hold after our system: orders CONFIRMED, sagas COMPLETED, outbox rows that
// nobody has published.
type Sagas struct {
	db   *sql.DB
	todo []*orderSaga
}

// orderSaga is an order and its saga.
type orderSaga struct {
	order, id string
	command   string // the message its saga awaits
	lines     []line // by SKU, each SKU once: the order in which rows are locked
	total     int64
	payload   []byte // the saga's input, which its commands carry
}

// line is a quantity of one SKU.
type line struct {
	sku      string
	quantity int64
}

// made is how many orders are made in one transaction.
const made = 500

// NewSagas makes an order and a saga of each order.create body. All SKUs must be in stock.
func NewSagas(ctx context.Context, db *sql.DB, bodies [][]byte) (*Sagas, error) {
	s := &Sagas{db: db}
	for part := range slices.Chunk(bodies, made) {
		err := sqltx.WithTx(ctx, db, func(ctx context.Context, tx *sqltx.Tx) error {
			return s.add(ctx, tx, part)
		})
		if err != nil {
			return nil, fmt.Errorf("make %d orders: %w", len(bodies), err)
		}
	}
	return s, nil
}

func (s *Sagas) add(ctx context.Context, tx *sqltx.Tx, bodies [][]byte) error {
	var orders, items, instances []any
	todo := s.todo
	for _, body := range bodies {
		var in struct {
			Customer     string          `json:"customer"`
			Total        int64           `json:"total_cents"`
			PaymentToken string          `json:"payment_token"`
			ShipTo       json.RawMessage `json:"ship_to"`
			Items        []struct {
				SKU      string `json:"sku"`
				Quantity int64  `json:"quantity"`
				Price    int64  `json:"price_cents"`
			} `json:"items"`
		}
		if err := json.Unmarshal(body, &in); err != nil {
			return fmt.Errorf("read an order: %w", err)
		}
		o := &orderSaga{order: newID(), id: newID(), command: newID(), total: in.Total}
		o.payload = fmt.Appendf(nil, `{"id":"%s",%s`, o.order, body[1:])
		orders = append(orders, o.order, newID(), in.Customer, in.Total, in.PaymentToken, []byte(in.ShipTo))
		instances = append(instances, o.id, sagaType, 1, o.order, "RUNNING", o.command, o.payload)
		for i, it := range in.Items {
			items = append(items, o.order, i, it.SKU, it.Quantity, it.Price)
			o.lines = append(o.lines, line{it.SKU, it.Quantity})
		}
		o.lines = sum(o.lines)
		todo = append(todo, o)
	}
	for _, in := range []struct {
		query string
		args  []any
		width int
	}{{insertOrdersSQL, orders, 6}, {insertItemsSQL, items, 5}, {insertInstancesSQL, instances, 7}} {
		if _, err := tx.Exec(ctx, in.query+sqltx.Tuples(len(in.args)/in.width, in.width), in.args...); err != nil {
			return err
		}
	}
	s.todo = todo
	return nil
}

// sum adds up lines of one SKU, sorted.
func sum(lines []line) []line {
	quantities := make(map[string]int64, len(lines))
	for _, l := range lines {
		quantities[l.sku] += l.quantity
	}
	out := make([]line, 0, len(quantities))
	for _, sku := range slices.Sorted(maps.Keys(quantities)) {
		out = append(out, line{sku, quantities[sku]})
	}
	return out
}

func newID() string { return uuid.Must(uuid.NewV7()).String() }

// Ran is how sagas went.
type Ran struct {
	Sagas     int
	Took      time.Duration
	Conflicts int // transactions run again after a deadlock or a lock wait
}

// Rate returns sagas per second.
func (r Ran) Rate() float64 { return float64(r.Sagas) / r.Took.Seconds() }

// Run runs all steps of all sagas: so many sagas in each transaction, so many transactions
// at a time. It can be called once. Only between transactions does ctx end it.
func (s *Sagas) Run(ctx context.Context, connections, size int) (Ran, error) {
	todo := slices.Collect(slices.Chunk(s.todo, size))
	all := make([]*session, min(connections, len(todo)))
	defer func() {
		for _, c := range all {
			if c != nil {
				_ = c.conn.Close() // hands it back to the pool
			}
		}
	}()
	for i := range all {
		var err error
		if all[i], err = open(ctx, s.db); err != nil {
			return Ran{}, err
		}
	}
	var next atomic.Int64
	began := time.Now()
	var g errgroup.Group
	for _, c := range all {
		g.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i >= len(todo) {
					return nil
				}
				for k := range steps {
					if err := c.step(ctx, k, todo[i]); err != nil {
						return err
					}
				}
			}
		})
	}
	err := g.Wait()
	r := Ran{Sagas: len(s.todo), Took: time.Since(began)}
	for _, c := range all {
		r.Conflicts += c.conflicts
	}
	return r, err
}

// Pace begins a saga every so often, one at a time on one connection, and returns how long
// each step's transaction took. It can be called once.
func (s *Sagas) Pace(ctx context.Context, every time.Duration) ([]time.Duration, error) {
	c, err := open(ctx, s.db)
	if err != nil {
		return nil, err
	}
	defer c.conn.Close() //nolint:errcheck // hands it back to the pool
	tick := time.NewTicker(every)
	defer tick.Stop()
	var took []time.Duration
	for _, o := range s.todo {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		for k := range steps {
			began := time.Now()
			if err := c.step(ctx, k, []*orderSaga{o}); err != nil {
				return nil, err
			}
			took = append(took, time.Since(began))
		}
	}
	return took, nil
}

// session is a connection in use.
type session struct {
	conn      *sql.Conn
	conflicts int
}

// open sets the isolation once, where our system sets it in each transaction: a pool does not
// keep its connections for one purpose.
func open(ctx context.Context, db *sql.DB) (*session, error) {
	conn, err := db.Conn(ctx)
	if err == nil {
		_, err = conn.ExecContext(ctx, `SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED`)
	}
	if err != nil {
		return nil, fmt.Errorf("connect to MySQL: %w", err)
	}
	return &session{conn: conn}, nil
}

// step runs step k of sagas in one transaction, again after a conflict.
func (c *session) step(ctx context.Context, k int, sagas []*orderSaga) error {
	for try := 1; ; try++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := c.once(context.WithoutCancel(ctx), k, sagas)
		if sqltx.Classify(err) != sqltx.Conflict || try == sqltx.MaxTries {
			return err
		}
		c.conflicts++
		if err := sqltx.Pause(ctx, try); err != nil {
			return err
		}
	}
}

func (c *session) once(ctx context.Context, k int, sagas []*orderSaga) error {
	tx, err := c.conn.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("begin transaction: %w", err)
	}
	w := writer{ctx: ctx, tx: tx, step: k, sagas: sagas}
	if w.write(); w.err != nil {
		_ = tx.Rollback() // the error before it says more
		return fmt.Errorf("step %s: %w", steps[k].name, w.err)
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit step %s: %w", steps[k].name, err)
	}
	for i, o := range sagas {
		o.command = w.next[i]
	}
	return nil
}
