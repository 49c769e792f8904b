package saga

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// chaos is a saga whose messages come in any order, late, again or not at all, some of them together. Its hooks
// fail, its workers die amid calls, and operators do what they may. Participants keep their contract.
type chaos struct {
	*world
	random   *rand.Rand
	odds     int
	calm     bool // nothing fails any more
	away     bool // what hooks need
	busy     bool // participants
	ended    bool // as it was last looked at
	byHand   bool // a person has left something out, or ended it
	id       string
	steps    []modelStep
	truth    map[string]*truth     // by step
	rows     map[string]StepStatus // of the steps, as they were last
	pool     []message.Message     // on their way
	sent     []message.Message     // to participants, ever
	parked   []message.Message
	recorded map[string]bool // by message
	said     []string
	faults   []string
}

func (x *chaos) say(format string, args ...any) {
	x.said = append(x.said, fmt.Sprintf(format, args...))
}
func (x *chaos) wrong(format string, args ...any) {
	x.faults = append(x.faults, fmt.Sprintf(format, args...))
}

func (x *chaos) sayWhat(what string, m message.Message) {
	x.say("%s %s %s %s attempt %d", what, m.Type, m.Headers.String(message.HeaderDirection), m.Headers.String(message.HeaderStep), m.Attempt())
}

// look looks at the steps: what is known to be done stays so.
func (x *chaos) look() {
	var all string
	x.must(x.db.QueryRowContext(x.t.Context(), `SELECT CONCAT_WS(' ', i.status, GROUP_CONCAT(s.name, ' ', s.status SEPARATOR ' '))
  FROM saga_instances AS i LEFT JOIN saga_steps AS s ON s.saga_id = i.id WHERE i.id = ? GROUP BY i.id`, []byte(x.id)).Scan(&all))
	words := strings.Fields(all)
	x.ended = words[0] == string(Completed) || words[0] == string(Compensated)
	for pair := range slices.Chunk(words[1:], 2) {
		was, is := x.rows[pair[0]], StepStatus(pair[1])
		undone := was == StepCompleted && (is == StepCompensating || is == StepCompensated || is == StepSkipped)
		if was != is && !undone && (was == StepCompleted || was == StepCompensated) {
			x.wrong("step %s was %s and is %s", pair[0], was, is)
		}
		x.rows[pair[0]] = is
	}
}

// collect takes out of the tables what was added.
func (x *chaos) collect() {
	x.look()
	x.pool = append(x.pool, x.commands()...)
	x.exec(publishSQL)
	if x.calm || x.random.IntN(3) == 0 { // else what waits for its time waits
		x.due()
	}
}

// due takes what waits for its time.
func (x *chaos) due() {
	taken := x.taken
	x.pool = append(x.pool, x.read(`SELECT id, message_id, ordering_key, exchange, routing_key, mandatory, properties, headers, payload
FROM scheduled_messages ORDER BY id`)...)
	x.exec(`DELETE FROM scheduled_messages`)
	x.taken = taken
}

// elses reports whether a message is a command to a participant.
func elses(m message.Message) bool {
	return m.Exchange == message.CommandsExchange && strings.HasPrefix(m.RoutingKey, "r") && m.Type != ReplyType
}

// handle is what a lane does with a message, or a participant.
func (x *chaos) handle(m message.Message) {
	if elses(m) {
		x.sent = append(x.sent, m)
		if r := x.participate(m); x.calm || x.random.IntN(6) > 0 { // else it is lost
			x.pool = append(x.pool, r)
		}
		return
	}
	if x.recorded[m.MessageID] {
		return
	}
	m.Failure = ""
	out, err := x.try(m)
	if err != nil {
		m.Failure = err.Error()
		if out, err = x.try(m); err != nil {
			out = []message.Outcome{message.Park("%s", m.Failure)}
		}
	}
	x.became(m, out[0])
}

