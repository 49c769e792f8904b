package saga

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"backstep/internal/message"
)

// B95: in an upgrade workers are replaced one after the other, in any order. What is for a saga whose
// definition a worker does not know yet, or no more, comes back until one gets it that does, be it the
// type or the version that is new, and a command, a reply or a wish to cancel.
func TestUnknownDefinition(t *testing.T) {
	t.Parallel()
	var old script
	for what, engine := range map[string]*Engine{
		`saga type "trip"`:              NewEngine(slog.New(slog.DiscardHandler), Define("journey", 1, old.part("a"))),
		`version 2 of saga type "trip"`: NewEngine(slog.New(slog.DiscardHandler), Define("trip", 1, old.part("a"))),
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, Define("trip", 2, append(s.hooks(), s.part("a"), RemoteStep[trip, booking]("car", "cars"))...))
			knows := w.engine
			both := func(id string, m message.Message) {
				t.Helper()
				before := w.get(id)
				w.engine = engine
				o := one(t, "outcomes", w.deliver(m))
				if o.Kind != message.Deferred || o.After != deferFor || o.Reason != "this worker does not know "+what {
					t.Errorf("the %s is %s for %s: %s", m.Type, o.Kind, o.After, o.Reason)
				}
				equal(t, "saga", w.get(id), before)
				w.engine = knows
				w.done(m)
			}
			id, cancelled := w.start("x"), w.start("y")
			cmds := w.commands()
			both(id, cmds[0])
			both(id, answer(w.command(), rented))
			equal(t, "status", w.get(id).Status, Completed)
			both(cancelled, cancelling(cancelled, `{}`))
			equal(t, "status", w.get(cancelled).Status, Compensated)
		})
	}
	equal(t, "steps that were run by who does not know them", len(old.called()), 0)
}

// Who stops a saga that nobody has known for long says where it stands all the same.
func TestUnknownDefinitionIsStoppedInWords(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, Define("trip", 2, append(s.hooks(), s.part("a"), s.part("b", Pivot()))...))
	id := w.start("x")
	w.done(w.command())
	m := w.command()
	var log bytes.Buffer
	w.engine = NewEngine(slog.New(slog.NewJSONHandler(&log, nil)))
	w.park(m, "this worker does not know it")
	if !strings.Contains(log.String(), `"step":"b"`) {
		t.Errorf("the log does not say which step it is at: %s", &log)
	}
	if body := string(one(t, "events", w.outbox()).Body); !strings.Contains(body, `"step":"b"`) {
		t.Errorf("nor does the event: %s", body)
	}
	equal(t, "status", w.get(id).Status, ManualAction)
	in := &instance{current: 2}
	equal(t, "a step of which nothing is known", in.stepName(), "number 3")
	in.plan = "a (undoable), b (undoable) (pivot) (remote), c"
	equal(t, "steps of a plan", planned(in.plan), []string{"a", "b", "c"})
}
