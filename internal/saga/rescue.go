package saga

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
	"backstep/internal/tracing"
)

const (
	maxRescues  = 5    // without progress, until an operator is needed
	openPage    = 500  // sagas that one statement reads
	maxOpen     = 5000 // that one look reads
	rescueBatch = 100  // in one transaction
	goneUnseen  = 10 * time.Minute
)

// Served by ix_saga_status (status, updated_at, and the id behind them), which is forced: no
// filesort. A page goes on where the last one ended, so that sagas which wait for something else
// do not hide those behind them.
const selectOpenSQL = `
SELECT id, type, version, plan, current_step, command_id, rescues, updated_at
  FROM saga_instances FORCE INDEX (ix_saga_status)
 WHERE status = ?
   AND updated_at >= ?
   AND updated_at < ?
   AND (updated_at > ? OR id > ?)
   AND command_id IS NOT NULL
 ORDER BY updated_at, id
 LIMIT ?`

// They are locked. The primary key is forced: a server scans a table that is small.
const countRescueSQL = `
UPDATE saga_instances FORCE INDEX (PRIMARY)
   SET rescues = rescues + 1, updated_at = NOW(6)
 WHERE id IN (%s)`

// fits reports whether a saga is one of a definition that this engine has.
func (e *Engine) fits(w *waiting) bool {
	d := e.defs[w.typ][w.version]
	return d != nil && d.fits(w.plan, w.current)
}

// position is where a look goes on: behind this row of an index.
type position struct {
	at time.Time
	id string
}

// waiting is a saga that awaits a command.
type waiting struct {
	id, typ, plan, command    string
	version, current, rescues int
	updated                   time.Time

	queue string
	where outbox.Whereabouts
}

// absence is a command's from all tables, by the database's clock.
type absence struct{ since, seen time.Time }

// view is what a look goes by.
type view struct {
	pulse
	until map[string]time.Time // by queue: what was published before must have been delivered
	// What has waited since before then is emitted again whatever the queue delivers. Zero: nothing.
	anyway time.Time
}

// rescue looks for commands that were lost on their way: published, not delivered, although what
// was published later was. They are emitted again, with the ids they had. What is merely late, since
// its queue is long, is left alone: it is one more message then, and the queue longer still.
//
// Of the workers that consume a queue one does this. The others take what it leaves for long: it may
// not know the definition. Should two at once, the second finds the row pending.
func (k *Keeper) rescue(ctx context.Context) error {
	if time.Since(k.swept) > forgotten {
		if _, err := k.db.ExecContext(ctx, sweepSQL, int(forgotten.Seconds())); err != nil {
			return fmt.Errorf("sweep consumers: %w", err)
		}
		k.swept = time.Now()
	}
	v, err := k.look(ctx)
	if err != nil || len(v.until) == 0 {
		return err
	}
	maps.DeleteFunc(k.gone, func(_ string, g absence) bool { return v.now.Sub(g.seen) > goneUnseen })
	return errors.Join(k.rescueStatus(ctx, Running, v), k.rescueStatus(ctx, Compensating, v))
}

// look finds out what must have been delivered, of the queues that this process has to look after.
func (k *Keeper) look(ctx context.Context) (v view, err error) {
	if v.pulse, err = readPulse(ctx, k.db); err != nil || !v.fresh() {
		return view{}, err
	}
	all, err := consumers(ctx, k.db)
	if err != nil {
		return view{}, err
	}
	v.until = map[string]time.Time{}
	for queue := range k.cfg.Queues {
		until := passed(all[queue], v.now, k.cfg.RescueAfter)
		switch {
		case first(all[queue]) == k.cfg.Consumer:
		case among(all[queue], k.cfg.Consumer) && !until.IsZero():
			until = until.Add(-2 * k.cfg.RescueAfter)
		default:
			continue
		}
		v.until[queue] = until
	}
	if at := v.now.Add(-k.cfg.RescueAnyway); v.up.Before(at) {
		v.anyway = at
	}
	return v, nil
}

