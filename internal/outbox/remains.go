package outbox

import (
	"context"
	"fmt"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// Remains is what the tables have of a message to a queue.
type Remains struct {
	Waits   bool // a copy is to be published yet, or stopped at the relay
	Type    string
	Headers message.Headers // nil: nobody of us wrote them
}

// Both parts are served by an index on message_id.
const remainsSQL = `
SELECT message_id, status <> 'PUBLISHED', event_type, headers
  FROM outbox_events
 WHERE exchange = ?
   AND routing_key = ?
   AND message_id IN (%[1]s)
 UNION ALL
SELECT message_id, TRUE, event_type, headers
  FROM scheduled_messages
 WHERE exchange = ?
   AND routing_key = ?
   AND message_id IN (%[1]s)`

// RemainsOf returns what there is of the commands to a queue with these ids, sqltx.MaxIn/2 at most.
func RemainsOf(ctx context.Context, q sqltx.Querier, queue string, ids []string) (map[string]Remains, error) {
	found := map[string]Remains{}
	if len(ids) == 0 {
		return found, nil
	}
	args := append([]any{[]byte(message.CommandsExchange), []byte(queue)}, sqltx.Binary(ids)...)
	rows, err := q.QueryContext(ctx, fmt.Sprintf(remainsSQL, sqltx.Placeholders(len(ids))), append(args, args...)...)
	if err != nil {
		return nil, fmt.Errorf("read what there is of %d messages: %w", len(ids), err)
	}
	defer rows.Close()
	for rows.Next() {
		var id, typ, headers []byte
		var waits bool
		if err := rows.Scan(&id, &waits, &typ, &headers); err != nil {
			return nil, fmt.Errorf("read what there is of %d messages: %w", len(ids), err)
		}
		r := Remains{Waits: waits || found[string(id)].Waits, Type: string(typ)}
		if r.Headers, err = message.DecodeHeaders(headers); err != nil {
			r.Headers = nil
		}
		found[string(id)] = r
	}
	return found, rows.Err()
}
