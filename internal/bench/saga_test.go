package bench

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
	"backstep/migrations"
)

// newDatabase returns a pool on a database with our schema and so many SKUs in stock.
func newDatabase(t *testing.T, skus int) *sql.DB {
	t.Helper()
	db, err := sqltx.Open(testenv.Database(t), sqltx.Config{MaxOpen: 32})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	if _, err := migrations.Up(t.Context(), db, nil); err != nil {
		t.Fatal(err)
	}
	if err := handlers.Seed(t.Context(), db, skus, 1000); err != nil {
		t.Fatal(err)
	}
	return db
}

// order is an order.create body over so many SKUs, with a repeated one among its lines.
func order(n, skus int) []byte {
	sku := func(i int) string { return handlers.SKU((n + i) % skus) }
	return fmt.Appendf(nil, `{"customer":"Zoë %d","items":[{"sku":"%s","quantity":2,"price_cents":100},`+
		`{"sku":"%s","quantity":1,"price_cents":50},{"sku":"%s","quantity":1,"price_cents":100}],"total_cents":350,`+
		`"payment_token":"tok-%d","ship_to":{"name":"Zoë","street":"s","city":"c","country":"DE"}}`,
		n, sku(1), sku(0), sku(1), n)
}

func orders(n, skus int) [][]byte {
	list := make([][]byte, n)
	for i := range list {
		list[i] = order(i, skus)
	}
	return list
}

// TestSagas demands, of each way to run them, the rows that our system leaves of sagas that
// went well, and its invariants.
func TestSagas(t *testing.T) {
	for _, tt := range []struct {
		name              string
		n, skus           int
		connections, size int
	}{
		{"one in a transaction", 70, 20, 32, 1},
		{"32 in a transaction", 230, 20, 8, 32},
		{"one SKU, one in a transaction", 60, 1, 32, 1},
		{"one SKU, 32 in a transaction", 230, 1, 8, 32},
	} {
		t.Run(tt.name, func(t *testing.T) {
			db := newDatabase(t, tt.skus)
			s, err := NewSagas(t.Context(), db, orders(tt.n, tt.skus))
			if err != nil {
				t.Fatal(err)
			}
			r, err := s.Run(t.Context(), tt.connections, tt.size)
			if err != nil {
				t.Fatal(err)
			}
			if r.Sagas != tt.n || r.Took <= 0 || r.Rate() <= 0 {
				t.Errorf("ran %+v, want %d sagas", r, tt.n)
			}
			wantRows(t, db, tt.n)
		})
	}
}

func TestSagasAtAPace(t *testing.T) {
	db := newDatabase(t, 20)
	s, err := NewSagas(t.Context(), db, orders(5, 20))
	if err != nil {
		t.Fatal(err)
	}
	took, err := s.Pace(t.Context(), 5*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if len(took) != 15 || Quantile(took, 0.001) <= 0 {
		t.Errorf("step transactions took %v, want 15 times", took)
	}
	wantRows(t, db, 5)
}

// wantRows demands what n sagas leave.
func wantRows(t *testing.T, db *sql.DB, n int) {
	t.Helper()
	for _, tt := range []struct {
		what, query string
		want        int
	}{
		{"confirmed orders", `SELECT COUNT(*) FROM orders WHERE status = 'CONFIRMED'`, n},
		{"ended sagas", `SELECT COUNT(*) FROM saga_instances WHERE status = 'COMPLETED' AND current_step = 2 AND command_id IS NULL AND finished_at IS NOT NULL`, n},
		{"steps", `SELECT COUNT(*) FROM saga_steps WHERE status = 'COMPLETED' AND result IS NOT NULL`, 3 * n},
		{"inbox rows", `SELECT COUNT(*) FROM inbox_messages`, 3 * n},
		{"inbox rows of commands in the outbox", `
SELECT COUNT(*)
  FROM inbox_messages i
  JOIN outbox_events e ON e.message_id = i.message_id AND e.routing_key = i.consumer`, 2 * n},
		{"commands", `SELECT COUNT(*) FROM outbox_events WHERE exchange = 'backstep.commands' AND mandatory`, 2 * n},
		{"events", `SELECT COUNT(DISTINCT aggregate_id, event_type) FROM outbox_events WHERE exchange = 'backstep.events'`, 4 * n},
		{"payments", `SELECT COUNT(*) FROM payments WHERE status = 'CHARGED'`, n},
		{"shipments", `SELECT COUNT(*) FROM shipments WHERE status = 'CREATED'`, n},
		{"pieces shipped", `SELECT SUM(shipped) FROM inventory`, 4 * n},
	} {
		var got int
		if err := db.QueryRowContext(t.Context(), tt.query).Scan(&got); err != nil {
			t.Fatalf("%s: %v", tt.what, err)
		}
		if got != tt.want {
			t.Errorf("%d %s, want %d", got, tt.what, tt.want)
		}
	}
	for _, verify := range []func(context.Context, sqltx.Querier) ([]sqltx.Violation, error){handlers.Verify, saga.Verify} {
		violations, err := verify(t.Context(), db)
		if err != nil {
			t.Fatal(err)
		}
		if len(violations) > 0 {
			t.Errorf("violations: %v", violations)
		}
	}
}
