package saga

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// everything is what a rehearsal must leave as it was.
func (o *operator) everything() (counts []string) {
	for _, table := range []string{"saga_instances", "saga_steps", "saga_actions", "saga_calls", "outbox_events", "scheduled_messages", "effects"} {
		var n, sum string
		if err := o.db.QueryRowContext(o.t.Context(), `CHECKSUM TABLE `+table).Scan(&n, &sum); err != nil {
			o.t.Fatal(err)
		}
		counts = append(counts, table+" "+sum)
	}
	return counts
}

func (o *operator) rehearse(id string, op Operation) (Rehearsal, error) {
	o.t.Helper()
	op.By = ops
	before := o.everything()
	r, err := o.engine.Rehearse(o.t.Context(), o.db, id, op)
	equal(o.t, "what is in the tables", o.everything(), before)
	return r, err
}

func (d Doing) said() string {
	var all []string
	for _, w := range d.Writes {
		all = append(all, fmt.Sprintf("%s %s %d", w.Verb, w.Table, w.Rows))
	}
	for _, m := range d.Messages {
		s := m.Type + " to " + m.Exchange + " " + m.RoutingKey
		if m.After > 0 {
			s += " later"
		}
		all = append(all, s)
	}
	return strings.Join(all, "; ")
}

// TestRehearse: every verb in every state a saga can be in leaves no trace, and tells what the
// verb then does.
func TestRehearse(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, s *script) {
		t.Parallel()
		o := newOperator(t, s)
		for _, st := range states {
			for i, op := range []Operation{{Verb: VerbRetry}, {Verb: VerbSkip, Step: "b"}, {Verb: VerbSkip, Step: "b", Direction: Compensate}, {Verb: VerbCancel}, {Verb: VerbCompensate}, {Verb: VerbResolve, As: Compensated}} {
				s.fail("b")
				s.fail("c")
				s.fail("undo b")
				id := o.start(fmt.Sprint(st.name, i))
				st.to(o, id)
				r, rerr := o.rehearse(id, op)
				eff, err := o.operate(id, op)
				if r.Effect != eff || fmt.Sprint(rerr) != fmt.Sprint(err) {
					t.Errorf("%s of a saga that is %s: rehearsed %+v, %v, done %+v, %v", op.Verb, st.name, r.Effect, rerr, eff, err)
				}
				leads := r.Changed && op.Verb != VerbResolve
				if leads != (r.Run != nil) || leads && (r.Run.Error != "" || r.Run.NotRun != "" || !strings.Contains(r.Run.said(), "INSERT effects 1")) {
					t.Errorf("%s of a saga that is %s: it ran %+v", op.Verb, st.name, r.Run)
				}
				o.exec(`DELETE FROM scheduled_messages`)
				o.outbox()
			}
		}
	})
}

