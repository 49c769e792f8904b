package saga

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// A trial drives the engine and the model with the same events, in any order.
type trial struct {
	*world
	m       *model
	id      string
	awaited message.Message // the last command it made
	old     []message.Message
	said    []string
	next    error // what the step that runs returns
	called  error // what the call before it does
	made    int   // calls
}

func (x *trial) say(format string, args ...any) {
	x.said = append(x.said, fmt.Sprintf(format, args...))
}

// collect takes the command that the saga awaits now out of the tables.
func (x *trial) collect() {
	found := x.commands()
	taken := x.taken
	found = append(found, x.read(`SELECT id, message_id, ordering_key, exchange, routing_key, mandatory, properties, headers, payload
FROM scheduled_messages ORDER BY id`)...)
	x.exec(`DELETE FROM scheduled_messages`)
	x.taken = taken
	for _, m := range found {
		if x.awaited.MessageID != "" {
			x.old = append(x.old, x.awaited)
		}
		x.awaited = m
	}
}

// give delivers what the saga awaits, after its call if one is made, or the reply to it.
func (x *trial) give(called, err error) {
	if !x.m.awaits {
		return
	}
	m := x.awaited
	if x.m.step().remote {
		m = answer(m, replyOf(err))
	}
	x.called, x.next = called, err
	if o := x.deliver(m)[0]; o.Kind == message.Outside {
		m.Answer = o.Call(x.t.Context())
		x.deliver(m)
	}
	x.m.turn(called, err)
}

func replyOf(err error) string {
	switch {
	case IsPermanent(err):
		return `{"status":"refused","error":"no"}`
	case err != nil:
		return `{"status":"failed","error":"busy"}`
	}
	return `{"status":"completed","result":{"Ref":"R"}}`
}

// die begins the call that the saga awaits, if there is one, and does not end it.
func (x *trial) die() bool {
	if !x.m.awaits || !x.m.callsOut() {
		return false
	}
	x.deliver(x.awaited)
	if x.m.begin() {
		x.made++
	}
	x.collect()
	return true
}

func (x *trial) timeOut() {
	x.pass(x.id, time.Hour)
	x.m.overdue()
}

func (x *trial) cancel() {
	x.deliver(cancelling(x.id, `{"reason":"changed my mind"}`))
	x.m.cancel()
}

// earlier returns a command of an earlier attempt of the remote step that is awaited.
func (x *trial) earlier() (m message.Message, ok bool) {
	for _, old := range x.old {
		if x.m.awaits && x.m.step().remote && old.Headers.String(message.HeaderStep) == x.m.step().name &&
			Direction(old.Headers.String(message.HeaderDirection)) == x.m.dir {
			m, ok = old, true
		}
	}
	return m, ok
}

