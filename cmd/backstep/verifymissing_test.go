package main

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/inbox"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// TestMissing: what an operator has moved a saga past, or taken out of a parked queue, is not missed, and what
// waits breaks another rule; whatever else is not in an inbox is missed, once.
func TestMissing(t *testing.T) {
	t.Parallel()
	l := sagasOf(t)
	want := map[string]bool{}
	expect := func(missed bool, id string) string {
		want[id] = missed
		return id
	}
	act := func(request string, args ...string) string { // to a saga whose first command is on its way
		id := l.place(request)
		expect(false, l.awaited(id).MessageID)
		l.run("", append([]string{"saga", args[0], id, "--reason", "x", "--actor", "ops"}, args[1:]...)...).want(exitOK)
		return l.awaited(id).MessageID
	}
	expect(true, act("skipped", "skip", "--step", "reserve-stock")) // the next one is awaited
	act("cancelled", "cancel")
	undone := l.work(l.place("undone"), 0)
	expect(true, l.awaited(undone).MessageID) // worked off, and not recorded
	l.work(undone, 1)
	expect(false, l.awaited(undone).MessageID)
	l.run("", "saga", "cancel", undone, "--reason", "x", "--actor", "ops").want(exitOK)
	expect(false, l.awaited(undone).MessageID)
	l.run("", "saga", "skip", undone, "--step", "reserve-stock", "--compensation", "--reason", "x", "--actor", "ops").want(exitOK)
	retried := l.park(l.place("retried"), "gateway away")
	expect(false, l.awaited(retried).MessageID)
	l.run("", "saga", "retry", retried, "--reason", "x", "--actor", "ops").want(exitOK)
	twice := expect(true, l.awaited(retried).MessageID)
	scheduled := expect(false, l.awaited(l.place("scheduled")).MessageID)
	dropped := expect(false, l.awaited(l.place("dropped")).MessageID)
	swept := l.place("swept")
	expect(false, l.awaited(swept).MessageID)

	to := func(id, typ, sagaID string) message.Message {
		m := message.Message{Properties: message.Properties{MessageID: id, Type: typ}, Exchange: message.CommandsExchange, RoutingKey: handlers.PaymentQueue, Body: []byte(`{}`)}
		if sagaID != "" {
			m.Headers = message.Headers{message.HeaderSagaID: sagaID}
		}
		return m
	}
	err := sqltx.WithTx(t.Context(), l.db, func(ctx context.Context, tx *sqltx.Tx) error {
		for queue, id := range map[string]string{handlers.InventoryQueue: dropped, handlers.PaymentQueue: expect(false, "dropped")} {
			p := inbox.Parked{Queue: queue, ID: id}
			if err := p.Audit(ctx, tx, inbox.ParkedDrop, outbox.Operator{Actor: "ops", Reason: "x"}); err != nil {
				return err
			}
		}
		replayed := inbox.Parked{Queue: handlers.PaymentQueue, ID: expect(true, "replayed")}
		if err := replayed.Audit(ctx, tx, inbox.ParkedReplay, outbox.Operator{Actor: "ops", Reason: "x"}); err != nil {
			return err
		}
		return outbox.Add(ctx, tx, to("dropped", "other", ""), to("replayed", "other", ""), to(expect(true, "lost"), "other", ""),
			to(expect(true, "wish"), saga.CancelType, swept), to(expect(true, "reply"), saga.ReplyType, swept))
	})
	if err != nil {
		t.Fatal(err)
	}
	for id, again := range map[string]time.Time{expect(true, "sent again"): {}, expect(false, "parked again"): time.Now()} {
		l.parkedAndDone(t, to(id, "other", ""), again, inbox.ParkedReplay)
	}
	l.parkedAndDone(t, to(expect(false, "still parked"), "other", ""), time.Time{})
	l.parkedAndDone(t, to(expect(true, "dropped, then sent again"), "other", ""), time.Time{}, inbox.ParkedDrop, inbox.ParkedReplay)
	l.parkedAndDone(t, to(expect(false, "sent again, then dropped"), "other", ""), time.Time{}, inbox.ParkedReplay, inbox.ParkedDrop)
	const columns = "message_id, ordering_key, exchange, routing_key, properties, headers, payload"
	execute(t, l.db, "INSERT INTO outbox_events ("+columns+") SELECT "+columns+" FROM outbox_events WHERE message_id = ?", []byte(twice))
	execute(t, l.db, "INSERT INTO scheduled_messages ("+columns+", due_at) SELECT "+columns+", NOW(6) FROM outbox_events WHERE message_id = ?", []byte(scheduled))
	execute(t, l.db, "DELETE FROM saga_instances WHERE id = ?", []byte(swept))
	execute(t, l.db, "UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6)")

	var f findings
	if err := (verifier{db: l.db, retention: time.Hour}).processed(t.Context(), &f); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, v := range f.Violations {
		got = append(got, v.Subject)
	}
	maps.DeleteFunc(want, func(_ string, missed bool) bool { return !missed })
	// The saga that is cancelled, and had done nothing, awaits nothing.
	if slices.Sort(got); !slices.Equal(got, slices.Sorted(maps.Keys(want))) {
		t.Errorf("missed %q, want %q", got, slices.Sorted(maps.Keys(want)))
	}
}

