package handlers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

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
	sums := quantities{}
	for _, it := range items {
		sums[it.SKU] += it.Quantity
	}
	lines := make([]Reserved, 0, len(sums))
	for _, sku := range slices.Sorted(maps.Keys(sums)) {
		lines = append(lines, Reserved{SKU: sku, Quantity: sums[sku]})
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

// lockSKUs locks rows in the order of skus, which is sorted.
func lockSKUs(ctx context.Context, tx *sqltx.Tx, skus []string) error {
	for some := range slices.Chunk(skus, sqltx.MaxIn) {
		if err := lockSome(ctx, tx, some); err != nil {
			return err
		}
	}
	return nil
}

func lockSome(ctx context.Context, tx *sqltx.Tx, skus []string) error {
	rows, err := tx.Query(ctx, fmt.Sprintf(lockSKUsSQL, sqltx.Placeholders(len(skus))), sqltx.Binary(skus)...)
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

// quantities are pieces by SKU.
type quantities map[string]int64

// column of inventory.
type column string

const (
	available column = "available"
	reserved  column = "reserved"
	shipped   column = "shipped"
)

const selectStockSQL = `SELECT sku, %s FROM inventory WHERE sku IN (%s)`

// stock returns how much there is in a column, of the SKUs that are known. The engine has
// locked their rows.
func stock(ctx context.Context, tx *sqltx.Tx, in column, skus []string) (quantities, error) {
	found := quantities{}
	for some := range slices.Chunk(skus, sqltx.MaxIn) {
		if err := found.read(ctx, tx, in, some); err != nil {
			return nil, fmt.Errorf("read stock of %d SKUs: %w", len(some), err)
		}
	}
	return found, nil
}

func (q quantities) read(ctx context.Context, tx *sqltx.Tx, in column, skus []string) error {
	rows, err := tx.Query(ctx, fmt.Sprintf(selectStockSQL, in, sqltx.Placeholders(len(skus))), sqltx.Binary(skus)...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var sku []byte
		var n int64
		if err := rows.Scan(&sku, &n); err != nil {
			return err
		}
		q[string(sku)] = n
	}
	return rows.Err()
}

// take takes the lines of one order, all or none. It returns the first line of which there is
// too little, and how much there is.
func (q quantities) take(lines []Reserved) (short *Reserved, have int64) {
	for i, l := range lines {
		if q[l.SKU] < l.Quantity {
			return &lines[i], q[l.SKU]
		}
	}
	for _, l := range lines {
		q[l.SKU] -= l.Quantity
	}
	return nil, 0
}

// One statement for all SKUs. STRAIGHT_JOIN: the values come first, each finds its row by
// primary key, already locked.
const (
	moveStockSQL = `
UPDATE (%s) v
       STRAIGHT_JOIN inventory i ON i.sku = v.sku
   SET i.%[2]s = i.%[2]s - v.n, i.%[3]s = i.%[3]s + v.n`

	firstMoveSQL = `SELECT ? AS sku, ? AS n`
	moreMovesSQL = ` UNION ALL SELECT ?, ?`
)

// moveStock moves pieces from one column to the other.
func moveStock(ctx context.Context, tx *sqltx.Tx, from, to column, moved quantities) error {
	if len(moved) == 0 {
		return nil
	}
	args := make([]any, 0, 2*len(moved))
	for _, sku := range slices.Sorted(maps.Keys(moved)) {
		args = append(args, []byte(sku), moved[sku])
	}
	values := firstMoveSQL + strings.Repeat(moreMovesSQL, len(moved)-1)
	res, err := tx.Exec(ctx, fmt.Sprintf(moveStockSQL, values, from, to), args...)
	if err != nil {
		return fmt.Errorf("move %d SKUs from %s to %s: %w", len(moved), from, to, err)
	}
	n, err := res.RowsAffected()
	if err == nil && n != int64(len(moved)) {
		err = fmt.Errorf("%w: %d changed", errUnchanged, n)
	}
	if err != nil {
		return fmt.Errorf("move %d SKUs from %s to %s: %w", len(moved), from, to, err)
	}
	return nil
}

// transfer moves the lines of many orders from one column to the other, as far as there is
// enough; refuse is told of an order for which there is not, in the order they came.
func transfer[R any](
	ctx context.Context, tx *sqltx.Tx, from, to column, calls []*saga.Call[Order, R],
	linesOf func(c *saga.Call[Order, R]) []Reserved, refuse func(c *saga.Call[Order, R], short Reserved, have int64, known bool),
) error {
	skus := map[string]bool{}
	lines := make([][]Reserved, len(calls))
	for i, c := range calls {
		lines[i] = linesOf(c)
		for _, l := range lines[i] {
			skus[l.SKU] = true
		}
	}
	if len(skus) == 0 {
		return nil
	}
	left, err := stock(ctx, tx, from, slices.Collect(maps.Keys(skus)))
	if err != nil {
		return err
	}
	moved := quantities{}
	for i, c := range calls {
		if short, have := left.take(lines[i]); short != nil {
			_, known := left[short.SKU]
			refuse(c, *short, have, known)
			continue
		}
		for _, l := range lines[i] {
			moved[l.SKU] += l.Quantity
		}
	}
	return moveStock(ctx, tx, from, to, moved)
}

// reserveStock moves every line of each order from available to reserved, all or nothing.
func reserveStock(ctx context.Context, tx *sqltx.Tx, calls []*saga.Call[Order, Reservation]) error {
	err := transfer(ctx, tx, available, reserved, calls,
		func(c *saga.Call[Order, Reservation]) []Reserved {
			c.Result.Lines = sumBySKU(c.In.Items)
			return c.Result.Lines
		},
		func(c *saga.Call[Order, Reservation], short Reserved, have int64, known bool) {
			if !known {
				c.Fail(saga.Fail("unknown SKU %q", short.SKU))
				return
			}
			c.Fail(saga.Fail("not enough stock of %s: %d wanted, %d available", short.SKU, short.Quantity, have))
		})
	for _, c := range calls {
		c.Emit(event("order.stock_reserved", c.In.ID, map[string]any{"lines": c.Result.Lines}))
	}
	return err
}

// releaseStock gives back exactly what was reserved.
func releaseStock(ctx context.Context, tx *sqltx.Tx, calls []*saga.Call[Order, Reservation]) error {
	err := transfer(ctx, tx, reserved, available, calls,
		func(c *saga.Call[Order, Reservation]) []Reserved { return c.Result.Lines },
		func(c *saga.Call[Order, Reservation], short Reserved, have int64, _ bool) {
			c.Fail(saga.Fail("reserved stock of %s is %d, less than the %d to release", short.SKU, have, short.Quantity))
		})
	for _, c := range calls {
		c.Emit(event("order.stock_released", c.In.ID, map[string]any{"lines": c.Result.Lines}))
	}
	return err
}