var modelEvents = []struct {
	name   string
	weight int
	do     func(x *trial)
}{
	{"success", 8, func(x *trial) { x.give(nil, nil) }},
	{"business failure", 2, func(x *trial) { x.give(nil, Fail("no")) }},
	{"passing failure", 3, func(x *trial) { x.give(nil, errPassing) }},
	{"call refused", 1, func(x *trial) {
		if x.m.callsOut() {
			x.give(Fail("no"), nil)
		}
	}},
	{"call unknown", 2, func(x *trial) {
		if x.m.callsOut() {
			x.give(errPassing, nil)
		}
	}},
	{"worker dies amid the call", 2, func(x *trial) { x.die() }},
	{"cancelled amid the call", 3, func(x *trial) {
		if x.die() {
			x.cancel()
		}
	}},
	{"time-out amid the call", 2, func(x *trial) {
		if x.die() {
			x.timeOut()
		}
	}},
	{"time-out", 2, func(x *trial) { x.timeOut() }},
	{"duplicate and stale", 2, func(x *trial) {
		for _, m := range x.old {
			if s := m.Headers.String(message.HeaderStep); strings.HasPrefix(s, "r") {
				continue // a remote command is not ours
			}
			if o := x.deliver(m)[0]; o.Kind != message.Stale {
				x.t.Errorf("old command: %s %s", o.Kind, o.Reason)
			}
		}
	}},
	{"late reply", 2, func(x *trial) {
		for _, m := range x.old {
			s, d := m.Headers.String(message.HeaderStep), Direction(m.Headers.String(message.HeaderDirection))
			if !strings.HasPrefix(s, "r") || x.m.awaits && s == x.m.step().name && d == x.m.dir {
				continue // the next event
			}
			for _, body := range []string{`{"status":"completed","result":{"Ref":"late"}}`, `{"status":"refused","error":"late"}`, `{"status":"failed"}`} {
				if o := x.deliver(answer(m, body))[0]; o.Kind != message.Stale {
					x.t.Errorf("late reply: %s %s", o.Kind, o.Reason)
				}
			}
		}
	}},
	{"reply to an earlier attempt", 3, func(x *trial) {
		// To the participant all attempts are one; that it failed is only news of the last, and a
		// refusal none of what an operator has asked for since.
		m, ok := x.earlier()
		if !ok {
			return
		}
		n := len(x.said) % 3
		err := []error{nil, Fail("no"), errPassing}[n]
		o := x.deliver(answer(m, replyOf(err)))[0]
		if news := n == 0 || n == 1 && m.Attempt() >= x.m.retried; news != (o.Kind == message.Done) {
			x.t.Errorf("reply of an earlier attempt: %s %s", o.Kind, o.Reason)
		} else if news {
			x.m.turn(nil, err)
		}
	}},
	{"cancel", 1, func(x *trial) { x.cancel() }},
	{"operator: retry", 2, func(x *trial) {
		if x.m.status == ManualAction {
			x.operate(Operation{Verb: VerbRetry})
			x.m.retry()
		}
	}},
	{"operator: skip", 1, func(x *trial) {
		if x.m.status != Completed && x.m.status != Compensated {
			x.operate(Operation{Verb: VerbSkip, Step: x.m.step().name, Direction: x.m.dir})
			x.m.skip()
		}
	}},
	{"operator: compensate", 1, func(x *trial) {
		x.operate(Operation{Verb: VerbCompensate})
		if x.m.status == Completed {
			x.m.reverse()
		} else {
			x.m.cancel()
		}
	}},
	{"operator: resolve", 1, func(x *trial) {
		as := []Status{Completed, Compensated}[len(x.said)%2]
		x.operate(Operation{Verb: VerbResolve, As: as})
		if x.m.status == ManualAction {
			x.m.end(as)
		}
	}},
	{"parked", 1, func(x *trial) {
		if x.awaited.MessageID != "" {
			x.park(x.awaited, "poison")
			x.m.park()
		}
	}},
}

// operate does an operation, twice: the second time changes nothing. It may be refused.
func (x *trial) operate(op Operation) {
	op.By = outbox.Operator{Actor: "somebody", Reason: "because"}
	eff, err := x.engine.Operate(x.t.Context(), x.db, x.id, op)
	if _, refused := errors.AsType[*RefusedError](err); err != nil && !refused {
		x.t.Error(err)
	}
	if op.Verb == VerbRetry || op.Verb == VerbSkip && len(x.m.steps) > 1 {
		return // what they do again is another attempt, or another step
	}
	before := x.get(x.id).UpdatedAt
	again, err := x.engine.Operate(x.t.Context(), x.db, x.id, op)
	if _, refused := errors.AsType[*RefusedError](err); err != nil && !refused || again.Changed {
		x.t.Errorf("%s again: %+v after %+v, %v", op.Verb, again, eff, err)
	}
	equal(x.t, string(op.Verb)+" again changed it at", x.get(x.id).UpdatedAt, before)
}

// seedOf is another one each time. TEST_SEED repeats what has failed.
func seedOf(t *testing.T) uint64 {
	t.Helper()
	given := os.Getenv("TEST_SEED")
	if given == "" {
		return uint64(time.Now().UnixNano())
	}
	seed, err := strconv.ParseUint(given, 10, 64)
	if err != nil {
		t.Fatalf("TEST_SEED: %v", err)
	}
	return seed
}

// Random definitions, random events: the engine and the model agree after each of them.
func TestModel(t *testing.T) {
	t.Parallel()
	const sagas, moves = 150, 16
	seed := seedOf(t)
	random := rand.New(rand.NewPCG(seed, 1)) // the seed is in the failure
	var bag []int
	for i, e := range modelEvents {
		for range e.weight {
			bag = append(bag, i)
		}
	}
	w := newWorld(t)
	for n := range sagas {
		x := newTrial(w, random, fmt.Sprintf("saga %d", n))
		for range moves {
			e := modelEvents[bag[random.IntN(len(bag))]]
			x.say("%s", e.name)
			e.do(x)
			x.m.written()
			x.collect()
			if !x.agrees() {
				t.Fatalf("saga %d of seed %d with %+v, after %s", n, seed, x.m.steps, strings.Join(x.said, ", "))
			}
		}
	}
}