// rescueStatus looks at sagas of one status, the longest unchanged first. A command is published
// later than its saga has changed, so those that changed lately are not even read: behind a mere
// backlog, that is all of them.
func (k *Keeper) rescueStatus(ctx context.Context, status Status, v view) error {
	newest := v.anyway
	for _, u := range v.until {
		if newest.Before(u) {
			newest = u
		}
	}
	for range maxOpen / openPage {
		page, err := k.open(ctx, status, newest)
		if err != nil {
			return err
		}
		if len(page) == openPage {
			last := page[openPage-1]
			k.turns[status] = position{last.updated, last.id}
		} else {
			delete(k.turns, status) // from the beginning
		}
		lost, err := k.lost(ctx, page, v)
		if err != nil {
			return err
		}
		for some := range slices.Chunk(lost, rescueBatch) {
			if err := k.emitAgain(ctx, some, v); err != nil {
				return err
			}
		}
		if len(page) < openPage {
			return nil
		}
	}
	return nil
}

func (k *Keeper) open(ctx context.Context, status Status, before time.Time) (page []*waiting, err error) {
	if before.IsZero() {
		return nil, nil
	}
	from := k.turns[status]
	since := from.at
	if since.IsZero() {
		since = beginning
	}
	rows, err := k.db.QueryContext(ctx, selectOpenSQL, string(status), since, before, since, []byte(from.id), openPage)
	if err != nil {
		return nil, fmt.Errorf("read sagas that wait: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var w waiting
		var id, typ, plan, command []byte
		if err := rows.Scan(&id, &typ, &w.version, &plan, &w.current, &command, &w.rescues, &w.updated); err != nil {
			return nil, fmt.Errorf("read sagas that wait: %w", err)
		}
		w.id, w.typ, w.plan, w.command = string(id), string(typ), string(plan), string(command)
		page = append(page, &w)
	}
	return page, rows.Err()
}

// beginning is before all times that the database gives, and one that it knows.
var beginning = time.Date(1970, 1, 1, 0, 0, 1, 0, time.UTC)

// lost returns those whose commands must have been lost.
func (k *Keeper) lost(ctx context.Context, page []*waiting, v view) ([]*waiting, error) {
	var ours []*waiting
	for _, w := range page {
		if !k.engine.fits(w) {
			continue // not ours to judge
		}
		s := k.engine.stepOf(w.typ, w.version, w.current)
		if s.remote { // of a remote step nobody here knows what became: see askAgain
			continue
		}
		until, ok := v.until[s.queue]
		if w.queue = s.queue; ok && (w.updated.Before(until) || w.updated.Before(v.anyway)) {
			ours = append(ours, w)
		}
	}
	if len(ours) == 0 {
		return nil, nil
	}
	err := sqltx.WithTx(ctx, k.db, func(ctx context.Context, tx *sqltx.Tx) error { return locate(ctx, tx, ours) })
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(ours, func(w *waiting) bool { return !k.isLost(w, v) }), nil
}

// locate finds out where the commands are.
func locate(ctx context.Context, tx *sqltx.Tx, sagas []*waiting) error {
	ids := make([]string, len(sagas))
	for i, w := range sagas {
		ids[i] = w.command
	}
	where, err := outbox.Locate(ctx, tx, ids)
	for _, w := range sagas {
		w.where = where[w.command]
	}
	return err
}

func (k *Keeper) isLost(w *waiting, v view) bool {
	published := w.where.PublishedAt
	if w.where.Waits() {
		delete(k.gone, w.command)
		return false
	}
	if published.IsZero() {
		// Swept, as all rows are at once if they are not kept. It may have been published just
		// before we noticed: a command may wait for its time for long.
		g, known := k.gone[w.command]
		if !known {
			g.since = v.now
		}
		g.seen = v.now
		k.gone[w.command] = g
		published = g.since
	}
	if published.Before(v.until[w.queue]) {
		return true
	}
	if published.Before(v.up) {
		published = v.up
	}
	// Doubled no more often than it can happen.
	return published.Before(v.now.Add(-k.cfg.RescueAnyway << min(w.rescues, maxRescues)))
}

// awaited locks sagas and finds out where their commands are. Nobody can schedule or park a command whose
// saga is locked, or handle it.
func awaited(ctx context.Context, tx *sqltx.Tx, sagas []*waiting) (map[string]*instance, error) {
	ids := make([]string, len(sagas))
	for i, w := range sagas {
		ids[i] = w.id
	}
	instances, err := lockInstances(ctx, tx, sorted(ids))
	if err != nil {
		return nil, err
	}
	return instances, locate(ctx, tx, sagas)
}

// stillLost looks again, now that the saga is locked.
func (k *Keeper) stillLost(w *waiting, in *instance, v view) bool {
	return in != nil && in.commandID == w.command && (in.status == Running || in.status == Compensating) && k.isLost(w, v)
}

// emitAgain emits the commands of some sagas again, unless they are not awaited any more, or on
// their way. A saga whose command was emitted again too often needs an operator.
func (k *Keeper) emitAgain(ctx context.Context, some []*waiting, v view) error {
	var errs []error
	some = slices.DeleteFunc(slices.Clone(some), func(w *waiting) bool {
		if w.rescues < maxRescues {
			return false
		}
		errs = append(errs, k.giveUp(ctx, w, v))
		return true
	})
	if len(some) == 0 {
		return errors.Join(errs...)
	}
	var emitted []*waiting
	err := k.inTx(ctx, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		emitted, err = k.emitAgainTx(ctx, tx, some, v)
		return err
	})
	if err != nil {
		return errors.Join(append(errs, fmt.Errorf("emit %d lost commands again: %w", len(some), err))...)
	}
	for _, w := range some {
		delete(k.gone, w.command)
	}
	for _, w := range emitted {
		k.cfg.Log.Warn("lost command emitted again", "saga_id", w.id, "message_id", w.command, "queue", w.queue, "rescues", w.rescues+1)
	}
	return errors.Join(errs...)
}

