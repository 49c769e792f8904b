package saga

import (
	"context"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// What a BatchStep has written and emitted for a saga that it then fails is undone if it was alone; among
// others nothing may have been written for it, and what was emitted for it is not sent.
func TestBatchStepThatFailsOne(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, Define("trip", 1, append(s.hooks(), BatchStep("a", "a", func(ctx context.Context, tx *sqltx.Tx, calls []*Call[trip, booking]) error {
		for _, c := range calls {
			c.Emit(message.Message{Properties: message.Properties{MessageID: message.NewID(), Type: "booked"}, Exchange: message.EventsExchange, RoutingKey: c.In.Name})
			if c.In.Name == "good" || len(calls) == 1 {
				if err := s.do(ctx, tx, c.In.Name, ""); err != nil {
					return err
				}
			}
			if c.In.Name == "bad" {
				c.Fail(Fail("no"))
			}
		}
		return nil
	}, nil))...))
	for _, names := range [][]string{{"bad"}, {"good", "bad"}} {
		w.exec(`DELETE FROM saga_instances`)
		w.exec(`DELETE FROM effects`)
		for _, name := range names {
			w.start(name)
		}
		w.done(w.commands()...)
		var want, sent []string
		for _, m := range w.outbox() {
			sent = append(sent, m.RoutingKey)
		}
		if len(names) > 1 {
			want = []string{"good"}
		}
		equal(t, "events", sent, want)
		want = append(want, "compensated (a: no)")
		if len(names) > 1 {
			want = []string{"good", "completed", "compensated (a: no)"}
		}
		equal(t, "effects", w.effects(), want)
	}
}

// A step that says no for good when its time is over has said no: it is not tried again.
func TestRefusalAtTheTimeout(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("flight", Timeout(30*time.Millisecond), Retry(2, 1)))...))
	s.on("flight", func(ctx context.Context, _ *sqltx.Tx) error {
		<-ctx.Done()
		return Fail("full")
	})
	id := w.start("x")
	w.done(w.command())
	d := w.get(id)
	equal(t, "status, reason", []any{d.Status, d.LastError}, []any{Compensated, "flight: full"})
}

// A clock that was set back leaves a beat in the future: nobody knows then what is up.
func TestFreshBeat(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for off, want := range map[time.Duration]bool{0: true, 4 * time.Second: true, -4 * time.Second: true, 6 * time.Second: false, -6 * time.Second: false} {
		equal(t, off.String(), pulse{now: now, beat: now.Add(off)}.fresh(), want)
	}
}

// What was left out is not undone: a saga of which that is all has nothing to reverse.
func TestNothingToReverse(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := &operator{newWorld(t, s.define("a", "b!")), s}
	id := o.start("x")
	o.does(id, Operation{Verb: VerbSkip, Step: "a"})
	o.commands()
	o.exec(`UPDATE outbox_events SET status = 'PUBLISHED'`)
	o.does(id, Operation{Verb: VerbSkip, Step: "b"})
	d := o.get(id)
	equal(t, "status", d.Status, Completed)
	offers, err := o.engine.Offers(t.Context(), o.db, id)
	o.must(err)
	equal(t, "offers", len(offers), 0)
}
