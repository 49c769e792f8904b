package saga

import (
	"fmt"
	"testing"

	"backstep/internal/message"
)

// cancelling is the message that asks for a saga to be cancelled.
func cancelling(id, body string) message.Message {
	return message.Message{
		Properties: message.Properties{MessageID: message.NewID(), Type: CancelType, AppID: "shop"},
		Headers:    message.Headers{message.HeaderSagaID: id}, Body: []byte(body),
	}
}

// A saga that is cancelled at any point is undone as far as it has come.
func TestCancel(t *testing.T) { bothForms(t, testCancel) }

func testCancel(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("flight", "hotel", "car"))
	undone := [][]string{
		{"compensated (cancelled: changed my mind)"},
		{"flight", "undo flight flight of x", "compensated (cancelled: changed my mind)"},
		{"flight", "hotel", "undo hotel hotel of x", "undo flight flight of x", "compensated (cancelled: changed my mind)"},
	}
	for done, want := range undone {
		w.exec(`DELETE FROM effects`)
		w.exec(`DELETE FROM saga_instances`)
		id := w.start("x")
		m := w.command()
		for range done {
			w.done(m)
			m = w.command()
		}
		w.done(cancelling(id, `{"reason":"changed my mind"}`))
		equal(t, "the command it awaited", w.deliver(m)[0].Kind, message.Stale)
		equal(t, "again", w.deliver(cancelling(id, ``))[0].Kind, message.Stale)
		w.run()
		d := w.get(id)
		equal(t, "status", d.Status, Compensated)
		equal(t, "effects", w.effects(), want)
		equal(t, "kept", w.number(`SELECT COUNT(*) FROM saga_actions WHERE saga_id = ? AND actor LIKE '%shop%'`, []byte(id)), 2)
	}
}

func TestCancelTooLate(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, Define("trip", 1, append(s.hooks(), s.part("flight", Pivot()), s.part("hotel!"))...))
	id := w.start("x")
	w.done(w.command())
	for range 2 { // past the pivot, and at the end
		if o := w.deliver(cancelling(id, `{}`))[0]; o.Kind != message.Stale {
			t.Errorf("%s %s", o.Kind, o.Reason)
		}
		w.run()
	}
	equal(t, "status", w.get(id).Status, Completed)
	equal(t, "unknown saga", w.deliver(cancelling("nobody", `{}`))[0].Kind, message.Parked)
	equal(t, "no JSON", w.deliver(cancelling(id, `{`))[0].Kind, message.Parked)
}

// What the saga awaits comes first, whatever the order in which they arrive.
func TestCancelInOneBatchWithItsStep(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, remoteTrip(s))
	id := w.start("x")
	out := w.deliver(cancelling(id, `{}`), w.command())
	equal(t, "outcomes", []message.OutcomeKind{out[0].Kind, out[1].Kind}, []message.OutcomeKind{message.Done, message.Done})
	m := w.command() // the hotel never hears of it
	equal(t, "next", m.RoutingKey+" "+m.Headers.String(message.HeaderDirection), "flight compensate")
	w.done(m)
	d := w.get(id)
	equal(t, "steps", d.steps(), []string{"flight COMPENSATED"})
	equal(t, "status", d.Status, Compensated)
}

// A remote step that waits for its reply may have happened.
func TestCancelAmidRemoteStep(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, remoteTrip(s))
	id := w.start("x")
	w.done(w.command())
	hotel := w.command()
	w.done(cancelling(id, `{}`))
	undo := w.command()
	equal(t, "next", undo.RoutingKey+" "+undo.Headers.String(message.HeaderDirection), "hotel compensate")
	equal(t, "late reply", w.deliver(answer(hotel, `{"status":"completed","result":{"Ref":"H1"}}`))[0].Kind, message.Stale)
	w.done(answer(undo, `{"status":"completed"}`))
	w.run()
	equal(t, "status", w.get(id).Status, Compensated)
}

// A saga that waits for a person is undone if it was on its way forward.
func TestCancelWhileItWaitsForAPerson(t *testing.T) {
	t.Parallel()
	s := &script{}
	w := newWorld(t, s.define("flight", "hotel"))
	id := w.start("x")
	w.done(w.command())
	m := w.command()
	w.park(m, "poison")
	equal(t, "status", w.get(id).Status, ManualAction)
	w.done(cancelling(id, `{"reason":"enough"}`))
	w.run()
	d := w.get(id)
	equal(t, "status", d.Status, Compensated)
	equal(t, "reason", d.LastError, "cancelled: enough")
	equal(t, "effects", w.effects(), []string{
		"flight", "manual action (command parked: poison)", "resumed", "undo flight flight of x", "compensated (cancelled: enough)",
	})
	equal(t, "the parked command", w.deliver(m)[0].Kind, message.Stale)
}

// Who does not know a saga's id names it by type and correlation id.
func TestCancelByName(t *testing.T) {
	t.Parallel()
	var s script
	w := newWorld(t, s.define("flight", "hotel"))
	named := func(body string) message.Message {
		m := cancelling("", body)
		delete(m.Headers, message.HeaderSagaID)
		return m
	}
	var ids []string
	for _, name := range []string{"a", "b", "c"} {
		ids = append(ids, w.start(name))
	}
	cmds := w.commands()
	w.done(named(`{"type":"trip","correlation_id":"b","reason":"sick"}`), cmds[0], cancelling(ids[0], `{"type":"trip","correlation_id":"c"}`), cmds[2])
	equal(t, "again", one(t, "outcomes", w.deliver(named(`{"type":"trip","correlation_id":"a"}`))).Kind, message.Stale)
	w.run()
	for i, want := range []Status{Compensated, Compensated, Completed} {
		equal(t, "status", w.get(ids[i]).Status, want)
	}
	equal(t, "reason", w.get(ids[1]).LastError, "cancelled: sick")
	for body, why := range map[string]string{
		`{"type":"trip","correlation_id":"nobody"}`: `no saga of type "trip" with correlation id "nobody"`,
		`{"type":"trap","correlation_id":"c"}`:      `no saga of type "trap" with correlation id "c"`,
		`{"type":"trip"}`:                           `no x-saga-id header; without one the body has to name the saga by "type" and "correlation_id"`,
		``:                                          `no x-saga-id header; without one the body has to name the saga by "type" and "correlation_id"`,
	} {
		o := one(t, "outcomes", w.deliver(named(body)))
		equal(t, "outcome of "+body, fmt.Sprint(o.Kind, ": ", o.Reason), fmt.Sprint(message.Parked, ": ", why))
	}
	reply := named(`{"status":"completed"}`)
	reply.Type = ReplyType
	equal(t, "a reply", one(t, "outcomes", w.deliver(reply)).Reason, "no x-saga-id header; a reply has that of the command which it answers")
}
