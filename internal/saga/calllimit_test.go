package saga

import (
	"testing"
	"time"

	"backstep/internal/message"
)

// Timeout bounds a call to a system that is not ours as well, in either direction; the lane, which makes
// the call, keeps to the limit. Without one the lane's own counts.
func TestTimeoutOfACall(t *testing.T) {
	t.Parallel()
	for _, limit := range []time.Duration{0, time.Minute} {
		var s script
		var d desk
		options := d.options()
		if limit > 0 {
			options = append(options, Timeout(limit))
		}
		w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("pay", options...), s.part("b"))...))
		s.fail("b", Fail("no"))
		w.start("x")
		for _, direction := range []string{"execute", "compensate"} {
			m := w.command()
			o := w.deliver(m)[0]
			equal(t, direction+": outcome", o.Kind, message.Outside)
			equal(t, direction+": limit", o.Limit, limit)
			m.Answer = o.Call(t.Context())
			w.done(m)
			if direction == "execute" {
				w.done(w.command())
			}
		}
	}
}
