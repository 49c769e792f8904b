package saga

import (
	"fmt"
	"testing"

	"backstep/internal/message"
)

// Why a saga is undone is known to the end, also if the outcome of the step that began it was not, if its
// compensation fails so that the saga stops, and if a person then ends it: it is what OnCompensated is told.
func TestReasonSurvivesAStop(t *testing.T) {
	t.Parallel()
	no := Fail("not now")
	for name, stopped := range map[string]func(w *world, s *script, d *desk) (id, reason string){
		"a call whose outcome is not known": func(w *world, s *script, d *desk) (string, string) {
			d.fail(Execute, errPassing, errPassing, errPassing)
			d.fail(Compensate, no)
			id, m := w.atDesk("x")
			w.done(w.outside(m))
			for range 2 {
				w.done(w.outside(w.scheduled()))
			}
			w.done(w.outside(w.command()))
			return id, "pay: gave up after 3 attempts: wrapped: try again"
		},
		"a participant past its deadline": func(w *world, s *script, d *desk) (string, string) {
			id, m := w.atDesk("x")
			w.done(w.outside(m))
			w.command()
			w.overdue(id)
			w.done(answer(w.command(), `{"status":"refused","error":"not now"}`))
			return id, "car: not done within 15m0s"
		},
		"a participant that says no": func(w *world, s *script, d *desk) (string, string) {
			d.fail(Compensate, no)
			id, m := w.atDesk("x")
			w.done(w.outside(m))
			w.done(answer(w.command(), noCar))
			w.done(w.outside(w.command()))
			return id, "car: no car"
		},
		"a parked compensation": func(w *world, s *script, d *desk) (string, string) {
			id, m := w.atDesk("x")
			d.fail(Execute, Fail("declined"))
			w.done(w.outside(m))
			w.park(w.command(), "poison")
			return id, "pay: declined"
		},
		"a cancel": func(w *world, s *script, d *desk) (string, string) {
			s.fail("undo a", no)
			id, _ := w.atDesk("x")
			w.cancel(id)
			w.done(w.command())
			return id, "cancelled: not any more"
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			var d desk
			parts := append(s.hooks(), s.part("a", Retry(3, 1)), s.part("pay", d.options()...), RemoteStep[trip, booking]("car", "cars"))
			w := newWorld(t, Define("trip", 1, parts...))
			o := &operator{w, &s}
			for _, op := range []Operation{{Verb: VerbRetry}, {Verb: VerbSkip}, {Verb: VerbResolve, As: Compensated}} {
				id, reason := stopped(w, &s, &d)
				s.fail("undo a")
				got := w.get(id)
				equal(t, "status", got.Status, ManualAction)
				op.Step, op.Direction = got.Steps[got.CurrentStep].Name, got.Direction
				w.exec(`DELETE FROM effects`)
				o.does(id, op)
				for range 4 { // whatever is left to undo
					for _, m := range w.commands() {
						switch m.Headers.String(message.HeaderStep) {
						case "pay":
							m = w.outside(m)
						case "car":
							m = answer(m, givenBack)
						}
						w.done(m)
					}
				}
				got = w.get(id)
				equal(t, fmt.Sprint("after ", op.Verb, ": status, why"), []any{got.Status, got.LastError}, []any{Compensated, reason})
				effects := w.effects()
				equal(t, "what the hook is told", effects[len(effects)-1], "compensated ("+reason+")")
				w.exec(`DELETE FROM saga_instances`)
			}
		})
	}
}
