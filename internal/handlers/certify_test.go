package handlers

import (
	"database/sql"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"backstep/internal/saga"
	"backstep/internal/saga/sagatest"
	"backstep/internal/testenv"
	"backstep/internal/testenv/gateway"
)

// certified is the order of these tests.
var certified = Order{ID: "certified", CreateOrder: CreateOrder{
	Customer: "Ada", PaymentToken: "tok", ShipTo: ShipTo{Country: "DE"}, TotalCents: 7,
	Items: []Item{item(SKU(0), 2, 2), item(SKU(1), 3, 1)},
}}

func openShop(t *testing.T) *sql.DB {
	t.Helper()
	db := sagatest.Open(t, testenv.Database(t))
	if err := Seed(t.Context(), db, 2, 10); err != nil {
		t.Fatal(err)
	}
	return db
}

// stocked makes the order, with nothing done to it yet, the only one.
func stocked(w *sagatest.World) {
	o := certified
	for _, table := range []string{"orders", "order_items", "payments", "payment_idempotency", "shipments"} {
		w.Exec(`DELETE FROM ` + table)
	}
	w.Exec(`UPDATE inventory SET available = initial, reserved = 0, shipped = 0`)
	w.Exec(insertOrdersSQL+`(?, ?, ?, ?, ?, '{}')`, []byte(o.ID), []byte(o.ID), o.Customer, o.TotalCents, o.PaymentToken)
	for i, it := range o.Items {
		w.Exec(insertItemsSQL+`(?, ?, ?, ?, ?)`, []byte(o.ID), i, []byte(it.SKU), it.Quantity, it.PriceCents)
	}
}

// balanced says what is wrong with the books, or with the order.
func balanced(t *testing.T, db *sql.DB, status string) error {
	t.Helper()
	violations, err := Verify(t.Context(), db)
	if err != nil {
		return err
	}
	if len(violations) > 0 {
		return fmt.Errorf("%v", violations)
	}
	counts, err := Counts(t.Context(), db)
	if err == nil && counts[status] != 1 {
		err = fmt.Errorf("there are %v orders, not one %s", counts, status)
	}
	return err
}

var ended = map[saga.Status]string{saga.Completed: "CONFIRMED", saga.Compensated: "CANCELLED"}

// Whatever happens to an order's saga, once or twice, the books are right when it has ended.
func TestPlaceOrderCertified(t *testing.T) {
	t.Parallel()
	db := openShop(t)
	sagatest.Certify(t, db, PlaceOrder, sagatest.Plan{
		Input: certified, Pairs: 40, Setup: stocked,
		Check: func(_ *sagatest.World, s saga.Detail) error { return balanced(t, db, ended[s.Status]) },
	})
}

// The same with a payment gateway, and so are the gateway's books.
func TestPlaceOrderWithGatewayCertified(t *testing.T) {
	t.Parallel()
	db := openShop(t)
	var g *gateway.Gateway
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { g.ServeHTTP(w, r) }))
	t.Cleanup(server.Close)
	client, err := NewGateway(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.client.CloseIdleConnections)
	sagatest.Certify(t, db, placeOrder(client), sagatest.Plan{
		Input: certified, Pairs: 40,
		Setup: func(w *sagatest.World) {
			g = &gateway.Gateway{}
			stocked(w)
		},
		Check: func(_ *sagatest.World, s saga.Detail) error {
			if faults := g.Ledger().Check(map[string]string{certified.ID: ended[s.Status]}); len(faults) > 0 {
				return fmt.Errorf("the gateway says: %v", faults)
			}
			return balanced(t, db, ended[s.Status])
		},
	})
}
