package travel

import (
	"context"
	"time"

	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

type Trip struct{ Flight, Hotel, Car string }
type Booking struct{ Item string }

const Schema = `CREATE TABLE IF NOT EXISTS stock (item VARBINARY(64) PRIMARY KEY, free INT NOT NULL)`

var BookTrip = saga.Define("book-trip", 1,
	saga.Step("book-flight", "travel", fly, cancel),
	saga.RemoteStep[Trip, Booking]("book-hotel", "hotel", saga.Deadline(10*time.Minute), saga.Retry(3, time.Second)),
	saga.Step("book-car", "travel", drive, cancel),
)

func fly(ctx context.Context, tx *sqltx.Tx, t Trip) (Booking, error)   { return book(ctx, tx, t.Flight) }
func drive(ctx context.Context, tx *sqltx.Tx, t Trip) (Booking, error) { return book(ctx, tx, t.Car) }

func book(ctx context.Context, tx *sqltx.Tx, item string) (Booking, error) {
	res, err := tx.Exec(ctx, `UPDATE stock SET free = free - 1 WHERE item = ? AND free > 0`, item)
	if err != nil {
		return Booking{}, err // it may pass, so the step is tried again
	}
	if n, err := res.RowsAffected(); err != nil || n == 1 {
		return Booking{item}, err
	}
	return Booking{}, saga.Fail("no %s is free", item) // no for good, so the saga is undone
}

func cancel(ctx context.Context, tx *sqltx.Tx, _ Trip, done Booking) error {
	_, err := tx.Exec(ctx, `UPDATE stock SET free = free + 1 WHERE item = ?`, done.Item)
	return err
}
