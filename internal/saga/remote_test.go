package saga

import (
	"encoding/json"
	"testing"
	"time"

	"backstep/internal/message"
)

// remoteTrip has a remote hotel between two local steps.
func remoteTrip(s *script, options ...StepOption) *Definition {
	parts := append(s.hooks(), s.part("flight"), RemoteStep[trip, booking]("hotel", "hotel", options...), s.part("car", Retry(1, 1)))
	return Define("trip", 1, parts...)
}

// answer is the reply of a participant to a command.
func answer(m message.Message, body string) message.Message {
	r := message.Message{
		Properties: message.Properties{MessageID: message.NewID(), Type: ReplyType, CorrelationID: m.CorrelationID, AppID: "hotels"},
		Headers:    message.Headers{}, Body: []byte(body),
	}
	for _, h := range []string{message.HeaderSagaID, message.HeaderStep, message.HeaderDirection, message.HeaderAttempt} {
		r.Headers[h] = m.Headers[h]
	}
	return r
}

func TestRemoteStep(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, remoteTrip(s))
	id := w.start("x")
	w.done(w.command())
	m := w.command()
	if m.RoutingKey != "hotel" || m.ReplyTo != RepliesQueue || m.Headers.String(message.HeaderDirection) != "execute" {
		t.Errorf("command %+v to %q", m.Properties, m.RoutingKey)
	}
	equal(t, "body", string(m.Body), `{"input":{"Name":"x","Keys":null}}`)
	d := w.get(id)
	equal(t, "steps", d.steps(), []string{"flight COMPLETED", "hotel WAITING"})
	if left := time.Until(d.DeadlineAt); left < 14*time.Minute || left > 16*time.Minute {
		t.Errorf("deadline in %s, want the default of 15 min", left)
	}
	w.done(answer(m, `{"status":"completed","result":{"Ref":"H1"}}`))
	d = w.get(id)
	equal(t, "steps", d.steps(), []string{"flight COMPLETED", "hotel COMPLETED"})
	if !d.DeadlineAt.IsZero() {
		t.Errorf("deadline %s of a step that has none", d.DeadlineAt)
	}
	s.fail("car", Fail("no car"))
	w.done(w.command())
	m = w.command()
	equal(t, "body", string(m.Body), `{"input":{"Name":"x","Keys":null},"result":{"Ref":"H1"}}`)
	equal(t, "direction", m.Headers.String(message.HeaderDirection), "compensate")
	d = w.get(id)
	equal(t, "steps", d.steps(), []string{"flight COMPLETED", "hotel COMPENSATING", "car FAILED"})
	w.done(answer(m, `{"status":"completed"}`))
	w.run()
	d = w.get(id)
	equal(t, "status", d.Status, Compensated)
	equal(t, "steps", d.steps(), []string{"flight COMPENSATED", "hotel COMPENSATED", "car FAILED"})
	equal(t, "effects", w.effects(), []string{"flight", "undo flight flight of x", "compensated (car: no car)"})
}

func TestRemoteStepRefused(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, remoteTrip(s))
	id := w.start("x")
	w.done(w.command())
	w.done(answer(w.command(), `{"status":"refused","error":"full"}`))
	w.run() // a refusal has not happened: the hotel is not asked to undo it
	d := w.get(id)
	equal(t, "steps", d.steps(), []string{"flight COMPENSATED", "hotel FAILED"})
	equal(t, "reason", d.LastError, "hotel: full")
}

