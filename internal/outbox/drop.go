package outbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Dropper deletes rows that must never be sent.
type Dropper struct {
	Operator
	// Parked is Config.Parked: whoever waits for a dropped message is told as for a parked one.
	Parked func(ctx context.Context, tx *sqltx.Tx, m *message.Message, reason string) error
	// Patience is how long the owners of the rows' shards may take to hand them over.
	Patience time.Duration
}

// Fate is what became of a row that was to be dropped.
type Fate struct {
	RowID     uint64 `json:"id"`
	MessageID string `json:"message_id,omitempty"`
	Dropped   bool   `json:"dropped"` // now or before; it is never sent
	Detail    string `json:"detail"`  // why not, or what else there is to say
}

const (
	// The generation stays: if a copy is in flight, its mark makes the row PUBLISHED.
	withdrawSQL = `
UPDATE outbox_events
   SET status = 'PARKED', last_error = ?, next_attempt_at = NULL
 WHERE id = ?
   AND status = 'PENDING'`

	dropSQL = `
DELETE FROM outbox_events
 WHERE id = ?
   AND status = 'PARKED'`
)

// Drop drops rows. PARKED ones are deleted. Of PENDING ones a relay may have any in memory or
// in flight, so they are withdrawn, their shards recalled, and then those deleted that were
// not published in the meantime (docs/adr/0004). A row that is withdrawn and not deleted yet
// is PARKED; dropping it again goes on from there. The error is of the database; what became
// of the rows before it is in the fates.
func (d Dropper) Drop(ctx context.Context, db *sql.DB, ids []uint64) ([]Fate, error) {
	shards := map[int]error{} // to be recalled; what came of it
	states := make([]dropState, len(ids))
	for i, id := range ids {
		if err := d.withdraw(ctx, db, id, &states[i]); err != nil {
			return nil, fmt.Errorf("withdraw outbox row %d: %w", id, err)
		}
		if states[i].known {
			shards[states[i].shard] = nil
		}
	}
	if err := d.recallAll(ctx, db, shards); err != nil {
		return nil, fmt.Errorf("recall the shards of withdrawn outbox rows: %w", err)
	}
	var fates []Fate
	for i, id := range ids {
		s := &states[i]
		if err := shards[s.shard]; s.known && err != nil {
			s.fate.Detail = fmt.Sprintf("not dropped yet, but PARKED, so that no relay reads it any more: %v; it may have it in flight", err)
		} else if s.fate.Detail == "" {
			if err := d.delete(ctx, db, id, s); err != nil {
				return fates, fmt.Errorf("drop outbox row %d: %w", id, err)
			}
		}
		fates = append(fates, s.fate)
	}
	return fates, nil
}

// dropState is a row on its way out.
type dropState struct {
	shard int
	known bool // a relay may have it in memory or in flight
	fate  Fate // decided when it has a detail
}

// withdraw is the first step.
func (d Dropper) withdraw(ctx context.Context, db *sql.DB, id uint64, s *dropState) error {
	return sqltx.WithTx(ctx, db, func(ctx context.Context, tx *sqltx.Tx) error {
		*s = dropState{fate: Fate{RowID: id}}
		i, whole, err := lockWhole(ctx, tx, id)
		last, actor, aerr := lastAction(ctx, tx, id)
		switch {
		case errors.Is(err, ErrNoRow) && aerr == nil:
			s.fate.Dropped, s.fate.Detail = gone(last, actor)
			return nil
		case err != nil || aerr != nil:
			return errors.Join(err, aerr)
		}
		s.shard, s.fate.MessageID = i.Shard, i.MessageID
		switch i.Status {
		case StatusPublished:
			s.fate.Detail = "it is PUBLISHED: what was sent cannot be taken back"
			return nil
		case StatusParked:
			s.known = last == actionWithdraw // by a drop that did not come to its end
			return nil
		}
		s.known = true
		reason := words(fmt.Sprintf("withdrawn by %s, to be dropped: %s", d.Actor, d.Reason))
		if _, err := tx.Exec(ctx, withdrawSQL, reason, id); err != nil {
			return err
		}
		if err := d.record(ctx, tx, actionWithdraw, []Item{i}, itself); err != nil {
			return err
		}
		m, _ := whole.message(i) // what does not decode is nobody's command
		return d.Parked(ctx, tx, m, reason)
	})
}

// gone says what is known of a row that is not there.
func gone(last, actor string) (dropped bool, detail string) {
	switch last {
	case actionDrop:
		return true, "dropped before, by " + actor
	case "":
		return false, "there is no such row"
	}
	return false, "it was published and has been deleted since"
}

