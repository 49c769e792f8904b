package inbox

import (
	"bytes"
	"context"
	"database/sql"
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

// unparked reads a parked copy as it comes out of q.parked.
func unparked(r row) Parked {
	d := message.Delivery{Message: r.Message, Queue: "q.parked"}
	d.Headers = maps.Clone(r.Headers)
	d.Headers["x-delivery-count"] = int64(3) // somebody has looked at it
	return Unpark(&d, "q")
}

// TestUnpark: whatever a lane parks, the original comes back byte for byte, from the copy and
// from the audit of its removal.
func TestUnpark(t *testing.T) {
	t.Parallel()
	plain := func(change func(*message.Message)) message.Message {
		m := full()
		change(&m)
		return m
	}
	for name, m := range map[string]message.Message{
		"full":               full(),
		"nothing but a type": {Properties: message.Properties{Type: "test"}, Headers: message.Headers{}, Body: []byte("b")},
		"no headers":         {Properties: message.Properties{MessageID: "m", Type: "test"}, Body: []byte{}},
		"kept aside":         plain(func(m *message.Message) { m.UserID, m.Expiration, m.DeliveryMode = "somebody", "60000", 1 }),
		"its own key":        plain(func(m *message.Message) { m.Headers[message.HeaderOrderingKey] = "k" }),
		"routing":            plain(func(m *message.Message) { m.Headers["CC"] = []any{"payment"}; m.UserID = "u" }),
		"large headers":      plain(func(m *message.Message) { m.Headers["large"] = strings.Repeat("x", 33<<10) }),
		"names not UTF-8": plain(func(m *message.Message) {
			m.Headers["\xff"] = message.Headers{"\xfe": []any{message.Headers{"\xfd": []byte{1}}}, "$pairs": []any{}}
		}),
		"what looks like pairs": plain(func(m *message.Message) {
			m.Headers = message.Headers{"$pairs": []any{[]any{"CC", "x"}}, "CC": "x"}
		}),
		"pairs alone, in an envelope": plain(func(m *message.Message) {
			m.Headers = message.Headers{"$pairs": []any{[]any{"a", strings.Repeat("x", 33<<10)}}}
		}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := parkOne(t, m, "why \xff not")
			p := unparked(r)
			reason := "why \uFFFD not"
			if m.MessageID == "" {
				reason = "no message_id" // no handler sees it
			}
			if p.Fault != "" || p.Queue != "q" || p.From != "q" || p.Reason != reason || p.ID != r.MessageID || time.Since(p.At) > time.Minute || p.Death != nil {
				t.Errorf("parked %+v", p)
			}
			same(t, "unparked", p.Original, m)
			if p.Original.Exchange != message.CommandsExchange || p.Original.RoutingKey != "q" {
				t.Errorf("goes to %q %q", p.Original.Exchange, p.Original.RoutingKey)
			}
			db := database(t)
			err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error {
				return p.Audit(ctx, tx, ParkedDrop, outbox.Operator{Actor: "ops", Reason: "because"})
			})
			if err != nil {
				t.Fatal(err)
			}
			a := one(t, "actions", actionsOf(t, db, p.Name()))
			kept, err := a.Kept(t.Context(), db)
			if err != nil || a.Actor != "ops" || a.Reason != "because" || a.Verb != ParkedDrop || a.Queue != "q" || kept.Reason != p.Reason || !kept.At.Equal(p.At) {
				t.Errorf("kept %+v, %v", a, err)
			}
			same(t, "kept", kept.Original, m)
		})
	}
}

// same demands the same properties, headers and body.
func same(t *testing.T, what string, got, want message.Message) {
	t.Helper()
	if want.Headers == nil {
		want.Headers = message.Headers{}
	}
	equal(t, what+": properties", got.Properties, want.Properties)
	if !reflect.DeepEqual(got.Headers, want.Headers) || !bytes.Equal(got.Body, want.Body) {
		t.Errorf("%s: headers %v, body %q, want %v, %q", what, got.Headers, got.Body, want.Headers, want.Body)
	}
}