// What a participant says passed, and what it says after the attempts are used up, when nobody
// knows whether an earlier one happened.
func TestRemoteStepFailed(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, remoteTrip(s, Retry(2, 1)))
	id := w.start("x")
	w.done(w.command())
	first := w.command()
	w.done(answer(first, `{"status":"failed","error":"busy"}`))
	second := w.scheduled()
	equal(t, "attempt", second.Attempt(), 2)
	equal(t, "request id", second.RequestID(), first.RequestID())
	equal(t, "old news", w.deliver(answer(first, `{"status":"failed","error":"busy"}`))[0].Kind, message.Stale)
	w.done(answer(second, `{"status":"failed","error":"busy"}`))
	undo := w.command()
	equal(t, "to undo", undo.RoutingKey+" "+undo.Headers.String(message.HeaderDirection), "hotel compensate")
	equal(t, "body", string(undo.Body), `{"input":{"Name":"x","Keys":null}}`)
	w.done(answer(undo, `{"status":"completed"}`))
	w.run()
	equal(t, "status", w.get(id).Status, Compensated)
}

// A reply that nobody waits for changes nothing and is kept.
func TestLateReplies(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, remoteTrip(s, Retry(2, 1)))
	id := w.start("x")
	flight := w.command()
	w.done(flight)
	hotel := w.command()
	done := `{"status":"completed","result":{"Ref":"H1"}}`
	out := w.deliver(answer(hotel, done), answer(hotel, done), answer(hotel, `{"status":"refused","error":"no"}`))
	equal(t, "outcomes", []message.OutcomeKind{out[0].Kind, out[1].Kind, out[2].Kind}, []message.OutcomeKind{message.Done, message.Stale, message.Stale})
	equal(t, "kept", w.number(`SELECT COUNT(*) FROM saga_actions WHERE saga_id = ? AND action = 'late reply'`, []byte(id)), 2)
	w.run()
	equal(t, "late", w.deliver(answer(hotel, `{"status":"refused","error":"no"}`))[0].Kind, message.Stale)
	equal(t, "status", w.get(id).Status, Completed)

	wrong := answer(hotel, done)
	wrong.Headers[message.HeaderStep] = "flight"
	for name, m := range map[string]message.Message{
		"no JSON": answer(hotel, `{`), "status": answer(hotel, `{"status":"perhaps"}`), "result": answer(hotel, `{"status":"completed","result":3}`),
		"local step": wrong, "command of a remote step": {Properties: message.Properties{MessageID: "y"}, Headers: message.Headers{message.HeaderSagaID: "nobody"}},
	} {
		if o := w.deliver(m)[0]; o.Kind != message.Parked {
			t.Errorf("%s: %s %s, want it parked", name, o.Kind, o.Reason)
		}
	}
}

// A reply to an earlier attempt is one to the step: the next attempt's is late then.
func TestReplyToEarlierAttempt(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, remoteTrip(s, Retry(3, 1)))
	id := w.start("x")
	w.done(w.command())
	first := w.command()
	w.pass(id, time.Hour)
	second := w.scheduled()
	w.done(answer(first, `{"status":"completed","result":{"Ref":"H1"}}`))
	equal(t, "status of the second", w.deliver(answer(second, `{"status":"completed","result":{"Ref":"H1"}}`))[0].Kind, message.Stale)
	w.run()
	d := w.get(id)
	equal(t, "status", d.Status, Completed)
	equal(t, "result", string(d.Steps[1].Result), `{"Ref":"H1"}`)
}

func TestRemoteFirstStep(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Define("trip", 1, RemoteStep[trip, booking]("hotel", "hotel", NothingToUndo(), Deadline(time.Minute))))
	id := w.start("x")
	d := w.get(id)
	equal(t, "steps", d.steps(), []string{"hotel WAITING"})
	if left := time.Until(d.DeadlineAt); left < 50*time.Second || left > 70*time.Second {
		t.Errorf("deadline in %s, want 1 min", left)
	}
	w.pass(id, 2*time.Minute) // nothing to undo, whether it has happened or not
	d = w.get(id)
	equal(t, "status", d.Status, Compensated)
	equal(t, "reason", d.LastError, "hotel: not done within 1m0s")
	if json.Valid(d.Payload) == false {
		t.Errorf("payload %s", d.Payload)
	}
}
