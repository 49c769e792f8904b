package saga

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// offered returns what would be done to a saga, and what only its definition is against; both are to be what
// comes of it.
func (w *world) offered(id string) (would []Operation, against map[Operation]string) {
	w.t.Helper()
	o := &operator{world: w}
	before, effects := o.look(id), len(w.effects())
	offers, err := w.engine.Offers(w.t.Context(), w.db, id)
	w.must(err)
	equal(w.t, "the saga", o.look(id), before)
	equal(w.t, "effects", len(w.effects()), effects)
	against = map[Operation]string{}
	for _, offer := range offers {
		if offer.Against == nil {
			would = append(would, offer.Operation)
		} else {
			against[offer.Operation] = offer.Against.Error()
		}
	}
	return would, against
}

// can returns the verbs of what would be done.
func (w *world) can(id string) (verbs []Verb) {
	w.t.Helper()
	would, _ := w.offered(id)
	for _, op := range would {
		verbs = append(verbs, op.Verb)
	}
	return slices.Compact(verbs)
}

// offers reports whether an operation is among what would be done.
func (w *world) offers(id string, op Operation) bool {
	w.t.Helper()
	would, _ := w.offered(id)
	return slices.ContainsFunc(would, func(o Operation) bool {
		return o.Verb == op.Verb && (op.Verb != VerbSkip || o.Step == op.Step && o.undoes() == op.undoes()) && (op.Verb != VerbResolve || o.As == op.As)
	})
}

// What the definition is against is not offered: not a skip either, which may be the saga's end.
func TestOffersAskTheDefinition(t *testing.T) {
	t.Parallel()
	s := &script{}
	parts := append(s.hooks(), s.part("a"), s.part("b"), OnEndedByHand(func(_ context.Context, _ *sqltx.Tx, _ trip, st Status, _ string) error {
		return Fail("it cannot be %s", st)
	}))
	o := &operator{newWorld(t, Define("trip", 1, parts...)), s}
	id := o.start("x")
	o.done(o.command())
	o.park(o.command(), "poison")
	would, against := o.offered(id)
	at := Operation{Step: "b", Direction: Execute}
	op := func(v Verb, as Status) Operation { o := at; o.Verb, o.As = v, as; return o }
	equal(t, "offered", would, []Operation{op(VerbRetry, ""), op(VerbCancel, ""), op(VerbCompensate, "")})
	equal(t, "against", against, map[Operation]string{op(VerbSkip, ""): "it cannot be COMPLETED",
		op(VerbResolve, Completed): "it cannot be COMPLETED", op(VerbResolve, Compensated): "it cannot be COMPENSATED"})
	_, err := o.operate(id, op(VerbSkip, ""))
	if err == nil || err.Error() != "it cannot be COMPLETED" {
		t.Errorf("skip gave %v", err)
	}
	// A hook that fails is as if it said no, whatever the verb.
	s.fail("resumed", errors.New("mailbox full"), errors.New("mailbox full"), errors.New("mailbox full"), errors.New("mailbox full"), errors.New("mailbox full"), errors.New("mailbox full"))
	would, against = o.offered(id)
	equal(t, "offered", len(would), 0)
	if why := against[op(VerbRetry, "")]; !strings.Contains(why, "mailbox full") {
		t.Errorf("against retry: %s", why)
	}
}

// A saga that was begun with other steps is offered nothing, as nothing would be done to it; nor are their names guessed.
func TestOffersKnowThePlan(t *testing.T) {
	t.Parallel()
	o := newOperator(t, &script{})
	id := o.start("x")
	o.done(o.command())
	o.park(o.command(), "poison")
	o.exec(`UPDATE saga_instances SET plan = 'a, pay (undoable), c'`)
	for _, v := range []Verb{VerbRetry, VerbSkip, VerbCancel, VerbCompensate, VerbResolve} {
		_, err := o.operate(id, Operation{Verb: v, Step: "b", As: Compensated})
		offers, no := o.engine.Offers(t.Context(), o.db, id)
		if _, refused := errors.AsType[*RefusedError](err); !refused || len(offers) > 0 || no == nil || no.Error() != err.Error() || !strings.Contains(err.Error(), "a, pay (undoable), c") {
			t.Errorf("%s is refused: %v; %+v are offered, %v", v, err, offers, no)
		}
	}
	d := o.get(id)
	equal(t, "allowed", len(o.engine.Allowed(d)), 0)
	equal(t, "names", o.engine.StepNames(d), []string{"a", "pay", "c"})
	if def, err := o.engine.DefinitionOf(d); !errors.Is(err, ErrUnknownDefinition) {
		t.Errorf("its definition: %v, %v", def, err)
	}
}

// Of an input that does not decode there is an end to be made, and nothing else.
func TestOffersOfWhatDoesNotDecode(t *testing.T) {
	t.Parallel()
	o := newOperator(t, &script{})
	id := o.start("x")
	o.park(o.command(), "poison")
	o.exec(`UPDATE saga_instances SET payload = '{"Name":7}'`)
	equal(t, "offered", o.can(id), []Verb{VerbResolve})
	equal(t, "allowed", len(o.engine.Allowed(o.get(id))), 2)
}

// Nobody who looks waits for a worker that has the saga in hand, or keeps one waiting for it.
func TestOffersOfWhatIsInHand(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := newOperator(t, s)
	var id string
	s.on("a", func(context.Context, *sqltx.Tx) error {
		if offers, err := o.engine.Offers(t.Context(), o.db, id); !errors.Is(err, ErrInHand) || len(offers) > 0 {
			t.Errorf("%+v are offered, %v", offers, err)
		}
		return nil
	})
	id = o.start("x")
	o.done(o.command())
	equal(t, "afterwards", o.can(id), []Verb{VerbSkip, VerbCancel, VerbCompensate})
}

// What is offered can be written too: a hook that emits what is no message is against it.
func TestOffersAreWritten(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := newOperator(t, s)
	id := o.start("x")
	s.on("compensated", func(ctx context.Context, _ *sqltx.Tx) error {
		Emit(ctx, message.Message{
			Properties: message.Properties{MessageID: message.NewID(), Type: "t"}, Exchange: "events", RoutingKey: strings.Repeat("k", 300),
		})
		return nil
	})
	offers, err := o.engine.Offers(t.Context(), o.db, id)
	o.must(err)
	i := slices.IndexFunc(offers, func(f Offer) bool { return f.Verb == VerbCancel })
	if i < 0 || !errors.Is(offers[i].Against, outbox.ErrInvalid) {
		t.Errorf("offered: %+v", offers)
	}
}

// A hook that does not return keeps neither him who looks nor the saga.
func TestOffersOfADeafHook(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"), s.part("b"))...))
	id := w.start("x")
	m := w.command()
	wake, _ := w.deaf(&s, "compensated")
	defer wake()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := w.engine.Offers(ctx, w.db, id); !errors.Is(err, sqltx.ErrLeftBehind) {
		t.Errorf("it gave %v", err)
	}
	w.done(m)
}

// Of a saga that there is not nobody has it in hand.
func TestOffersOfNothing(t *testing.T) {
	t.Parallel()
	o := newOperator(t, &script{})
	if _, err := o.engine.Offers(t.Context(), o.db, "gone"); !errors.Is(err, ErrNotFound) {
		t.Errorf("it gave %v", err)
	}
}