// recallAll recalls the shards, waits until they are handed over, and notes those that are not.
func (d Dropper) recallAll(ctx context.Context, db *sql.DB, shards map[int]error) error {
	waiting := map[int]ownership{}
	for shard := range shards {
		was, err := recall(ctx, db, shard)
		if err != nil {
			return err
		}
		waiting[shard] = was
	}
	patience := time.NewTimer(d.Patience)
	defer patience.Stop()
	tick := time.NewTicker(recallLook)
	defer tick.Stop()
	for {
		for shard, was := range waiting {
			is, err := ownerOf(ctx, db, shard)
			if err != nil {
				return err
			}
			if was.over(is) {
				delete(waiting, shard)
			}
		}
		if len(waiting) == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-patience.C:
			for shard, was := range waiting {
				shards[shard] = fmt.Errorf("shard %d is owned by %s, and was not handed over within %s", shard, was, d.Patience)
			}
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// delete is the last step.
func (d Dropper) delete(ctx context.Context, db *sql.DB, id uint64, s *dropState) error {
	return sqltx.WithTx(ctx, db, func(ctx context.Context, tx *sqltx.Tx) error {
		s.fate.Dropped, s.fate.Detail = false, ""
		i, whole, err := lockWhole(ctx, tx, id)
		if errors.Is(err, ErrNoRow) {
			last, actor, err := lastAction(ctx, tx, id)
			s.fate.Dropped, s.fate.Detail = gone(last, actor)
			return err
		}
		if err != nil {
			return err
		}
		switch i.Status {
		case StatusPublished:
			s.fate.Detail = "it was in flight: the broker has confirmed it, so it is PUBLISHED and was not dropped"
			return nil
		case StatusPending:
			s.fate.Detail = "somebody has requeued it meanwhile; it was not dropped"
			return nil
		}
		if err := d.record(ctx, tx, actionDrop, []Item{i}, func(Item) any { return whole.keep(i) }); err != nil {
			return err
		}
		m, _ := whole.message(i)
		if err := d.Parked(ctx, tx, m, words(fmt.Sprintf("dropped by %s: %s", d.Actor, d.Reason))); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, dropSQL, id); err != nil {
			return err
		}
		s.fate.Dropped, s.fate.Detail = true, "dropped"
		return nil
	})
}

// whole is what an Item leaves out of a row.
type whole struct {
	aggregateType, aggregateID, idempotencyKey []byte
	properties, headers, payload               []byte
}

const (
	wholeColumnsSQL = itemColumnsSQL + `,
       aggregate_type, aggregate_id, idempotency_key, properties, headers, payload`

	lockWholeSQL = wholeColumnsSQL + `
  FROM outbox_events
 WHERE id = ?
   FOR UPDATE`
)

func (w *whole) dest() []any {
	return []any{&w.aggregateType, &w.aggregateID, &w.idempotencyKey, &w.properties, &w.headers, &w.payload}
}

// lockWhole returns a row with all it has, locked, or ErrNoRow.
func lockWhole(ctx context.Context, tx *sqltx.Tx, id uint64) (i Item, w whole, err error) {
	err = i.scan(func(dest ...any) error { return tx.QueryRow(ctx, lockWholeSQL, []any{id}, dest...) }, w.dest()...)
	if errors.Is(err, sql.ErrNoRows) {
		err = fmt.Errorf("%w: %d", ErrNoRow, id)
	}
	return i, w, err
}

// message returns the row's message, with as much of it as decodes, as the relay does, and
// why the rest does not.
func (w *whole) message(i Item) (m *message.Message, fault string) {
	var r row
	r.decode(w.properties, w.headers)
	m = &r.msg
	m.MessageID, m.OrderingKey, m.Body = i.MessageID, i.Key, w.payload
	m.AggregateType, m.AggregateID = string(w.aggregateType), string(w.aggregateID)
	m.Exchange, m.RoutingKey, m.Mandatory = i.Exchange, i.RoutingKey, i.Mandatory
	return m, r.fault
}

// keep returns all of a row for its audit, so that one dropped by mistake can be added again.
func (w *whole) keep(i Item) any {
	return struct {
		Item
		AggregateType  string          `json:"aggregate_type,omitempty"`
		AggregateID    string          `json:"aggregate_id,omitempty"`
		IdempotencyKey string          `json:"idempotency_key,omitempty"`
		Properties     json.RawMessage `json:"properties"`
		Headers        json.RawMessage `json:"headers"`
		Payload        []byte          `json:"payload"` // base64
	}{i, string(w.aggregateType), string(w.aggregateID), string(w.idempotencyKey), rawJSON(w.properties), rawJSON(w.headers), w.payload}
}

// rawJSON returns b as it is, or as a JSON text if somebody put something else there.
func rawJSON(b []byte) json.RawMessage {
	if json.Valid(b) {
		return b
	}
	text, err := json.Marshal(string(b))
	if err != nil {
		panic(err) // of a string: never
	}
	return text
}
