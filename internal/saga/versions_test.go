package saga

import (
	"log/slog"
	"testing"

	"backstep/internal/message"
)

// Two versions live side by side: what started with the old one finishes with it, forwards and
// backwards, by workers that know both. One that knows only the new one hands the old one's
// commands back, replies and cancels too, and none of that is an attempt.
func TestTwoVersions(t *testing.T) { bothForms(t, testTwoVersions) }

func testTwoVersions(t *testing.T, s *script) {
	t.Parallel()
	old := s.define("a", "b", "c")
	changed := Define("trip", 2, append(s.hooks(), s.part("x"), s.part("a"))...)
	w := newWorld(t, old)
	forwards, backwards := w.start("forwards"), w.start("backwards")
	first := w.commands()
	w.done(first...)
	second := w.commands()
	w.def = changed
	w.engine = NewEngine(slog.New(slog.DiscardHandler), changed)
	fresh := w.start("fresh")
	third := w.command()
	for _, m := range append(second, cancelling(forwards, `{}`)) {
		o := w.deliver(m)[0]
		equal(t, "outcome at a worker that knows only the new version", o.Kind, message.Deferred)
	}
	w.done(third)
	w.engine = NewEngine(slog.New(slog.DiscardHandler), changed, old)
	w.done(second...)
	s.fail("c", Fail("no")) // of the first that gets there
	w.run()
	for id, want := range map[string][]string{
		forwards: {"a", "b", "c"}, backwards: {"a", "b", "c"}, fresh: {"x", "a"},
	} {
		d := w.get(id)
		names := []string{}
		for _, st := range d.Steps {
			names = append(names, st.Name)
		}
		equal(t, "steps of "+d.CorrelationID, names, want)
		equal(t, "attempt", d.Attempt, 1)
	}
	equal(t, "old ones", w.number(`SELECT COUNT(*) FROM saga_instances WHERE version = 1 AND status IN ('COMPLETED', 'COMPENSATED')`), 2)
	equal(t, "the new one", w.get(fresh).Status, Completed)
}
