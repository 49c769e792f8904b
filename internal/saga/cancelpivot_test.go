package saga

import (
	"strings"
	"testing"
	"time"
)

// A wish to undo a saga that is noted while the call of its pivot is open comes to nothing if the pivot
// completes. Who asked for it is told so beforehand, and finds it said afterwards.
func TestCancelAmidThePivotsCall(t *testing.T) {
	t.Parallel()
	const refused = "cancel refused: its pivot, step pay, has completed: too late to undo it "
	for name, wish := range map[string]struct {
		made func(o *operator, id string)
		kept []string
	}{
		"a message": {func(o *operator, id string) { o.cancel(id) }, []string{"cancel: not any more", refused + "(cancelled: not any more)"}},
		"an operator": {func(o *operator, id string) {
			for range 2 {
				eff, err := o.operate(id, Operation{Verb: VerbCancel})
				if err != nil || !strings.Contains(eff.Detail, "unless step pay, its pivot, has completed then") {
					o.t.Errorf("they are told %q, %v", eff.Detail, err)
				}
			}
		}, []string{"cancel: ticket 12", refused + "(cancelled: ticket 12)"}},
		"a deadline": {func(o *operator, id string) {
			o.exec(`UPDATE saga_instances SET saga_deadline_at = NOW(6) - INTERVAL 1 SECOND`)
			o.overdue(id)
		}, []string{refused + "(not done within 1h0m0s)"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			var d desk
			parts := append(s.hooks(), s.part("a", Retry(3, 1)), s.part("pay", append(d.options(), Pivot())...), s.part("c!", Retry(3, 1)), Within[trip](time.Hour))
			w := newWorld(t, Define("trip", 1, parts...))
			id, m := w.atDesk("x")
			m = w.outside(m)
			wish.made(&operator{w, &s}, id)
			equal(t, "noted", w.get(id).CancelReason != "", true)
			w.done(m)
			w.run()
			got := w.get(id)
			equal(t, "status, to be undone, error", []any{got.Status, got.CancelReason, got.LastError}, []any{Completed, "", ""})
			equal(t, "actions", w.actions(id), wish.kept)
		})
	}
}
