package saga

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
)

const (
	mayHave = "left out, but its participant may have done it all the same, and nobody undoes that: hotel"
	saysIt  = "left out, but its participant says that it has done it, and nobody undoes that: hotel"
)

// A participant's step that was left out may have been done by the participant, and its reply says so: it is not
// only what was done by hand that is not undone.
func TestLeftOutButDoneByItsParticipant(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ reply, says string }{
		"no reply":          {"", mayHave},
		"completed":         {`{"status":"completed","result":{"Ref":"H1"}}`, saysIt},
		"completed, a word": {`{"status":"completed","error":"at once"}`, saysIt},
		"failed":            {`{"status":"failed","error":"x: completed"}`, mayHave},
	} {
		for _, op := range []Operation{{Verb: VerbCancel}, {Verb: VerbResolve, As: Compensated}} {
			t.Run(name+" "+string(op.Verb), func(t *testing.T) {
				t.Parallel()
				s := &script{}
				o := &operator{newWorld(t, Define("trip", 1, append(s.hooks(), RemoteStep[trip, booking]("hotel", "hotel"), s.part("car"))...)), s}
				id := o.start("x")
				m := o.command()
				eff := o.does(id, Operation{Verb: VerbSkip, Step: "hotel"})
				equal(t, "skip says", eff.Detail, "the action of step hotel is left out; its participant may have done it all the same; "+
					"it goes on to execute step car; not run, unless that was done by hand: hotel")
				if tt.reply != "" {
					equal(t, "the reply", one(t, "outcomes", o.deliver(answer(m, tt.reply))).Kind, message.Stale)
				}
				if op.Verb == VerbResolve {
					o.park(o.command(), "poison")
				}
				eff = o.does(id, op)
				for _, said := range []string{eff.Detail, o.engine.Left(o.get(id), op.Verb == VerbResolve)} {
					if !strings.HasSuffix(said, "; "+tt.says) || strings.Contains(said, "by hand") {
						t.Errorf("%s", said)
					}
				}
			})
		}
	}
}

// So it is when a saga has completed behind such a step, and is reversed.
func TestReverseBehindWhatAParticipantDid(t *testing.T) {
	t.Parallel()
	for _, replies := range []bool{false, true} {
		t.Run(fmt.Sprint("replies: ", replies), func(t *testing.T) {
			t.Parallel()
			s := &script{}
			o := &operator{newWorld(t, Define("trip", 1, append(s.hooks(), s.part("car"), RemoteStep[trip, booking]("hotel", "hotel"))...)), s}
			id := o.start("x")
			o.done(o.command())
			m := o.command()
			eff := o.does(id, Operation{Verb: VerbSkip, Step: "hotel"})
			equal(t, "skip says", eff.Detail, "the action of step hotel is left out; it is COMPLETED; left out, but its participant may have done it all the same: hotel")
			says := mayHave
			if replies {
				says = saysIt
				o.deliver(answer(m, `{"status":"completed","result":{"Ref":"H1"}}`))
				equal(t, "afterwards", o.engine.Left(o.get(id), false), "; left out, but its participant says that it has done it: hotel")
			}
			eff = o.does(id, Operation{Verb: VerbCompensate})
			equal(t, "compensate says", eff.Detail, "it is undone; it goes on to compensate step car; "+says)
			o.run()
			equal(t, "left", o.engine.Left(o.get(id), false), "; "+says)
		})
	}
}

// What was refused at its first attempt has not happened, and nobody says that it may have, then or later.
func TestWordsOfWhatWasRefused(t *testing.T) {
	t.Parallel()
	for name, op := range map[string]Operation{
		"resolve": {Verb: VerbResolve, As: Compensated},
		"skip":    {Verb: VerbSkip, Step: "hotel"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, s, id, r := allUnhandled["refused"].begin(t)
			s.fail("compensated", errPassing)
			w.fails(r, handleFor)
			s.fail("compensated")
			eff := (&operator{w, s}).does(id, op)
			for _, said := range []string{eff.Detail, w.engine.Left(w.get(id), op.Verb == VerbResolve)} {
				if strings.Contains(said, "not undone, unless") || strings.Contains(said, "may have done it") {
					t.Error(said)
				}
			}
		})
	}
}

// A later attempt's refusal says nothing of the first.
func TestWordsOfWhatWasRefusedLater(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		op   Operation
		says string
	}{
		"resolve": {Operation{Verb: VerbResolve, As: Compensated}, "it is COMPENSATED; not undone, unless that was done by hand: hotel"},
		"skip": {Operation{Verb: VerbSkip, Step: "hotel"},
			"the action of step hotel is left out; it is COMPLETED; left out, but its participant may have done it all the same: hotel"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &script{}
			o := &operator{newWorld(t, Define("trip", 1, append(s.hooks(), RemoteStep[trip, booking]("hotel", "hotel", Retry(2, 1)))...)), s}
			id := o.start("x")
			o.command()
			o.pass(id, 16*time.Minute) // no reply to the first
			m := o.scheduled()
			o.cannotHandle(answer(m, noCar))
			o.park(m, "poison")
			equal(t, "says", o.does(id, tt.op).Detail, tt.says)
		})
	}
}
