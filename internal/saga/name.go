package saga

import (
	"context"
	"encoding/json"
	"fmt"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// name is what those call a saga who do not know its id.
type name struct {
	Type          string `json:"type"`
	CorrelationID string `json:"correlation_id"`
}

// nameIn returns the name in a message's body; the zero one if there is none.
func nameIn(m *message.Message) name {
	var n name
	if json.Unmarshal(m.Body, &n) != nil {
		return name{} // who handles the message says what is wrong with its body
	}
	return n
}

// Served by uq_saga_correlation. It locks nothing: a saga keeps its name and id for ever, and the
// locks are taken afterwards, in the order of the ids.
const selectNamedSQL = `
SELECT type, correlation_id, id
  FROM saga_instances
 WHERE (type, correlation_id) IN (%s)`

// findNamed returns the ids of the sagas with these names, of those that there are.
func findNamed(ctx context.Context, tx *sqltx.Tx, names []name) (map[name]string, error) {
	args := make([]any, 0, 2*len(names))
	for _, n := range names {
		args = append(args, []byte(n.Type), []byte(n.CorrelationID))
	}
	rows, err := tx.Query(ctx, fmt.Sprintf(selectNamedSQL, sqltx.Tuples(len(names), 2)), args...)
	if err != nil {
		return nil, fmt.Errorf("find %d sagas by correlation id: %w", len(names), err)
	}
	defer rows.Close()
	found := map[name]string{}
	for rows.Next() {
		var typ, correlation, id []byte
		if err := rows.Scan(&typ, &correlation, &id); err != nil {
			return nil, fmt.Errorf("find sagas by correlation id: %w", err)
		}
		found[name{string(typ), string(correlation)}] = string(id)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("find sagas by correlation id: %w", err)
	}
	return found, nil
}

// missing says why there is no saga that m is for.
func missing(m *message.Message) string {
	id, n := m.Headers.String(message.HeaderSagaID), nameIn(m)
	switch {
	case id == "" && m.Type == ReplyType:
		return "no x-saga-id header; a reply has that of the command which it answers"
	case id != "" || m.Type != CancelType:
		return fmt.Sprintf("no saga with id %q", id)
	case n.Type == "" || n.CorrelationID == "":
		return `no x-saga-id header; without one the body has to name the saga by "type" and "correlation_id"`
	}
	return fmt.Sprintf("no saga of type %q with correlation id %q", n.Type, n.CorrelationID)
}

// IDOf returns the id of the saga that m is for, by its x-saga-id or by what the body of a message of
// CancelType calls it. "": it says neither. ErrNotFound: there is none of that name.
func IDOf(ctx context.Context, q sqltx.Querier, m *message.Message) (string, error) {
	id, n := m.Headers.String(message.HeaderSagaID), nameIn(m)
	if id != "" || m.Type != CancelType || n.Type == "" || n.CorrelationID == "" {
		return id, nil
	}
	return Find(ctx, q, n.Type, n.CorrelationID)
}
