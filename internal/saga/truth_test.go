package saga

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// truth is what has really happened of a step at its participant, or at the system that it calls.
type truth struct {
	state   StepStatus // "": nothing; FAILED: it was refused
	refused string     // the command that was
	effects int
}

// luck is the error that something fails with now, nil mostly. Once all is calm nothing fails.
func (x *chaos) luck(permanent bool) error {
	if x.calm {
		return nil
	}
	switch n := x.random.IntN(x.odds); {
	case n == 0 && permanent:
		return Fail("no")
	case n < 3:
		return errPassing
	}
	return nil
}

// newChaos makes a definition of one to four steps whose hooks may fail, and starts a saga of it.
func newChaos(w *world, random *rand.Rand, name string) *chaos {
	x := &chaos{world: w, random: random, odds: 4 + random.IntN(20), truth: map[string]*truth{}, recorded: map[string]bool{}, rows: map[string]StepStatus{}}
	coin := func() bool { return random.IntN(2) == 0 }
	seldom := 2 + random.IntN(3)
	hook := func(context.Context, *sqltx.Tx, trip) error {
		if x.away || !x.calm && random.IntN(seldom) == 0 {
			return errPassing
		}
		return nil
	}
	because := func(ctx context.Context, tx *sqltx.Tx, in trip, _ string) error { return hook(ctx, tx, in) }
	parts := []Part[trip]{OnCompleted(hook), OnResumed(hook), OnCompensated(because), OnManualAction(because)}
	count := 1 + random.IntN(4)
	pivot := random.IntN(2 * count) // half of the definitions have none
	for i := range count {
		s := modelStep{remote: random.IntN(3) > 0, pivot: i == pivot, behind: i > pivot, attempts: 1 + random.IntN(4)}
		s.undoable = random.IntN(4) > 0 && !s.behind
		s.calls, s.limited = !s.remote && coin(), !s.remote && coin()
		s.name = fmt.Sprintf("%s%d", map[bool]string{true: "r", false: "l"}[s.remote], i)
		x.steps = append(x.steps, s)
		parts = append(parts, x.part(s))
	}
	if random.IntN(4) == 0 {
		parts = append(parts, Within[trip](time.Minute))
	}
	x.def = Define("trip", 1, parts...)
	x.engine = NewEngine(slog.New(slog.DiscardHandler), x.def)
	x.id = x.start(name)
	x.collect()
	return x
}

// part is a step that writes a row, and calls another system if it is to.
func (x *chaos) part(s modelStep) Part[trip] {
	there := &truth{}
	x.truth[s.name] = there
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
	if s.calls {
		options = append(options, Prepare(func(context.Context, Info, trip) (string, error) { return "receipt", x.call(there) }))
	}
	if s.calls && s.undoable {
		options = append(options, PrepareCompensation(func(context.Context, Info, trip, booking) (string, error) { return "undone", x.undoCall(there) }))
	}
	if s.limited {
		options = append(options, Deadline(time.Minute))
	}
	write := func(ctx context.Context, tx *sqltx.Tx, what string, permanent bool) error {
		if _, err := tx.Exec(ctx, `INSERT INTO effects (what) VALUES (?)`, []byte(x.id+what+s.name)); err != nil {
			return err
		}
		return x.luck(permanent)
	}
	var undo func(ctx context.Context, tx *sqltx.Tx, in trip, done booking) error
	if s.undoable {
		undo = func(ctx context.Context, tx *sqltx.Tx, _ trip, _ booking) error { return write(ctx, tx, "-", false) }
	}
	return Step(s.name, Queue(s.name), func(ctx context.Context, tx *sqltx.Tx, _ trip) (booking, error) {
		return booking{Ref: s.name}, write(ctx, tx, "+", true)
	}, undo, options...)
}

// call is a system that may do what it is asked for, and its answer be lost.
func (x *chaos) call(there *truth) error {
	err := x.luck(true)
	switch {
	case there.state == StepCompensated:
		return Fail("it comes too late")
	case there.state == StepCompleted:
		return x.luck(false)
	case IsPermanent(err), err != nil && x.random.IntN(2) == 0:
		return err
	}
	there.state, there.effects = StepCompleted, there.effects+1
	return err
}

func (x *chaos) undoCall(there *truth) error {
	err := x.luck(false)
	if err != nil && x.random.IntN(2) == 0 {
		return err
	}
	there.undo()
	return err
}

func (e *truth) undo() {
	if e.state == StepCompleted {
		e.effects--
	}
	e.state = StepCompensated
}

// participate is what docs/messages.md asks of a participant.
func (x *chaos) participate(m message.Message) message.Message {
	luck := func(permanent bool) error {
		if x.busy {
			return errPassing
		}
		return x.luck(permanent)
	}
	there, body := x.truth[m.Headers.String(message.HeaderStep)], replyOf(nil)
	if m.Headers.String(message.HeaderDirection) == string(Compensate) {
		if err := luck(false); err != nil && there.state == StepCompleted {
			body = replyOf(err)
		} else {
			there.undo()
		}
	} else {
		err := luck(true)
		switch {
		case there.state == StepCompleted:
		case there.state == StepCompensated, there.state == StepFailed && there.refused == m.MessageID:
			body = replyOf(Fail("no"))
		case IsPermanent(err):
			there.state, there.refused, body = StepFailed, m.MessageID, replyOf(err)
		case err != nil:
			body = replyOf(err)
		default:
			there.state, there.effects = StepCompleted, there.effects+1
		}
	}
	x.say("  its participant: %s", body)
	r := answer(m, body)
	r.MessageID = "re:" + m.MessageID
	return r
}