// TestRehearsalTells verb, table, rows and messages of what would be done, and the error.
func TestRehearsalTells(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, s *script) {
		t.Parallel()
		o := newOperator(t, s)
		id := o.start("x")
		o.done(o.command())
		o.park(o.command(), "poison")
		s.on("b", func(ctx context.Context, tx *sqltx.Tx) error {
			Emit(ctx, message.Message{Properties: message.Properties{MessageID: "e", Type: "booked"}, Exchange: message.EventsExchange, RoutingKey: "trip.booked"})
			_, err := tx.Exec(ctx, `UPDATE effects SET what = 'x' WHERE what = 'nothing of the kind'`)
			return err
		})
		r, err := o.rehearse(id, Operation{Verb: VerbRetry})
		if err != nil || r.Run == nil {
			t.Fatalf("%+v, %v", r, err)
		}
		equal(t, "the retry", r.said(), "INSERT effects 1; DELETE scheduled_messages 0; UPDATE saga_instances 1; INSERT saga_actions 1; INSERT outbox_events 1; trip.b to backstep.commands b")
		equal(t, "the step", r.Run.said(), "INSERT effects 1; UPDATE effects 0; INSERT saga_steps 1; UPDATE saga_instances 1; INSERT outbox_events 2; trip.c to backstep.commands c; booked to backstep.events trip.booked")
		equal(t, "after it", []any{r.Run.Step, r.Run.Direction, r.Run.Status, r.Run.Error}, []any{"b", Execute, Running, ""})

		for _, tt := range []struct {
			err    error
			says   string
			status Status
		}{{errPassing, "wrapped: try again", Running}, {Fail("no room"), "no room", Compensating}} {
			s.fail("b", tt.err)
			r, err = o.rehearse(id, Operation{Verb: VerbRetry})
			if err != nil || r.Run == nil || r.Run.Error != tt.says || r.Run.Status != tt.status {
				t.Errorf("%v: %+v, %v", tt.err, r.Run, err)
			}
			later := slices.ContainsFunc(r.Run.Messages, func(m Sent) bool { return m.Type == "trip.b" && m.After >= 0 })
			if later != (tt.status == Running) {
				t.Errorf("%v: messages %+v", tt.err, r.Run.Messages)
			}
		}

		// A hook that fails is what a worker would meet.
		s.fail("b", Fail("no room"))
		s.fail("compensated", errors.New("no connection to anything"))
		r, err = o.rehearse(id, Operation{Verb: VerbCancel})
		if err != nil || r.Run == nil || !strings.Contains(r.Run.Error, "no connection to anything") {
			t.Errorf("%+v, %v", r.Run, err)
		}
	})
}

// TestRehearseRemote: a participant is not called.
func TestRehearseRemote(t *testing.T) {
	t.Parallel()
	s := &script{}
	parts := append(s.hooks(), s.part("a", Retry(3, 1)), RemoteStep[trip, booking]("car", "rental"))
	o := &operator{newWorld(t, Define("trip", 1, parts...)), s}
	id := o.start("x")
	o.done(o.command())
	first := o.command()
	o.exec(`UPDATE outbox_events SET status = 'PUBLISHED'`)
	r, err := o.rehearse(id, Operation{Verb: VerbRetry})
	if err != nil || r.Run == nil || !strings.HasPrefix(r.Run.NotRun, "it is a participant's: its command goes to queue rental") || len(r.Run.Writes) > 0 {
		t.Errorf("%+v, %v", r.Run, err)
	}
	// It may have been lost there. Once: the second command is on its way.
	o.does(id, Operation{Verb: VerbRetry})
	again := o.command()
	if again.MessageID == first.MessageID || again.Attempt() != 2 || o.get(id).CommandID != again.MessageID {
		t.Errorf("attempt %d, %s after %s", again.Attempt(), again.MessageID, first.MessageID)
	}
	o.exec(`UPDATE outbox_events SET status = 'PUBLISHED'`)
	o.already(id, Operation{Verb: VerbRetry})
	eff := o.does(id, Operation{Verb: VerbSkip, Step: "car"})
	if eff.Status != Completed || !strings.Contains(eff.Detail, "its participant may have done it all the same") {
		t.Errorf("%+v", eff)
	}
}

// A step behind the one that is left out may need its result: a dry run shows that.
func TestRehearseSkipOfWhatIsRead(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := &operator{newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"),
		Step("b", "b", func(ctx context.Context, tx *sqltx.Tx, _ trip) (any, error) {
			_, err := ResultOf[any](ctx, tx, "a")
			return nil, err
		}, nil))...)), s}
	id := o.start("x")
	o.park(o.command(), "poison")
	r, err := o.rehearse(id, Operation{Verb: VerbSkip, Step: "a"})
	o.must(err)
	if r.Run == nil || r.Run.Step != "b" || !strings.Contains(r.Run.Error, ErrNoResult.Error()) {
		t.Errorf("it ran %+v", r.Run)
	}
}