// became does what a lane does then.
func (x *chaos) became(m message.Message, o message.Outcome) {
	x.say("  %s %s", o.Kind, o.Reason)
	x.look()
	m.Answer = nil
	switch o.Kind {
	case message.Outside:
		answer := o.Call(x.t.Context())
		if !x.calm && x.random.IntN(3) == 0 { // the worker dies, and the message comes back
			x.pool = append(x.pool, m)
			return
		}
		m.Answer = answer
		x.collect()
		if !x.calm && x.random.IntN(3) == 0 {
			x.event()
		}
		x.handle(m)
	case message.Deferred:
		if o.Counter != "" && x.random.IntN(3) == 0 {
			m.Headers[o.Counter] = handleFor.String()
		}
		x.pool = append(x.pool, m)
	case message.Parked:
		if err := x.tryPark(m, o.Reason); err != nil {
			x.pool = append(x.pool, m)
			return
		}
		delete(m.Headers, message.HeaderUnhandledFor)
		x.parked = append(x.parked, m)
	default:
		x.recorded[m.MessageID] = true
	}
}

// deliver delivers one of those that are on their way.
func (x *chaos) deliver(i int) {
	m := x.pool[i]
	x.pool = slices.Delete(x.pool, i, i+1)
	x.sayWhat("deliver", m)
	x.handle(m)
}

// cross has a later attempt overtake an earlier one, on the way to the participant and on the way back, when
// hooks may fail for a while.
func (x *chaos) cross() {
	if !slices.ContainsFunc(x.pool, elses) {
		return
	}
	x.timeOut()
	x.collect()
	x.due()
	x.away, x.busy = x.random.IntN(2) == 0, x.random.IntN(2) == 0
	defer func() { x.away, x.busy = false, false }()
	for _, there := range []bool{true, false} {
		for i := len(x.pool) - 1; i >= 0; i-- {
			if m := x.pool[i]; elses(m) == there && (there || m.Type == ReplyType) {
				x.deliver(i)
				x.busy = false
			}
		}
	}
}

// together delivers some of ours in one batch.
func (x *chaos) together() {
	var some []message.Message
	x.random.Shuffle(len(x.pool), func(i, k int) { x.pool[i], x.pool[k] = x.pool[k], x.pool[i] })
	x.pool = slices.DeleteFunc(x.pool, func(m message.Message) bool {
		twice := slices.ContainsFunc(some, func(s message.Message) bool { return s.MessageID == m.MessageID })
		if elses(m) || len(some) == 4 || x.recorded[m.MessageID] || twice {
			return false
		}
		m.Failure, m.Answer = "", nil
		some = append(some, m)
		x.sayWhat("together", m)
		return true
	})
	if len(some) == 0 {
		return
	}
	out, err := x.try(some...)
	for i, m := range some {
		if err != nil {
			x.handle(m) // alone
		} else {
			x.became(m, out[i])
		}
	}
}

// operate does what an operator asks for, which may be refused.
func (x *chaos) operate(op Operation) {
	d := x.get(x.id)
	op.By, op.Step, op.Direction = ops, x.steps[d.CurrentStep].name, d.Direction
	eff, err := x.engine.Operate(x.t.Context(), x.db, x.id, op)
	x.say("operator %s %s: %s %v", op.Verb, op.As, eff.Detail, err)
	x.byHand = x.byHand || (op.Verb == VerbSkip || op.Verb == VerbResolve) && eff.Changed
}

// event is something that happens.
func (x *chaos) event() {
	switch n := x.random.IntN(40); {
	case n < 17 && len(x.pool) > 0:
		x.deliver(x.random.IntN(len(x.pool)))
	case n < 22:
		x.together()
	case n < 26:
		x.cross()
	case n < 31 && len(x.sent) > 0:
		x.pool = append(x.pool, x.sent[x.random.IntN(len(x.sent))])
		x.sayWhat("once more", x.pool[len(x.pool)-1])
	case n == 31:
		x.timeOut()
	case n < 34:
		x.replay()
	case n < 37:
		x.operate(Operation{Verb: VerbRetry})
	case n == 37:
		x.say("cancel")
		x.pool = append(x.pool, cancelling(x.id, `{"reason":"changed my mind"}`))
	case n == 38:
		x.operate(Operation{Verb: []Verb{VerbCancel, VerbCompensate}[x.random.IntN(2)]})
	case x.random.IntN(3) == 0: // seldom: then less is known of what is to be there in the end
		x.operate(Operation{Verb: []Verb{VerbSkip, VerbResolve}[x.random.IntN(2)], As: []Status{Completed, Compensated}[x.random.IntN(2)]})
	}
	x.collect()
}

