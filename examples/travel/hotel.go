package travel

import (
	"context"
	"database/sql"

	"backstep/client/participant"
)

const HotelSchema = `CREATE TABLE rooms (hotel VARBINARY(64) PRIMARY KEY, free INT NOT NULL CHECK (free >= 0))`

var Hotel = participant.Step[Trip, Booking]{
	Execute: func(ctx context.Context, tx *sql.Tx, _ participant.Info, t Trip) (Booking, error) {
		_, err := tx.ExecContext(ctx, `UPDATE rooms SET free = free - 1 WHERE hotel = ?`, t.Hotel)
		return Booking{t.Hotel}, err // participant.Refuse("…") would say no for good
	},
	Compensate: func(ctx context.Context, tx *sql.Tx, _ participant.Info, _ Trip, done Booking) error {
		_, err := tx.ExecContext(ctx, `UPDATE rooms SET free = free + 1 WHERE hotel = ?`, done.Item)
		return err
	},
}
