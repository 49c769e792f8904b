package bench

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"backstep/internal/sqltx"
)

const sagaType = "place-order"

// steps are those of place-order: the queue of its command, and its own rows.
var steps = []struct {
	queue, name string
	work        func(*writer)
}{
	{"inventory", "reserve-stock", (*writer).reserve},
	{"payment", "charge-payment", (*writer).charge},
	{"shipping", "create-shipment", (*writer).ship},
}

// writer writes what one step of some sagas writes, in one statement a table. After an error
// it writes nothing more.
type writer struct {
	ctx   context.Context
	tx    *sql.Tx
	step  int
	sagas []*orderSaga
	err   error

	next []string // the next step's commands; none after the last step
	made []string // payments or shipments
}

func (w *writer) write() {
	for range w.sagas {
		w.made = append(w.made, newID())
		w.next = append(w.next, newID())
	}
	w.record()
	steps[w.step].work(w)
	w.advance()
	w.publish()
}

// exec runs a statement that must write so many rows.
func (w *writer) exec(rows int, query string, args ...any) {
	if w.err != nil {
		return
	}
	res, err := w.tx.ExecContext(w.ctx, query, args...)
	if err != nil {
		w.err = err
		return
	}
	n, err := res.RowsAffected()
	if err == nil && n != int64(rows) {
		err = fmt.Errorf("%d rows written instead of %d by %s", n, rows, query)
	}
	w.err = err
}

// insert writes rows of so many values.
func (w *writer) insert(query string, width int, args []any) {
	n := len(args) / width
	w.exec(n, query+sqltx.Tuples(n, width), args...)
}

func (w *writer) record() {
	var args []any
	for _, o := range w.sagas {
		args = append(args, steps[w.step].queue, o.command)
	}
	w.insert(recordSQL, 2, args)
}

func (w *writer) reserve() { w.move(reserveSQL, reserveAllSQL) }

func (w *writer) charge() {
	var keys, payments []any
	for i, o := range w.sagas {
		keys = append(keys, o.id+":charge-payment:execute", w.made[i])
		payments = append(payments, w.made[i], o.order, o.total, "CHARGED")
	}
	w.insert(insertKeysSQL, 2, keys)
	w.insert(insertPaymentsSQL, 4, payments)
}

func (w *writer) ship() {
	var shipments, orders []any
	for i, o := range w.sagas {
		shipments = append(shipments, w.made[i], o.order, "CREATED")
		orders = append(orders, []byte(o.order))
	}
	w.insert(insertShipmentsSQL, 3, shipments)
	w.move(shipSQL, shipAllSQL)
	w.exec(len(orders), confirmSQL+sqltx.Placeholders(len(orders))+")", orders...)
}

// move moves what the sagas ordered between two columns: one statement for all of it, and
// the simpler one if it is one SKU.
func (w *writer) move(oneSQL, allSQL string) {
	var lines []line
	for _, o := range w.sagas {
		lines = append(lines, o.lines...)
	}
	lines = sum(lines)
	if len(lines) == 1 {
		l := lines[0]
		w.exec(1, oneSQL, l.quantity, l.quantity, []byte(l.sku), l.quantity)
		return
	}
	args := make([]any, 0, 2*len(lines))
	for _, l := range lines {
		args = append(args, []byte(l.sku), l.quantity)
	}
	w.exec(len(lines), fmt.Sprintf(allSQL, lineFirstSQL+strings.Repeat(lineMoreSQL, len(lines)-1)), args...)
}

