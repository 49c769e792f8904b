package saga

import (
	"testing"
	"time"

	"backstep/internal/message"
)

// A later attempt is refused, but the command of an earlier one, whose reply never came, may still
// be on its way to the participant: it is told to undo what it may yet do.
func TestRefusalOfLaterAttempt(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, remoteTrip(s, Retry(3, 1)))
	id := w.start("x")
	w.done(w.command())
	w.command()
	w.pass(id, time.Hour)
	w.done(answer(w.scheduled(), `{"status":"refused","error":"full"}`))
	undo := w.command()
	equal(t, "to undo", undo.RoutingKey+" "+undo.Headers.String(message.HeaderDirection), "hotel compensate")
	w.done(answer(undo, `{"status":"completed"}`))
	w.run()
	d := w.get(id)
	equal(t, "steps", d.steps(), []string{"flight COMPENSATED", "hotel COMPENSATED"})
	equal(t, "reason", d.LastError, "hotel: full")
}
