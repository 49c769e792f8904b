package handlers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// CreateOrder is the body of order.create. Money is in cents.
type CreateOrder struct {
	Customer     string `json:"customer"`
	Items        []Item `json:"items"`
	TotalCents   int64  `json:"total_cents"`   // must be the sum of the lines
	PaymentToken string `json:"payment_token"` // one that starts with "decline" is declined
	ShipTo       ShipTo `json:"ship_to"`       // country ZZ is refused
}

// Item is one line of an order. Lines of one SKU are added up.
type Item struct {
	SKU        string `json:"sku"`
	Quantity   int64  `json:"quantity"`
	PriceCents int64  `json:"price_cents"`
}

// ShipTo is where an order goes.
type ShipTo struct {
	Name    string `json:"name"`
	Street  string `json:"street"`
	City    string `json:"city"`
	Country string `json:"country"` // two letters
}

// Order is what the saga's steps receive: the order as it was stored.
type Order struct {
	ID string `json:"id"`
	CreateOrder
}

// Limits of one order: what the columns hold, what a transaction should lock, and what keeps
// the saga's commands, which carry the order as JSON, under the workers' limit of 256 KiB even
// if every byte of a SKU is escaped.
const (
	maxLines = 500
	maxSKU   = 64
	maxText  = 255
)

// decode reads an order.create body. The error says in words what is wrong with it.
func decode(body []byte) (CreateOrder, error) {
	var o CreateOrder
	if !utf8.Valid(body) {
		return o, errors.New("body is not valid UTF-8")
	}
	if err := json.Unmarshal(body, &o); err != nil {
		return o, fmt.Errorf("body does not decode: %w", err)
	}
	return o, o.validate()
}

// validate says all that is wrong with the order at once, so that whoever sent it need not
// find out one fault after the other.
func (o *CreateOrder) validate() error {
	var f faults
	switch {
	case len(o.Items) == 0:
		f.add("the order has no lines")
	case len(o.Items) > maxLines:
		f.add("the order has %d lines; %d is the limit", len(o.Items), maxLines)
	}
	for _, field := range []struct{ name, value string }{
		{"customer", o.Customer}, {"payment_token", o.PaymentToken},
		{"ship_to.name", o.ShipTo.Name}, {"ship_to.street", o.ShipTo.Street},
		{"ship_to.city", o.ShipTo.City}, {"ship_to.country", o.ShipTo.Country},
	} {
		if utf8.RuneCountInString(field.value) > maxText {
			f.add("%s has more than %d characters", field.name, maxText)
		}
	}
	for i, it := range o.Items {
		switch {
		case strings.TrimSpace(it.SKU) == "":
			f.add("line %d has a blank SKU", i+1)
		case len(it.SKU) > maxSKU:
			f.add("line %d has a SKU of %d bytes; %d is the limit", i+1, len(it.SKU), maxSKU)
		}
		if it.Quantity <= 0 {
			f.add("line %d has quantity %d", i+1, it.Quantity)
		}
		if it.PriceCents <= 0 {
			f.add("line %d has price %d", i+1, it.PriceCents)
		}
	}
	if f.n == 0 { // of lines with faults there is no sum
		f.addSum(o)
	}
	return f.err()
}

// addSum adds what is wrong with the order's sums.
func (f *faults) addSum(o *CreateOrder) {
	var total int64
	quantities := make(map[string]int64, len(o.Items))
	for i, it := range o.Items {
		switch {
		case it.PriceCents > math.MaxInt64/it.Quantity:
			f.add("line %d overflows: %d × %d", i+1, it.Quantity, it.PriceCents)
			return
		case total > math.MaxInt64-it.Quantity*it.PriceCents:
			f.add("the total overflows at line %d", i+1)
			return
		case quantities[it.SKU] > math.MaxInt64-it.Quantity:
			f.add("the quantity of %s overflows at line %d", it.SKU, i+1)
			return
		}
		total += it.Quantity * it.PriceCents
		quantities[it.SKU] += it.Quantity
	}
	if total != o.TotalCents {
		f.add("total_cents is %d but the lines add up to %d", o.TotalCents, total)
	}
}

// faults are what is wrong with an order. Of very many, some are counted only.
type faults struct {
	said []string
	n    int
}

const maxFaults = 10

func (f *faults) add(format string, args ...any) {
	if f.n++; f.n <= maxFaults {
		f.said = append(f.said, fmt.Sprintf(format, args...))
	}
}

func (f *faults) err() error {
	if f.n > maxFaults {
		f.said = append(f.said, fmt.Sprintf("and %d more", f.n-maxFaults))
	}
	if f.n == 0 {
		return nil
	}
	return errors.New(strings.Join(f.said, "; "))
}

// event makes a domain event about an order. Its key is the order: events of one order
// arrive in the order they happened.
func event(name, orderID string, fields map[string]any) message.Message {
	fields["order_id"] = orderID
	body, err := json.Marshal(fields)
	if err != nil {
		panic(err) // maps of plain values always marshal
	}
	return message.Message{
		Properties: message.Properties{MessageID: message.NewID(), Type: name, CorrelationID: orderID},
		Body:       body,
		Exchange:   message.EventsExchange, RoutingKey: name,
		OrderingKey: orderID, AggregateType: "order", AggregateID: orderID,
	}
}

const (
	insertOrdersSQL = `INSERT INTO orders (id, request_id, customer, total_cents, payment_token, ship_to) VALUES `

	insertItemsSQL = `INSERT INTO order_items (order_id, line, sku, quantity, price_cents) VALUES `

	setOrderStatusSQL = `
UPDATE orders
   SET status = ?, reason = ?, updated_at = NOW(6)
 WHERE id = ?`
)

func insertOrders(ctx context.Context, tx *sqltx.Tx, requests []request) error {
	orders := sqltx.Insert{Head: insertOrdersSQL, Tuple: sqltx.Tuples(1, 6)}
	items := sqltx.Insert{Head: insertItemsSQL, Tuple: sqltx.Tuples(1, 5)}
	for _, r := range requests {
		o := r.order
		shipTo, err := json.Marshal(o.ShipTo)
		if err != nil {
			return fmt.Errorf("insert order: %w", err)
		}
		orders.Append([]byte(o.ID), []byte(r.message.RequestID()), o.Customer, o.TotalCents, o.PaymentToken, shipTo)
		for i, it := range o.Items {
			items.Append([]byte(o.ID), i, []byte(it.SKU), it.Quantity, it.PriceCents)
		}
	}
	if err := orders.Exec(ctx, tx); err != nil {
		return fmt.Errorf("insert %d orders: %w", len(requests), err)
	}
	if err := items.Exec(ctx, tx); err != nil {
		return fmt.Errorf("insert lines of %d orders: %w", len(requests), err)
	}
	return nil
}

// setStatus sets an order's status; an empty reason is stored as none.
func setStatus(ctx context.Context, tx *sqltx.Tx, orderID, status, reason string) error {
	var why any
	if reason != "" {
		why = strings.ToValidUTF8(reason, "\uFFFD")
	}
	res, err := tx.Exec(ctx, setOrderStatusSQL, status, why, []byte(orderID))
	if err != nil {
		return fmt.Errorf("set order %s to %s: %w", orderID, status, err)
	}
	n, err := res.RowsAffected()
	if err == nil && n != 1 {
		err = fmt.Errorf("%d orders have this id", n)
	}
	if err != nil {
		return fmt.Errorf("set order %s to %s: %w", orderID, status, err)
	}
	return nil
}