// timeOut has every deadline pass.
func (x *chaos) timeOut() {
	x.say("time passes")
	x.exec(`INSERT INTO saga_pulse (id, beat_at, up_since, downtime_us) VALUES (1, NOW(6), NOW(6), -120000000)
    ON DUPLICATE KEY UPDATE downtime_us = downtime_us - 120000000`)
	end := func(f func(ctx context.Context, tx *sqltx.Tx) error) error {
		return sqltx.WithTx(x.t.Context(), x.db, f)
	}
	if err := end(func(ctx context.Context, tx *sqltx.Tx) error { return x.engine.deadlinePassed(ctx, tx, []string{x.id}) }); err != nil {
		x.say("  %v", err)
		x.must(end(func(ctx context.Context, tx *sqltx.Tx) error { return x.engine.endFailed(ctx, tx, x.id, err, false) }))
	}
}

func (x *chaos) replay() {
	if len(x.parked) > 0 {
		x.sayWhat("replay", x.parked[0])
		x.pool, x.parked = append(x.pool, x.parked[0]), x.parked[1:]
	}
}

// settle lets the saga come to its end, and then all that was ever sent to participants come once more.
func (x *chaos) settle() {
	x.calm = true
	x.say("calm")
	for range 60 {
		for x.collect(); len(x.pool) > 0; x.collect() {
			x.deliver(x.random.IntN(len(x.pool)))
		}
		switch status := x.get(x.id).Status; {
		case len(x.parked) > 0:
			x.replay()
		case status == Completed || status == Compensated:
			for _, m := range x.sent {
				x.participate(m)
			}
			return
		case status == ManualAction:
			x.operate(Operation{Verb: VerbRetry})
		default:
			x.timeOut()
		}
	}
	x.wrong("it does not end: %+v", x.get(x.id).Summary)
}

// check compares what has happened with how the saga has ended.
func (x *chaos) check() {
	d := x.get(x.id)
	for _, s := range x.steps {
		count := func(what string) int {
			return x.number(`SELECT COUNT(*) FROM effects WHERE what = ?`, []byte(x.id+what+s.name))
		}
		did, undid, there := count("+"), count("-"), x.truth[s.name]
		out, done, undone := s.remote || s.calls, d.Status == Completed && !x.byHand, d.Status == Compensated && !x.byHand
		for what, wrong := range map[string]bool{
			"twice":                   there.effects < 0 || there.effects > 1 || did > 1 || undid > 1,
			"its effect is not there": done && (!s.remote && did-undid != 1 || out && there.effects != 1),
			"it is not undone":        undone && s.undoable && (out && there.effects != 0 || !out && did != undid),
			"its pivot has happened":  undone && s.pivot && !s.undoable && (there.effects != 0 || did > undid),
		} {
			if wrong {
				x.wrong("step %s of a saga that is %s: %s (it did %d and undid %d, elsewhere %+v)", s.name, d.Status, what, did, undid, *there)
			}
		}
	}
}

// Whatever happens, in whatever order: the saga ends, what it did at its participants, at the systems that it calls
// and here is what its end says, once, and what is known to be done stays so.
func TestChaos(t *testing.T) {
	t.Parallel()
	const sagas = 80
	seed := seedOf(t)
	w := newWorld(t)
	ends := map[Status]int{}
	for n := range sagas {
		w.exec(`DELETE FROM scheduled_messages`)
		w.exec(`DELETE FROM saga_pulse`)
		random := rand.New(rand.NewPCG(seed, uint64(n)))
		x := newChaos(w, random, fmt.Sprintf("saga %d", n))
		for range 30 {
			if x.event(); x.ended && random.IntN(3) == 0 {
				break
			}
		}
		x.settle()
		x.check()
		if len(x.faults) > 0 {
			t.Fatalf("saga %d of seed %d with %+v:\n%s\nafter\n%s", n, seed, x.steps, strings.Join(x.faults, "\n"), strings.Join(x.said, "\n"))
		}
		ends[x.get(x.id).Status]++
	}
	if ends[Completed] < sagas/10 || ends[Compensated] < sagas/10 {
		t.Errorf("they end %v: that says little", ends)
	}
}
