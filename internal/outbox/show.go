package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Detail is an outbox row with all that is known about it.
type Detail struct {
	Item
	Message message.Message // as much of it as decodes
	Fault   string          // why properties or headers do not decode; "": they do
	// RawProperties and RawHeaders are in the typed encoding of docs/messages.md.
	RawProperties, RawHeaders []byte
	Actions                   []Action // what operators did to it

	// Why it waits, if it is PENDING.
	Owner  string        // the relay that owns its shard; "": none
	Silent time.Duration // since the owner's last heartbeat; negative: it has none
	Ahead  *Item         // an earlier pending row with its key: that goes first
	Held   *Item         // a pending row to its destination that the broker refused; may be itself
}

const (
	getWholeSQL = wholeColumnsSQL + `
  FROM outbox_events
 WHERE id = ?`

	// Served by ix_outbox_relay; reads the pending rows of the shard up to the first with the key.
	aheadSQL = itemColumnsSQL + `
  FROM outbox_events FORCE INDEX (ix_outbox_relay)
 WHERE shard = ?
   AND status = 'PENDING'
   AND id < ?
   AND ordering_key = ?
 ORDER BY id
 LIMIT 1`

	// Served by ix_outbox_retention; reads pending rows up to the first that was refused.
	heldSQL = itemColumnsSQL + `
  FROM outbox_events FORCE INDEX (ix_outbox_retention)
 WHERE status = 'PENDING'
   AND exchange = ?
   AND routing_key = ?
   AND attempts > 0
 LIMIT 1`
)

// Get returns a row with all that is known about it, or ErrNoRow.
func Get(ctx context.Context, q sqltx.Querier, id uint64) (Detail, error) {
	var d Detail
	var w whole
	err := d.scan(q.QueryRowContext(ctx, getWholeSQL, id).Scan, w.dest()...)
	if errors.Is(err, sql.ErrNoRows) {
		return Detail{}, fmt.Errorf("%w: %d", ErrNoRow, id)
	}
	if err != nil {
		return Detail{}, fmt.Errorf("read outbox row %d: %w", id, err)
	}
	m, fault := w.message(d.Item)
	d.Message, d.Fault, d.RawProperties, d.RawHeaders = *m, fault, w.properties, w.headers
	if d.Actions, err = Actions(ctx, q, id); err != nil {
		return Detail{}, err
	}
	if d.Status != StatusPending {
		return d, nil
	}
	if err := d.whyItWaits(ctx, q); err != nil {
		return Detail{}, fmt.Errorf("why outbox row %d waits: %w", id, err)
	}
	return d, nil
}

func (d *Detail) whyItWaits(ctx context.Context, q sqltx.Querier) error {
	o, err := ownerOf(ctx, q, d.Shard)
	if err != nil {
		return err
	}
	if o.owner != nil {
		d.Owner, d.Silent = *o.owner, -1
		if o.silent.Valid {
			d.Silent = time.Duration(o.silent.Int64) * time.Microsecond
		}
	}
	if d.Ahead, err = first(ctx, q, aheadSQL, d.Shard, d.ID, []byte(d.Key)); err != nil {
		return err
	}
	d.Held, err = first(ctx, q, heldSQL, []byte(d.Exchange), []byte(d.RoutingKey))
	return err
}

// first returns the row that a query finds, nil if it finds none.
func first(ctx context.Context, q sqltx.Querier, query string, args ...any) (*Item, error) {
	var i Item
	err := i.scan(q.QueryRowContext(ctx, query, args...).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &i, nil
}

// Items returns the rows with these ids that there are.
func Items(ctx context.Context, q sqltx.Querier, ids []uint64) (items []Item, err error) {
	if len(ids) == 0 {
		return nil, nil
	}
	query := itemColumnsSQL + ` FROM outbox_events WHERE id IN (` + sqltx.Placeholders(len(ids)) + `) ORDER BY id`
	err = scan(ctx, q, query, func(rows *sql.Rows) error {
		var i Item
		if err := i.scan(rows.Scan); err != nil {
			return err
		}
		items = append(items, i)
		return nil
	}, anys(ids)...)
	if err != nil {
		return nil, fmt.Errorf("read outbox rows: %w", err)
	}
	return items, nil
}
