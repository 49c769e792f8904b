package handlers

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"backstep/internal/message"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
	"backstep/migrations"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// world is a database with stock, and what lanes would hand to the handlers.
type world struct {
	t      *testing.T
	db     *sql.DB
	intake *OrderCreate
	engine *saga.Engine
	taken  uint64 // id of the last outbox row that was looked at
}

func newWorld(t *testing.T) *world {
	t.Helper()
	db, err := sqltx.Open(testenv.Database(t), sqltx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	if _, err := migrations.Up(t.Context(), db, nil); err != nil {
		t.Fatal(err)
	}
	if err := Seed(t.Context(), db, 20, 1_000); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	return &world{t: t, db: db, intake: NewOrderCreate(log), engine: NewEngine(log)}
}

// batch runs one transaction. Every message must be done with; it returns how many statements
// that took, BEGIN and COMMIT not counted.
func (w *world) batch(handle func(context.Context, *sqltx.Tx, []message.Message) []message.Outcome, msgs []message.Message) (statements int) {
	w.t.Helper()
	err := sqltx.WithTx(w.t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		before := questions(w.t, tx)
		for i, o := range handle(ctx, tx, msgs) {
			if o.Kind != message.Done && tx.Err() == nil {
				w.t.Errorf("message %d is %s: %s", i, o.Kind, o.Reason)
			}
		}
		if tx.Err() == nil {
			statements = questions(w.t, tx) - before - 1 // the question itself
		}
		return tx.Err()
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return statements
}

// questions returns how many statements this session has sent.
func questions(t *testing.T, tx *sqltx.Tx) (n int) {
	t.Helper()
	var name string
	if err := tx.QueryRow(t.Context(), `SHOW SESSION STATUS LIKE 'Questions'`, nil, &name, &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// commands returns the commands that were added since they were last asked for.
func (w *world) commands() (msgs []message.Message) {
	w.t.Helper()
	rows, err := w.db.QueryContext(w.t.Context(), `
SELECT id, message_id, headers, payload FROM outbox_events WHERE id > ? AND exchange = 'backstep.commands' ORDER BY id`, w.taken)
	if err != nil {
		w.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var m message.Message
		var id, headers []byte
		if err := rows.Scan(&w.taken, &id, &headers, &m.Body); err != nil {
			w.t.Fatal(err)
		}
		m.MessageID = string(id)
		if m.Headers, err = message.DecodeHeaders(headers); err != nil {
			w.t.Fatal(err)
		}
		msgs = append(msgs, m)
	}
	if err := rows.Err(); err != nil {
		w.t.Fatal(err)
	}
	return msgs
}

// requests makes n messages that ask for orders; change may alter the i-th.
func requests(t *testing.T, n int, change func(i int, o *CreateOrder)) []message.Message {
	t.Helper()
	msgs := make([]message.Message, n)
	for i := range msgs {
		o := CreateOrder{
			Customer: "Ada", PaymentToken: "tok", ShipTo: ShipTo{Country: "DE"}, TotalCents: 3,
			Items: []Item{item(SKU(i%20), 1, 1), item(SKU((i+7)%20), 2, 1)},
		}
		if change != nil {
			change(i, &o)
		}
		body, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		msgs[i] = message.Message{Properties: message.Properties{MessageID: message.NewID(), Type: OrderCreateType}, Body: body}
	}
	return msgs
}

// A batch takes as many statements as one message, whatever its size: that is what makes
// throughput grow with load.
func TestStatementsOfABatch(t *testing.T) {
	for _, size := range []int{1, 8, 32} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			w := newWorld(t)
			got := []int{w.batch(w.intake.HandleBatch, requests(t, size, nil))}
			for range 3 {
				got = append(got, w.batch(w.engine.HandleBatch, w.commands()))
			}
			// intake: SAVEPOINT, orders, lines, sagas, outbox. A step: sagas locked, (SKUs locked, stock
			// read, stock moved), SAVEPOINT, what it inserts or updates, steps, sagas, outbox.
			if want := "[5 8 7 10]"; fmt.Sprint(got) != want {
				t.Errorf("statements of intake and steps: %v, want %s", got, want)
			}
			w.verify(size)
		})
	}
}

// verify demands the invariants and how many orders are confirmed.
func (w *world) verify(confirmed int) {
	w.t.Helper()
	violations, err := Verify(w.t.Context(), w.db)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, v := range violations {
		w.t.Errorf("violated: %s: %s: %s", v.Rule, v.Subject, v.Detail)
	}
	counts, err := Counts(w.t.Context(), w.db)
	if err != nil {
		w.t.Fatal(err)
	}
	if counts["CONFIRMED"] != confirmed {
		w.t.Errorf("%v, want %d confirmed", counts, confirmed)
	}
	w.payments()
}

// payments demands that each payment has its order's key, and that what was charged or refunded was told.
func (w *world) payments() {
	w.t.Helper()
	for what, query := range map[string]string{
		"payments without their order's key": `
SELECT COUNT(*) FROM payments p JOIN saga_instances s ON s.correlation_id = p.order_id
       LEFT JOIN payment_idempotency k ON k.payment_id = p.id AND k.idempotency_key = CONCAT(s.id, ':charge-payment:execute')
 WHERE k.payment_id IS NULL OR p.id = ''`,
		"charges more than were told": `
SELECT (SELECT COUNT(*) FROM saga_steps WHERE name = 'charge-payment' AND result IS NOT NULL) -
       (SELECT COUNT(*) FROM outbox_events WHERE routing_key = 'order.payment_charged')`,
		"refunds more than were told": `
SELECT (SELECT COUNT(*) FROM payments WHERE status = 'REFUNDED') -
       (SELECT COUNT(*) FROM outbox_events WHERE routing_key = 'order.payment_refunded')`,
	} {
		if n := w.sum(query); n != 0 {
			w.t.Errorf("%d %s", n, what)
		}
	}
}

// In one batch: orders that fail for any reason harm no neighbour. The last piece goes to the
// one that came first.
func TestMixedBatch(t *testing.T) {
	w := newWorld(t)
	if _, err := w.db.ExecContext(t.Context(), `UPDATE inventory SET initial = 1, available = 1 WHERE sku = ?`, []byte(SKU(0))); err != nil {
		t.Fatal(err)
	}
	msgs := requests(t, 12, func(i int, o *CreateOrder) {
		o.Items, o.TotalCents = []Item{item(SKU(1+i), 1, 3)}, 3
		switch i {
		case 1, 2: // one piece for two
			o.Items[0].SKU = SKU(0)
		case 4:
			o.Items[0].SKU = "NO-SUCH"
		case 6:
			o.PaymentToken = "decline"
		case 8:
			o.ShipTo.Country = "ZZ"
		case 10: // all or nothing
			o.Items, o.TotalCents = []Item{item(SKU(11), 1, 1), item(SKU(12), 1_001, 1)}, 1_002
		}
	})
	msgs = append(msgs, msgs[3]) // a request that comes again makes no second order
	msgs[len(msgs)-1].MessageID = message.NewID()
	msgs[len(msgs)-1].Headers = message.Headers{message.HeaderRequestID: msgs[3].MessageID}
	w.batch(w.intake.HandleBatch, msgs)
	for commands := w.commands(); len(commands) > 0; commands = w.commands() {
		w.batch(w.engine.HandleBatch, commands)
	}
	w.verify(7)
	for i, want := range []string{
		"CONFIRMED", "CONFIRMED", "not enough stock of SKU-0001: 1 wanted, 0 available", "CONFIRMED", `unknown SKU "NO-SUCH"`, "CONFIRMED",
		"payment declined", "CONFIRMED", "no carrier ships to country ZZ", "CONFIRMED", "not enough stock of SKU-0013: 1001 wanted, 1000 available", "CONFIRMED",
	} {
		var status, reason string
		if err := w.db.QueryRowContext(t.Context(), `SELECT status, COALESCE(reason, '') FROM orders WHERE request_id = ?`,
			[]byte(msgs[i].MessageID)).Scan(&status, &reason); err != nil {
			t.Fatal(err)
		}
		if got := status + " " + reason; !strings.Contains(got, want) {
			t.Errorf("order %d is %s, want %s", i, got, want)
		}
	}
}

// Who asked for an order learns from order.created what it has to name to cancel it.
func TestOrderCreatedNamesItsSaga(t *testing.T) {
	w := newWorld(t)
	msgs := requests(t, 2, nil)
	w.batch(w.intake.HandleBatch, msgs)
	for i := range msgs {
		id, err := SagaOf(t.Context(), w.db, msgs[i].RequestID())
		if err != nil {
			t.Fatal(err)
		}
		var n int
		if err := w.db.QueryRowContext(t.Context(), `
SELECT COUNT(*)
  FROM outbox_events
 WHERE event_type = 'order.created' AND JSON_VALUE(CONVERT(payload USING utf8mb4), '$.saga_id') = ?
   AND JSON_VALUE(CONVERT(payload USING utf8mb4), '$.request_id') = ?`, id, msgs[i].RequestID()).Scan(&n); err != nil || n != 1 {
			t.Errorf("%d events order.created name saga %s and request %s, %v", n, id, msgs[i].RequestID(), err)
		}
	}
}