// giveUp leaves a saga to an operator whose command was emitted again too often. It is alone in its
// transaction, which calls a hook.
func (k *Keeper) giveUp(ctx context.Context, w *waiting, v view) error {
	err := k.stopping(ctx, func(ctx context.Context, tx *sqltx.Tx, silent bool) error {
		instances, err := awaited(ctx, tx, []*waiting{w})
		in := instances[w.id]
		if err != nil || !k.stillLost(w, in, v) {
			return err
		}
		b := &batch{Engine: k.engine, tx: tx}
		b.find(in) // that its input decodes does not matter
		why := fmt.Sprintf("command %s was emitted to queue %s %d times and never came out of it", w.command, w.queue, w.rescues+1)
		if err := b.stopFor(ctx, in, EvRescuesExhausted, why, silent); err != nil {
			return err
		}
		return b.write(ctx)
	})
	if err != nil {
		return fmt.Errorf("stop saga %s, whose command was lost: %w", w.id, err)
	}
	delete(k.gone, w.command)
	return nil
}

func (k *Keeper) emitAgainTx(ctx context.Context, tx *sqltx.Tx, some []*waiting, v view) (emitted []*waiting, err error) {
	instances, err := awaited(ctx, tx, some)
	if err != nil {
		return nil, err
	}
	some = slices.DeleteFunc(slices.Clone(some), func(w *waiting) bool { return !k.stillLost(w, instances[w.id], v) })
	b := &batch{Engine: k.engine, tx: tx}
	emitted, err = b.emitSame(ctx, instances, some, "not delivered, although its queue has delivered what was published later, or is empty")
	if err != nil || len(emitted) == 0 {
		return nil, err
	}
	args := make([]any, len(emitted))
	for i, w := range emitted {
		args[i] = []byte(w.id)
	}
	if _, err := tx.Exec(ctx, fmt.Sprintf(countRescueSQL, sqltx.Placeholders(len(args))), args...); err != nil {
		return nil, err
	}
	return emitted, b.write(ctx)
}

// emitSame emits the commands that sagas await once more, with the ids they had: their rows are published
// again, or made anew where they are swept. It returns those it did; one whose row its relay or the sweeper
// has just changed is found by the next look.
func (b *batch) emitSame(ctx context.Context, instances map[string]*instance, some []*waiting, why string) (emitted []*waiting, err error) {
	var rows []outbox.Whereabouts
	published := map[string]*waiting{} // by command
	for _, w := range some {
		if !w.where.PublishedAt.IsZero() {
			rows = append(rows, w.where)
			published[w.command] = w
			continue
		}
		in := instances[w.id]
		b.find(in) // that its input decodes does not matter
		m, err := b.sameCommand(ctx, in)
		if err != nil {
			return nil, err
		}
		b.commands, emitted = append(b.commands, m), append(emitted, w)
	}
	sent, err := outbox.Rescue(ctx, b.tx, rows, outbox.Operator{Actor: "worker", Reason: why})
	for _, command := range sent {
		emitted = append(emitted, published[command])
	}
	return emitted, err
}

// sameCommand makes the command that is awaited once more, with the id it had.
func (b *batch) sameCommand(ctx context.Context, in *instance) (message.Message, error) {
	first, err := b.chain(ctx, in)
	if err != nil {
		return message.Message{}, err
	}
	return b.command(tracing.Rejoin(ctx, in.traceID), in, first)
}