// advance writes the step's row, and moves the saga on.
func (w *writer) advance() {
	var rows, ids, moves []any
	for i, o := range w.sagas {
		rows = append(rows, o.id, w.step, steps[w.step].name, "COMPLETED", 1, w.result(i))
		ids = append(ids, []byte(o.id))
		moves = append(moves, w.step+1, []byte(w.next[i]), []byte(o.id), []byte(o.command))
	}
	w.insert(insertStepsSQL, 6, rows)
	switch n := len(w.sagas); {
	case w.step == len(steps)-1:
		w.exec(n, finishSQL+sqltx.Placeholders(n)+")", ids...)
	case n == 1:
		w.exec(1, advanceSQL, moves...)
	default:
		w.exec(n, fmt.Sprintf(advanceAllSQL, advanceFirstSQL+strings.Repeat(advanceMoreSQL, n-1)), moves...)
	}
}

// publish adds the next commands, and the events, to the outbox.
func (w *writer) publish() {
	var args []any
	for i, o := range w.sagas {
		if w.step+1 < len(steps) {
			args = append(args, o.nextCommand(w.step+1, w.next[i])...)
		}
		for _, e := range w.events(i) {
			args = append(args, o.event(e.name, e.payload)...)
		}
	}
	w.insert(insertOutboxSQL, 11, args)
}

// result is what the step leaves for its compensation.
func (w *writer) result(i int) []byte {
	o := w.sagas[i]
	switch w.step {
	case 0:
		return fmt.Appendf(nil, `{"lines":%s}`, o.reserved())
	case 1:
		return fmt.Appendf(nil, `{"id":"%s","amount_cents":%d}`, w.made[i], o.total)
	default:
		return fmt.Appendf(nil, `{"id":"%s"}`, w.made[i])
	}
}

type event struct {
	name    string
	payload []byte
}

func (w *writer) events(i int) []event {
	o, id := w.sagas[i], w.made[i]
	switch w.step {
	case 0:
		return []event{{"order.stock_reserved", fmt.Appendf(nil, `{"lines":%s,"order_id":"%s"}`, o.reserved(), o.order)}}
	case 1:
		return []event{{"order.payment_charged",
			fmt.Appendf(nil, `{"amount_cents":%d,"order_id":"%s","payment_id":"%s"}`, o.total, o.order, id)}}
	default:
		return []event{
			{"order.shipment_created", fmt.Appendf(nil, `{"order_id":"%s","shipment_id":"%s"}`, o.order, id)},
			{"order.confirmed", fmt.Appendf(nil, `{"order_id":"%s","shipment_id":"%s","total_cents":%d}`, o.order, id, o.total)},
		}
	}
}

// reserved is the order's lines as JSON.
func (o *orderSaga) reserved() []byte {
	b := []byte("[")
	for i, l := range o.lines {
		if i > 0 {
			b = append(b, ',')
		}
		b = fmt.Appendf(b, `{"sku":"%s","quantity":%d}`, l.sku, l.quantity)
	}
	return append(b, ']')
}

// nextCommand is the outbox row of the command of step k.
func (o *orderSaga) nextCommand(k int, id string) []any {
	name := sagaType + "." + steps[k].name
	return []any{
		id, o.id, "saga", o.id, name, "backstep.commands", steps[k].queue, true, properties(id, o.id, name),
		fmt.Appendf(nil, `{"x-attempt":1,"x-direction":"execute","x-ordering-key":"%s","x-request-id":"%s","x-saga-id":"%s",`+
			`"x-saga-type":"%s","x-saga-version":1,"x-step":"%s"}`, o.id, id, o.id, sagaType, steps[k].name),
		o.payload,
	}
}

// event is the outbox row of an event.
func (o *orderSaga) event(name string, payload []byte) []any {
	id := newID()
	return []any{
		id, o.order, "order", o.order, name, "backstep.events", name, false, properties(id, o.order, name),
		fmt.Appendf(nil, `{"x-ordering-key":"%s"}`, o.order), payload,
	}
}

func properties(id, correlation, typ string) []byte {
	return fmt.Appendf(nil, `{"app_id":"backstep","content_type":"application/json","correlation_id":"%s","delivery_mode":2,`+
		`"message_id":"%s","type":"%s"}`, correlation, id, typ)
}
