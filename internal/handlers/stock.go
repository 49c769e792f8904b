package handlers

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"

	"backstep/internal/outbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// Reservation is what reserve-stock took, and release-stock gives back.
type Reservation struct {
	Lines []Reserved `json:"lines"`
}

// Reserved is a quantity of one SKU.
type Reserved struct {
	SKU      string `json:"sku"`
	Quantity int64  `json:"quantity"`
}

// sumBySKU adds up lines of one SKU, sorted: the order in which rows are locked.
func sumBySKU(items []Item) []Reserved {
	var lines []Reserved
	for _, sku := range skusOf(Order{CreateOrder: CreateOrder{Items: items}}) {
		line := Reserved{SKU: sku}
		for _, it := range items {
			if it.SKU == sku {
				line.Quantity += it.Quantity
			}
		}
		lines = append(lines, line)
	}
	return lines
}

func skusOf(o Order) []string {
	skus := make([]string, len(o.Items))
	for i, it := range o.Items {
		skus[i] = it.SKU
	}
	slices.Sort(skus)
	return slices.Compact(skus)
}

// Served by the primary key; the locks are taken in its order.
const lockSKUsSQL = `
SELECT sku
  FROM inventory
 WHERE sku IN (%s)
 ORDER BY sku
   FOR UPDATE`

func lockSKUs(ctx context.Context, tx *sqltx.Tx, skus []string) error {
	args := make([]any, len(skus))
	for i, s := range skus {
		args[i] = []byte(s)
	}
	rows, err := tx.Query(ctx, fmt.Sprintf(lockSKUsSQL, sqltx.Placeholders(len(skus))), args...)
	if err != nil {
		return fmt.Errorf("lock %d SKUs: %w", len(skus), err)
	}
	defer rows.Close()
	for rows.Next() {
		var sku []byte
		if err := rows.Scan(&sku); err != nil {
			return fmt.Errorf("lock SKUs: %w", err)
		}
	}
	return rows.Err()
}

const (
	reserveSQL = `
UPDATE inventory
   SET available = available - ?, reserved = reserved + ?
 WHERE sku = ?
   AND available >= ?`

	releaseSQL = `
UPDATE inventory
   SET available = available + ?, reserved = reserved - ?
 WHERE sku = ?
   AND reserved >= ?`

	shipSQL = `
UPDATE inventory
   SET reserved = reserved - ?, shipped = shipped + ?
 WHERE sku = ?
   AND reserved >= ?`

	unshipSQL = `
UPDATE inventory
   SET shipped = shipped - ?, reserved = reserved + ?
 WHERE sku = ?
   AND shipped >= ?`

	selectAvailableSQL = `SELECT available FROM inventory WHERE sku = ?`
)

// moveStock moves one line between two columns; false if there is too little to move.
func moveStock(ctx context.Context, tx *sqltx.Tx, query string, l Reserved) (bool, error) {
	res, err := tx.Exec(ctx, query, l.Quantity, l.Quantity, []byte(l.SKU), l.Quantity)
	if err != nil {
		return false, fmt.Errorf("move stock of %q: %w", l.SKU, err)
	}
	n, err := res.RowsAffected()
	return n == 1, err
}

// reserveStock moves every line of the order from available to reserved, all or nothing.
// The engine has locked the SKUs of the whole batch in sorted order before it is called.
func reserveStock(ctx context.Context, tx *sqltx.Tx, o Order) (Reservation, error) {
	r := Reservation{Lines: sumBySKU(o.Items)}
	for _, l := range r.Lines {
		ok, err := moveStock(ctx, tx, reserveSQL, l)
		if err != nil {
			return Reservation{}, err
		}
		if !ok {
			return Reservation{}, shortage(ctx, tx, l)
		}
	}
	return r, outbox.Add(ctx, tx, event("order.stock_reserved", o.ID, map[string]any{"lines": r.Lines}))
}

// shortage says whether a SKU is unknown or there is too little of it.
func shortage(ctx context.Context, tx *sqltx.Tx, l Reserved) error {
	var available int64
	err := tx.QueryRow(ctx, selectAvailableSQL, []any{[]byte(l.SKU)}, &available)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return saga.Fail("unknown SKU %q", l.SKU)
	case err != nil:
		return fmt.Errorf("read stock of %q: %w", l.SKU, err)
	}
	return saga.Fail("not enough stock of %s: %d wanted, %d available", l.SKU, l.Quantity, available)
}

// releaseStock gives back exactly what was reserved.
func releaseStock(ctx context.Context, tx *sqltx.Tx, o Order, done Reservation) error {
	for _, l := range done.Lines {
		ok, err := moveStock(ctx, tx, releaseSQL, l)
		if err != nil {
			return err
		}
		if !ok {
			return saga.Fail("reserved stock of %s is less than the %d to release", l.SKU, l.Quantity)
		}
	}
	return outbox.Add(ctx, tx, event("order.stock_released", o.ID, map[string]any{"lines": done.Lines}))
}