// parkedAndDone publishes m to its queue, has it parked and these things done to it, and then, unless
// the time is zero, parked once more: before it was written down what was done last.
func (l *sagaLot) parkedAndDone(t *testing.T, m message.Message, again time.Time, verbs ...inbox.ParkedVerb) {
	t.Helper()
	first := time.Now().Add(-time.Minute).UTC()
	err := sqltx.WithTx(t.Context(), l.db, func(ctx context.Context, tx *sqltx.Tx) error {
		times := []time.Time{first}
		if !again.IsZero() {
			times = append(times, again)
		}
		msgs := []message.Message{m}
		for _, at := range times {
			parked := m
			parked.Exchange, parked.Headers = message.ParkedExchange, message.Headers{message.HeaderParkedAt: at.UTC().Format(time.RFC3339Nano)}
			msgs = append(msgs, parked)
		}
		if err := outbox.Add(ctx, tx, msgs...); err != nil {
			return err
		}
		for _, verb := range verbs {
			p := inbox.Parked{Queue: m.RoutingKey, ID: m.MessageID, At: first}
			if err := p.Audit(ctx, tx, verb, outbox.Operator{Actor: "ops", Reason: "x"}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// What an operator sends again from a parked queue, and is lost then, is missed. So it is if a copy of it was
// dropped before.
func TestVerifyMissesWhatWasReplayed(t *testing.T) {
	t.Parallel()
	o, db, broker := lotOf(t)
	at := time.Now()
	err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
		m := message.Message{Properties: message.Properties{MessageID: "one", Type: "t"}, Exchange: message.CommandsExchange, RoutingKey: handlers.PaymentQueue, Body: []byte(`{}`)}
		first, second := m, m
		for after, c := range map[time.Duration]*message.Message{0: &first, time.Second: &second} {
			c.Exchange, c.Headers = message.ParkedExchange, message.Headers{message.HeaderParkedAt: at.Add(after).UTC().Format(time.RFC3339Nano)}
		}
		return outbox.Add(ctx, tx, m, first, second)
	})
	if err != nil {
		t.Fatal(err)
	}
	execute(t, db, "UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6)")
	verify := func(code int, says ...string) {
		t.Helper()
		o.run("", "verify").want(code, says...)
	}
	broker.Publish(t, message.ParkedExchange, handlers.PaymentQueue, parkedCopy("one", "t", "r", at), parkedCopy("one", "t", "r", at.Add(time.Second)))
	verify(exitOK)
	o.run("", append([]string{"parked", "drop", "one", "--max", "1"}, because...)...).want(exitOK, "1 message dropped")
	verify(exitOK)
	o.run("", append([]string{"parked", "replay", "one"}, because...)...).want(exitOK, "1 message replayed")
	broker.Purge(t, handlers.PaymentQueue)
	verify(exitFailed, "published to payment and not in its inbox")
	execute(t, db, "INSERT INTO inbox_messages (consumer, message_id) VALUES ('payment', 'one')")
	verify(exitOK)
}