// TestUnparkDeadLetter: the broker says why in x-death.
func TestUnparkDeadLetter(t *testing.T) {
	at := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	death := func(queue, reason string) any {
		return message.Headers{"queue": queue, "reason": reason, "time": at, "count": int64(2), "exchange": "x"}
	}
	d := message.Delivery{Message: message.Message{
		Properties: message.Properties{MessageID: "m"}, Body: []byte("b"),
		Headers: message.Headers{"x-death": []any{"nonsense", death("other", "expired"), death("q", "delivery_limit")}, "mine": true},
	}}
	p := Unpark(&d, "q")
	if p.Death == nil || *p.Death != (Death{Reason: "delivery_limit", Queue: "q", Count: 2, At: at}) || !p.At.Equal(at) || p.From != "q" ||
		!strings.Contains(p.Reason, "dead-lettered by the broker: delivery_limit (it was delivered again and again") {
		t.Errorf("parked %+v", p)
	}
	equal(t, "headers", p.Original.Headers, d.Headers)
	d.Headers[message.HeaderParkedReason] = "a lane's"
	if p := Unpark(&d, "q"); p.Reason != "a lane's" || p.Death != nil {
		t.Errorf("parked %+v, want by the lane", p)
	}
	rejected := message.Delivery{Message: message.Message{Headers: message.Headers{"x-death": []any{death("q", "rejected")}}}}
	for bytes, why := range map[int]string{maxParkedBody: "if it was a worker its log says so)", maxParkedBody + 1: "its body has more than 4 MiB, which no worker takes)"} {
		rejected.Body = make([]byte, bytes)
		if p := Unpark(&rejected, "q"); !strings.HasSuffix(p.Reason, why) {
			t.Errorf("rejected with %d bytes: %s", bytes, p.Reason)
		}
	}
	d.Headers = message.Headers{message.HeaderParkedEnvelope: true}
	if p := Unpark(&d, "q"); !strings.Contains(p.Fault, "envelope") || string(p.Original.Body) != "b" {
		t.Errorf("parked %+v, want a fault and the copy itself", p)
	}
}

// TestReplayWithout: the broker would refuse a user_id, and send copies to other queues.
func TestReplayWithout(t *testing.T) {
	p := Parked{Queue: "q", Original: full()}
	p.Original.UserID, p.Original.Headers["CC"] = "somebody", []any{"payment"}
	p.Original.Headers[message.HeaderDeferredSince], p.Original.Headers[message.HeaderDeferredFor] = "2026-01-02T12:00:00Z", "15m0s"
	p.Original.Headers[message.HeaderUnhandledFor] = "1m0s"
	m, without := p.Replay()
	if m.UserID != "" || m.Headers["CC"] != nil || len(without) != 2 || !m.Mandatory || m.DeliveryMode != 2 {
		t.Errorf("replayed %+v without %q", m, without)
	}
	if m.Headers[message.HeaderDeferredSince] != nil || m.Headers[message.HeaderDeferredFor] != nil || m.Headers[message.HeaderUnhandledFor] != nil {
		t.Errorf("replayed with headers %v: the next worker that defers it would park it at once", m.Headers)
	}
	if p.Original.Headers["CC"] == nil || p.Original.UserID == "" {
		t.Error("the original has changed")
	}
}

// TestLargeBodyInAudit: no statement is larger than a server may refuse.
func TestLargeBodyInAudit(t *testing.T) {
	t.Parallel()
	db := database(t)
	p := Parked{Queue: "q", ID: "large", Original: message.Message{Headers: message.Headers{}, Body: make([]byte, 20<<20+1)}}
	for i := range p.Original.Body {
		p.Original.Body[i] = byte(i >> 16)
	}
	for _, verb := range []ParkedVerb{ParkedReplay, ParkedDone} {
		err := sqltx.WithTx(t.Context(), db, func(ctx context.Context, tx *sqltx.Tx) error { return p.Audit(ctx, tx, verb, outbox.Operator{}) })
		if err != nil {
			t.Fatal(err)
		}
	}
	actions := actionsOf(t, db, "large")
	if len(actions) != 2 {
		t.Fatalf("%d actions", len(actions))
	}
	if kept, err := actions[0].Kept(t.Context(), db); err != nil || kept.Original.Body != nil {
		t.Errorf("a replay keeps %d bytes, %v", len(kept.Original.Body), err)
	}
	if kept, err := actions[1].Kept(t.Context(), db); err != nil || !bytes.Equal(kept.Original.Body, p.Original.Body) {
		t.Errorf("kept %d bytes, %v", len(kept.Original.Body), err)
	}
}

func actionsOf(t *testing.T, db *sql.DB, name string) []ParkedAction {
	t.Helper()
	actions, err := ParkedActions(t.Context(), db, name)
	if err != nil {
		t.Fatal(err)
	}
	return actions
}

// Headers that nobody here can read are not lost by a replay: there is none.
func TestUnparkUnreadable(t *testing.T) {
	d := message.Delivery{Message: msg("m"), Queue: "q.parked", Unreadable: "10000 headers"}
	p := Unpark(&d, "q")
	if p.Fault != "10000 headers" || !strings.Contains(p.Reason, "10000 headers") || p.Name() != "m" {
		t.Errorf("%+v", p)
	}
}
