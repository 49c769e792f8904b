package inbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// ParkedVerb is something an operator does to a parked message.
type ParkedVerb string

// The verbs. Of a message that is removed without being sent again the audit has the body too.
const (
	ParkedReplay ParkedVerb = "replay"
	ParkedDone   ParkedVerb = "done" // removed by a replay, because it has been processed
	ParkedDrop   ParkedVerb = "drop"
)

// ParkedAction is one thing an operator did to a parked message.
type ParkedAction struct {
	ID      uint64          `json:"id"`
	Queue   string          `json:"queue"`
	Message string          `json:"message_id"`
	Verb    ParkedVerb      `json:"action"`
	Actor   string          `json:"actor"`
	Reason  string          `json:"reason"`
	Record  json.RawMessage `json:"message,omitempty"` // a ParkedRecord
	At      time.Time       `json:"at"`
}

// ParkedRecord is a parked message without its body, for audits and programs.
type ParkedRecord struct {
	ID         string          `json:"id"` // by which it is named
	MessageID  string          `json:"message_id"`
	Queue      string          `json:"queue"`
	Type       string          `json:"type,omitempty"`
	Reason     string          `json:"reason"`
	ParkedAt   time.Time       `json:"parked_at,omitzero"`
	From       string          `json:"from,omitempty"`
	Death      *Death          `json:"death,omitempty"`
	Fault      string          `json:"fault,omitempty"`
	Properties json.RawMessage `json:"properties"` // in the encoding of docs/messages.md
	Headers    json.RawMessage `json:"headers"`
	Bytes      int             `json:"body_bytes"`
}

// Record returns p without its body.
func (p *Parked) Record() ParkedRecord {
	properties, err := message.EncodeProperties(p.Original.Properties)
	if err != nil {
		panic(err) // text always encodes
	}
	headers, err := message.EncodeHeaders(p.Original.Headers)
	if err != nil {
		headers, _ = message.EncodeHeaders(pairs(p.Original.Headers).(message.Headers)) // any text is a value
	}
	return ParkedRecord{
		ID: p.Name(), MessageID: p.Original.MessageID, Queue: p.Queue, Type: p.Original.Type, Reason: p.Reason, ParkedAt: p.At,
		From: p.From, Death: p.Death, Fault: p.Fault, Properties: properties, Headers: headers, Bytes: len(p.Original.Body),
	}
}

// Restore returns the message of a record, with this body.
func (r *ParkedRecord) Restore(body []byte) (Parked, error) {
	p := Parked{Queue: r.Queue, ID: r.ID, Reason: r.Reason, At: r.ParkedAt, From: r.From, Death: r.Death, Fault: r.Fault}
	properties, err := message.DecodeProperties(r.Properties)
	if err != nil {
		return p, fmt.Errorf("record of parked message %q: %w", r.ID, err)
	}
	headers, err := message.DecodeHeaders(r.Headers)
	if err != nil {
		return p, fmt.Errorf("record of parked message %q: %w", r.ID, err)
	}
	if named, ok := unpairs(headers); ok {
		headers = named
	}
	p.Original = message.Message{
		Properties: properties, Headers: headers, Body: body, Exchange: message.CommandsExchange, RoutingKey: r.Queue,
	}
	return p, nil
}

// maxActor is less than the column holds.
const maxActor = 200

// bodyPart is how much of a body one statement carries.
const bodyPart = 1 << 20

const (
	insertParkedActionSQL = `
INSERT INTO parked_actions (queue, message_id, action, actor, reason, message_json)
VALUES (?, ?, ?, ?, ?, ?)`

	insertParkedBodySQL = `INSERT INTO parked_bodies (action_id, part, bytes) VALUES (?, ?, ?)`
)

// Audit writes what is about to be done to p, or has been.
func (p *Parked) Audit(ctx context.Context, tx *sqltx.Tx, verb ParkedVerb, by outbox.Operator) error {
	record, err := json.Marshal(p.Record())
	if err != nil {
		return fmt.Errorf("audit of parked message %q: %w", p.Name(), err)
	}
	res, err := tx.Exec(ctx, insertParkedActionSQL,
		[]byte(p.Queue), []byte(p.Name()), []byte(verb), clipTo(by.Actor, maxActor), clip(by.Reason), record)
	if err != nil {
		return fmt.Errorf("audit of parked message %q: %w", p.Name(), err)
	}
	if verb == ParkedReplay {
		return nil // it is in its queue
	}
	id, err := res.LastInsertId()
	if err != nil {
		return fmt.Errorf("audit of parked message %q: %w", p.Name(), err)
	}
	part := 0
	for bytes := range slices.Chunk(p.Original.Body, bodyPart) {
		if _, err := tx.Exec(ctx, insertParkedBodySQL, id, part, bytes); err != nil {
			return fmt.Errorf("audit of parked message %q, part %d of its body: %w", p.Name(), part, err)
		}
		part++
	}
	return nil
}

const (
	// Served by ix_parked_actions_message.
	selectParkedActionsSQL = `
SELECT id, queue, message_id, action, actor, reason, message_json, created_at
  FROM parked_actions
 WHERE message_id = ?
 ORDER BY id`

	selectParkedBodySQL = `
SELECT bytes
  FROM parked_bodies
 WHERE action_id = ?
 ORDER BY part`
)

// ParkedActions returns what operators did to parked messages of this name, in order.
func ParkedActions(ctx context.Context, q sqltx.Querier, name string) ([]ParkedAction, error) {
	rows, err := q.QueryContext(ctx, selectParkedActionsSQL, []byte(name))
	if err != nil {
		return nil, fmt.Errorf("read parked actions: %w", err)
	}
	defer rows.Close()
	var list []ParkedAction
	for rows.Next() {
		var a ParkedAction
		var queue, id, verb, record []byte
		if err := rows.Scan(&a.ID, &queue, &id, &verb, &a.Actor, &a.Reason, &record, &a.At); err != nil {
			return nil, fmt.Errorf("read parked actions: %w", err)
		}
		a.Queue, a.Message, a.Verb, a.Record = string(queue), string(id), ParkedVerb(verb), record
		list = append(list, a)
	}
	return list, rows.Err()
}

// Kept returns the message that an action removed, as the audit has it.
func (a *ParkedAction) Kept(ctx context.Context, q sqltx.Querier) (Parked, error) {
	var r ParkedRecord
	if err := json.Unmarshal(a.Record, &r); err != nil {
		return Parked{}, fmt.Errorf("record of parked message %q: %w", a.Message, err)
	}
	body, err := keptBody(ctx, q, a.ID)
	if err != nil {
		return Parked{}, fmt.Errorf("read the body of parked message %q: %w", a.Message, err)
	}
	return r.Restore(body)
}

func keptBody(ctx context.Context, q sqltx.Querier, action uint64) (body []byte, err error) {
	rows, err := q.QueryContext(ctx, selectParkedBodySQL, action)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var part sql.RawBytes
		if err := rows.Scan(&part); err != nil {
			return nil, err
		}
		body = append(body, part...)
	}
	return body, rows.Err()
}

// Served by ix_parked_actions_message.
const removedSQL = `
SELECT message_id
  FROM parked_actions
 WHERE queue = ?
   AND action IN ('drop', 'done')
   AND message_id IN (`

// Removed returns which of ids, sqltx.MaxIn at most, operators have taken out of a parked queue for good.
func Removed(ctx context.Context, q sqltx.Querier, queue string, ids []string) (map[string]bool, error) {
	return among(ctx, q, "parked actions", removedSQL, queue, ids)
}
