package sagatest

import (
	"database/sql"
	"encoding/json"

	"backstep/internal/message"
	"backstep/internal/saga"
)

const (
	selectAddedSQL = `
SELECT id, message_id, exchange, routing_key, properties, headers, payload
  FROM outbox_events
 WHERE id > ?
 ORDER BY id`

	selectDueSQL = `
SELECT id, message_id, exchange, routing_key, properties, headers, payload
  FROM scheduled_messages
 WHERE due_at <= NOW(6)
 ORDER BY due_at, id`

	deleteScheduledSQL = `DELETE FROM scheduled_messages WHERE id = ?`
)

// collect takes what was added to the outbox since it was last called.
func (w *World) collect() {
	w.t.Helper()
	added, ids := w.messages(selectAddedSQL, w.taken)
	for i, m := range added {
		w.taken = ids[i]
		if m.Exchange == message.CommandsExchange && m.Headers.String(message.HeaderSagaID) != "" {
			w.pending = append(w.pending, m)
		} else {
			w.events = append(w.events, m)
		}
	}
}

// release takes what is due from what was to be published later.
func (w *World) release() {
	w.t.Helper()
	due, ids := w.messages(selectDueSQL)
	for i, m := range due {
		w.pending = append(w.pending, m)
		w.Exec(deleteScheduledSQL, ids[i])
	}
}

func (w *World) messages(query string, args ...any) (msgs []message.Message, ids []uint64) {
	w.t.Helper()
	rows, err := w.db.QueryContext(w.t.Context(), query, args...)
	if err != nil {
		w.t.Fatalf("sagatest: read messages: %v", err)
	}
	defer rows.Close()
	for rows.Next() {
		m, id, err := scan(rows)
		if err != nil {
			w.t.Fatalf("sagatest: read message %d: %v", id, err)
		}
		msgs, ids = append(msgs, m), append(ids, id)
	}
	if err := rows.Err(); err != nil {
		w.t.Fatalf("sagatest: read messages: %v", err)
	}
	return msgs, ids
}

func scan(rows *sql.Rows) (m message.Message, rowID uint64, err error) {
	var id, exchange, key, properties, headers []byte
	if err := rows.Scan(&rowID, &id, &exchange, &key, &properties, &headers, &m.Body); err != nil {
		return m, rowID, err
	}
	if m.Properties, err = message.DecodeProperties(properties); err != nil {
		return m, rowID, err
	}
	m.Headers, err = message.DecodeHeaders(headers)
	m.MessageID, m.Exchange, m.RoutingKey = string(id), string(exchange), string(key)
	return m, rowID, err
}

// deliver hands a message to whom it is for, and says what became of it.
func (w *World) deliver(m message.Message) string {
	w.t.Helper()
	if !w.remote(m) {
		return w.engineGets(m)
	}
	w.sent = append(w.sent, m)
	if w.participants[m.RoutingKey] == nil {
		return "nobody answers"
	}
	r := w.answer(m)
	w.pending = append(w.pending, r)
	return said(r)
}

// remote reports whether a message is the command of a step that another service takes part in.
func (w *World) remote(m message.Message) bool { return m.Type != saga.ReplyType && w.step(m).Remote }

const versionSQL = `SELECT version FROM saga_instances WHERE id = ?`

// step returns the step that a command, or a reply, is about. A reply need not say of which version.
func (w *World) step(m message.Message) saga.StepOutline {
	w.t.Helper()
	version := w.Int(versionSQL, []byte(m.Headers.String(message.HeaderSagaID)))
	return w.outline[stepKey{m.Headers.String(message.HeaderSagaType), version, m.Headers.String(message.HeaderStep)}]
}

func quoted(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err) // a text always marshals
	}
	return string(b)
}
