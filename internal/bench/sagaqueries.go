package bench

// What is made beforehand.
const (
	insertOrdersSQL = `
INSERT INTO orders (id, request_id, customer, total_cents, payment_token, ship_to)
VALUES `

	insertItemsSQL = `INSERT INTO order_items (order_id, line, sku, quantity, price_cents) VALUES `

	insertInstancesSQL = `
INSERT INTO saga_instances (id, type, version, correlation_id, status, command_id, payload)
VALUES `
)

// What each step writes.
const (
	recordSQL = `INSERT INTO inbox_messages (consumer, message_id) VALUES `

	insertStepsSQL = `
INSERT INTO saga_steps (saga_id, step_order, name, status, attempts, result)
VALUES `

	insertOutboxSQL = `
INSERT INTO outbox_events
       (message_id, ordering_key, aggregate_type, aggregate_id, event_type,
        exchange, routing_key, mandatory, properties, headers, payload)
VALUES `

	// The saga's row is guarded by the command it awaits, as it must be if commands may come
	// twice.
	advanceSQL = `
UPDATE saga_instances
   SET current_step = ?, command_id = ?, awaited_since = NOW(6), updated_at = NOW(6)
 WHERE id = ?
   AND command_id = ?`

	advanceAllSQL = `
UPDATE (%s) v
       STRAIGHT_JOIN saga_instances i ON i.id = v.id
   SET i.current_step = v.step, i.command_id = v.command, i.awaited_since = NOW(6), i.updated_at = NOW(6)
 WHERE i.command_id = v.was`

	advanceFirstSQL = `SELECT ? AS step, ? AS command, ? AS id, ? AS was`
	advanceMoreSQL  = ` UNION ALL SELECT ?, ?, ?, ?`

	finishSQL = `
UPDATE saga_instances
   SET status = 'COMPLETED', command_id = NULL, awaited_since = NULL, finished_at = NOW(6), updated_at = NOW(6)
 WHERE status = 'RUNNING'
   AND id IN (`
)

// The work itself. STRAIGHT_JOIN: the values come first, sorted, so the rows are locked in
// their order.
const (
	reserveSQL = `
UPDATE inventory
   SET available = available - ?, reserved = reserved + ?
 WHERE sku = ?
   AND available >= ?`

	reserveAllSQL = `
UPDATE (%s) v
       STRAIGHT_JOIN inventory i ON i.sku = v.sku
   SET i.available = i.available - v.quantity, i.reserved = i.reserved + v.quantity
 WHERE i.available >= v.quantity`

	insertKeysSQL     = `INSERT INTO payment_idempotency (idempotency_key, payment_id) VALUES `
	insertPaymentsSQL = `INSERT INTO payments (id, order_id, amount_cents, status) VALUES `

	insertShipmentsSQL = `INSERT INTO shipments (id, order_id, status) VALUES `

	shipSQL = `
UPDATE inventory
   SET reserved = reserved - ?, shipped = shipped + ?
 WHERE sku = ?
   AND reserved >= ?`

	shipAllSQL = `
UPDATE (%s) v
       STRAIGHT_JOIN inventory i ON i.sku = v.sku
   SET i.reserved = i.reserved - v.quantity, i.shipped = i.shipped + v.quantity
 WHERE i.reserved >= v.quantity`

	lineFirstSQL = `SELECT ? AS sku, ? AS quantity`
	lineMoreSQL  = ` UNION ALL SELECT ?, ?`

	confirmSQL = `
UPDATE orders
   SET status = 'CONFIRMED', updated_at = NOW(6)
 WHERE status = 'PENDING'
   AND id IN (`
)