// newTrial makes a definition of one to four steps, in the one database of all trials.
func newTrial(w *world, random *rand.Rand, name string) *trial {
	x := &trial{world: w}
	coin := func() bool { return random.IntN(2) == 0 }
	count := 1 + random.IntN(4)
	pivot := random.IntN(2 * count) // half of the definitions have none
	var steps []modelStep
	var parts []Part[trip]
	for i := range count {
		s := modelStep{remote: random.IntN(3) == 0, pivot: i == pivot, behind: i > pivot, attempts: 1 + random.IntN(3)}
		s.undoable = coin() && !s.behind
		s.calls, s.undoCalls, s.limited = !s.remote && random.IntN(3) > 0, !s.remote && s.undoable && coin(), !s.remote && coin()
		s.name = fmt.Sprintf("%s%d", map[bool]string{true: "r", false: "l"}[s.remote], i)
		steps = append(steps, s)
		parts = append(parts, x.part(s))
	}
	within := coin()
	if within {
		parts = append(parts, Within[trip](time.Minute))
	}
	x.def, x.m = Define("trip", 1, parts...), newModel(steps, within)
	x.engine = NewEngine(slog.New(slog.DiscardHandler), x.def)
	x.id = x.start(name)
	x.collect()
	return x
}

// part is a step that does what the trial says.
func (x *trial) part(s modelStep) Part[trip] {
	options := []StepOption{Retry(s.attempts, 1)}
	if s.pivot {
		options = append(options, Pivot())
	}
	if s.remote {
		if !s.undoable {
			options = append(options, NothingToUndo())
		}
		return RemoteStep[trip, booking](s.name, Queue(s.name), append(options, Deadline(time.Minute))...)
	}
	call := func() (string, error) { x.made++; return "receipt", x.called }
	if s.calls {
		options = append(options, Prepare(func(context.Context, Info, trip) (string, error) { return call() }))
	}
	if s.undoCalls {
		options = append(options, PrepareCompensation(func(context.Context, Info, trip, booking) (string, error) { return call() }))
	}
	if s.limited {
		options = append(options, Deadline(time.Minute))
	}
	var undo func(ctx context.Context, tx *sqltx.Tx, in trip, done booking) error
	if s.undoable {
		undo = func(context.Context, *sqltx.Tx, trip, booking) error { return x.next }
	}
	return Step(s.name, Queue(s.name), func(context.Context, *sqltx.Tx, trip) (booking, error) { return booking{Ref: s.name}, x.next }, undo, options...)
}

// agrees compares the database with the model.
func (x *trial) agrees() bool {
	d := x.get(x.id)
	var errs []error
	check := func(what string, got, want any) {
		if got != want {
			errs = append(errs, fmt.Errorf("%s: %v, want %v", what, got, want))
		}
	}
	check("status", d.Status, x.m.status)
	check("awaits", d.CommandID != "", x.m.awaits)
	check("call is open", d.CallOpen, x.m.open)
	check("calls", x.made, x.m.made)
	check("has a deadline", !d.DeadlineAt.IsZero(), x.m.due)
	if x.m.awaits {
		check("direction", d.Direction, x.m.dir)
		check("step", x.m.steps[d.CurrentStep].name, x.m.step().name)
		check("attempt", d.Attempt, x.m.attempt)
		check("command", d.CommandID, x.awaited.MessageID)
	}
	for i, want := range x.m.rows {
		got := StepPending
		if k := slices.IndexFunc(d.Steps, func(s StepState) bool { return s.Order == i }); k >= 0 {
			got = d.Steps[k].Status
		}
		check("step "+x.m.steps[i].name, got, want)
	}
	if (x.m.status == Completed || x.m.status == Compensated) == d.FinishedAt.IsZero() {
		errs = append(errs, errors.New("finished_at does not fit"))
	}
	for _, err := range errs {
		x.t.Error(err)
	}
	return len(errs) == 0
}
