package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/trace"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// row is an outbox row on its way through the relay.
type row struct {
	id         uint64
	generation uint32
	shard      int
	epoch      uint64 // of the lease under which it was read; under another it is read anew
	attempts   int
	key        string
	dest       destination
	msg        message.Message
	size       int    // bytes
	fault      string // why it can never be published: it does not decode
	sent       time.Time
	charge     *refusal   // that is to be written
	span       trace.Span // of the publish, while it is in flight
	alone      bool       // it was sent with nothing else in flight, to see whether it is to blame
}

// load is what a row counts in memory: a small one 1, a large one as many small ones.
func (r *row) load() int { return 1 + r.size>>14 }

// destination is where a row goes; refusals hold a destination, not a row.
type destination struct {
	exchange, routingKey string
	mandatory            bool
}

func (d destination) String() string {
	return fmt.Sprintf("exchange %q, routing key %q", d.exchange, d.routingKey)
}

// One look at the end of the primary key, in the same snapshot as the rows, and made to look
// like one of them.
const highestSQL = `
(SELECT COALESCE(MAX(id), 0), 0, ` + noShardSQL + `, 0, '', '', '', '', '', '', 0, '', '', '', NOW(6)
   FROM outbox_events)`

// noShard is the shard of the row that tells the highest id.
const (
	noShard    = 255
	noShardSQL = "255"
)

// One shard's part of a read. Served by ix_outbox_relay (shard, status, id) alone: no
// filesort, no row of another shard or status is looked at. Ids to skip are found in the index
// too; as an expression they are looked up in a list, and do not become a range for each gap.
const (
	selectPendingSQL = `
(SELECT id, generation, shard, attempts, message_id, ordering_key, aggregate_type, aggregate_id,
        exchange, routing_key, mandatory, properties, headers, payload, created_at
   FROM outbox_events FORCE INDEX (ix_outbox_relay)
  WHERE shard = ?
    AND status = 'PENDING'
    AND id > ?
    AND id <= ?`

	skipSQL = `
    AND id + 0 NOT IN (`

	inOrderSQL = `
  ORDER BY id
  LIMIT ?)`
)

// page is one read: of some shards the next rows.
type page []span

// span is a part of a shard's ids.
type span struct {
	shard       int
	after, upTo uint64
	skip        []uint64 // known rows: each would be read again by every pass until its mark is written
	limit       int      // rows
	first       bool     // of a pass
}

// query returns one UNION ALL over the shards; shard IN (…) ORDER BY id would sort.
func (pg page) query() (query string, args []any) {
	var parts []string
	if pg.first() {
		parts = append(parts, highestSQL)
	}
	for _, sp := range pg {
		part := selectPendingSQL
		args = append(args, sp.shard, sp.after, sp.upTo)
		if len(sp.skip) > 0 {
			part += skipSQL + sqltx.Placeholders(len(sp.skip)) + ")"
			for _, id := range sp.skip {
				args = append(args, id)
			}
		}
		parts = append(parts, part+inOrderSQL)
		args = append(args, sp.limit)
	}
	return strings.Join(parts, "\nUNION ALL"), args
}

// first reports whether a pass begins with it.
func (pg page) first() bool {
	return slices.ContainsFunc(pg, func(sp span) bool { return sp.first })
}

// maxPageBytes is where a read stops, however many rows it may bring.
const maxPageBytes = 16 << 20

// found is what a read found.
type found struct {
	rows    map[int][]*row // by shard
	highest uint64         // id there was; unknown if no pass began
	cut     bool           // it stopped early
}

func (pg page) read(ctx context.Context, db *sql.DB) (found, error) {
	f := found{rows: map[int][]*row{}, highest: unknown}
	query, args := pg.query()
	// Closing a result takes in all that is left of it. Of one that is cut that may be gigabytes:
	// then the connection ends with it.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	rs, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return found{}, fmt.Errorf("read pending outbox rows: %w", err)
	}
	defer rs.Close()
	bytes := 0
	var id, key, aggType, aggID, exchange, routingKey, properties, headers sql.RawBytes
	few := repeats{}
	for !f.cut && rs.Next() {
		r := &row{}
		var created time.Time
		if err := rs.Scan(&r.id, &r.generation, &r.shard, &r.attempts, &id, &key, &aggType, &aggID,
			&exchange, &routingKey, &r.dest.mandatory, &properties, &headers, &r.msg.Body, &created); err != nil {
			return found{}, fmt.Errorf("read pending outbox rows: %w", err)
		}
		if r.shard == noShard {
			f.highest = r.id
			continue
		}
		r.key = string(key)
		r.dest.exchange, r.dest.routingKey = few.text(exchange), few.text(routingKey)
		r.decode(properties, headers)
		r.msg.MessageID = string(id)
		r.msg.OrderingKey = r.key
		r.msg.AggregateType, r.msg.AggregateID = few.text(aggType), string(aggID)
		r.msg.Exchange, r.msg.RoutingKey, r.msg.Mandatory = r.dest.exchange, r.dest.routingKey, r.dest.mandatory
		if r.msg.Timestamp.IsZero() {
			r.msg.Timestamp = created // the same in every copy
		}
		r.size = len(r.msg.Body) + len(headers) + len(properties)
		f.rows[r.shard] = append(f.rows[r.shard], r)
		bytes += r.size
		f.cut = bytes > maxPageBytes
	}
	if f.cut {
		cancel()
	} else if err := rs.Err(); err != nil {
		return found{}, fmt.Errorf("read pending outbox rows: %w", err)
	}
	if pg.first() && f.highest == unknown {
		return found{}, errors.New("read pending outbox rows: the highest id is missing")
	}
	return f, nil
}

// repeats are texts of which a read brings the same again and again.
type repeats map[string]string

func (rp repeats) text(b []byte) string {
	s, ok := rp[string(b)] // this conversion makes no copy
	if !ok {
		s = string(b)
		rp[s] = s
	}
	return s
}

// decode fills in properties and headers. A foreign writer may have stored anything: that
// parks this row and no other.
func (r *row) decode(properties, headers []byte) {
	p, err := message.DecodeProperties(properties)
	if err != nil {
		r.fault = err.Error()
		return
	}
	h, err := message.DecodeHeaders(headers)
	if err != nil {
		r.fault = err.Error()
		return
	}
	r.msg.Properties, r.msg.Headers = p, h
}
