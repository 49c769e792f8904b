package inbox

import (
	"strings"
	"testing"
	"time"

	"backstep/internal/message"
)

func TestDeferred(t *testing.T) {
	t.Parallel()
	m := full()
	m.Headers[message.HeaderOrderingKey] = "saga-1"
	m.UserID, m.Expiration = "somebody", "60000"
	s := stage(t, Config{Handler: always(message.Outcome{Kind: message.Deferred, Reason: "not yet", After: 40 * time.Second}), DeferLimit: time.Minute}, m)
	s.settles(1)
	r := s.scheduled()
	if r.Exchange != message.CommandsExchange || r.RoutingKey != "q" || !r.Mandatory || r.OrderingKey != "saga-1" || r.reason != "not yet" {
		t.Errorf("comes back to %q %q, mandatory %t, key %q, because %q", r.Exchange, r.RoutingKey, r.Mandatory, r.OrderingKey, r.reason)
	}
	if r.due < 20*time.Second || r.due > 40*time.Second {
		t.Errorf("due in %s, want 40 s", r.due)
	}
	since := r.Headers.String(message.HeaderDeferredSince)
	if at, err := time.Parse(time.RFC3339Nano, since); err != nil || time.Since(at) > time.Minute {
		t.Errorf("deferred since %q", since)
	}
	m.UserID, m.Expiration = "", ""
	equal(t, "properties", r.Properties, m.Properties) // the id too
	m.Headers[message.HeaderDeferredSince], m.Headers[message.HeaderDeferredFor] = since, "40s"
	equal(t, "headers", r.Headers, m.Headers)
	if s.recorded(m.MessageID) {
		t.Error("it is recorded: when it comes back it is a duplicate")
	}

	// It comes back, and is not a duplicate; the first time stays. That it was long on its way, in an
	// outage or behind a backlog, does not count.
	since = time.Now().Add(-2 * time.Hour).Format(time.RFC3339Nano)
	r.Headers[message.HeaderDeferredSince] = since
	s.b.put(r.Message)
	s.settles(2)
	again := scheduledRows(t, s.db)[1].Message
	equal(t, "deferred since", again.Headers.String(message.HeaderDeferredSince), since)
	equal(t, "deferred for", again.Headers.String(message.HeaderDeferredFor), "1m20s")

	// When it has been away for as long as the limit it is parked.
	s.b.put(again)
	s.settles(3)
	if parked, got := s.parked(); got != "not yet, for longer than 1m0s" || parked.MessageID != "order/17 ? " {
		t.Errorf("parked %q because %q", parked.MessageID, got)
	}
	if n := s.stats.Snapshot(); n.Deferred != 2 || n.Parked != 1 || n.Duplicates != 0 {
		t.Errorf("stats %+v, want 2 deferred and 1 parked", n)
	}
}

// What is counted apart is limited by that: it has its time, however long it was handed back for else.
func TestDeferredAndCountedApart(t *testing.T) {
	t.Parallel()
	m := full()
	m.Headers[message.HeaderDeferredFor] = "1h0m0s"
	out := message.Outcome{Kind: message.Deferred, Reason: "not yet", After: time.Minute, Counter: message.HeaderUnhandledFor}
	s := stage(t, Config{Handler: always(out), DeferLimit: time.Minute}, m)
	s.settles(1)
	r := s.scheduled()
	equal(t, "counted", []any{r.Headers[message.HeaderDeferredFor], r.Headers[message.HeaderUnhandledFor]}, []any{"1h0m0s", "1m0s"})
	s.b.put(r.Message)
	s.settles(2)
	if _, got := s.parked(); got != "not yet, for longer than 1m0s" {
		t.Errorf("parked because %q", got)
	}
}

func TestRetry(t *testing.T) {
	t.Parallel()
	m := full()
	first := m.MessageID
	s := stage(t, Config{Handler: always(message.Outcome{Kind: message.Retry, Reason: "not now"}), MaxAttempts: 3, RetryBase: time.Hour, RetryMax: time.Hour}, m)
	for attempt := 2; attempt <= 3; attempt++ {
		s.settles(attempt - 1)
		if !s.recorded(m.MessageID) {
			t.Errorf("the failed attempt %d is not recorded", attempt-1)
		}
		r := s.scheduled()
		exec(t, s.db, `DELETE FROM scheduled_messages`)
		if r.MessageID == m.MessageID || r.RequestID() != first || r.Attempt() != attempt || r.reason != "not now" {
			t.Errorf("next attempt: id %q, request %q, attempt %d, reason %q", r.MessageID, r.RequestID(), r.Attempt(), r.reason)
		}
		if r.due > time.Hour || r.RoutingKey != "q" || r.Exchange != message.CommandsExchange || !r.Mandatory {
			t.Errorf("due in %s at %q %q", r.due, r.Exchange, r.RoutingKey)
		}
		equal(t, "body", r.Body, m.Body)
		m = r.Message
		s.b.put(m)
	}
	s.settles(3)
	if parked, got := s.parked(); got != "failed 3 times: not now" || parked.MessageID != m.MessageID {
		t.Errorf("parked %q because %q", parked.MessageID, got)
	}
	if s.recorded(m.MessageID) {
		t.Error("the parked attempt is recorded")
	}
	if n := s.stats.Snapshot(); n.Retried != 2 || n.Parked != 1 {
		t.Errorf("stats %+v, want 2 retried and 1 parked", n)
	}
}

// What comes back goes to the queue it came from and to no other, whatever its headers say.
func TestComesBackToOneQueue(t *testing.T) {
	t.Parallel()
	m := msg("m")
	m.Headers = message.Headers{"CC": []any{"payment"}, "BCC": []any{"shipping"}, message.HeaderOrderingKey: strings.Repeat("k", 300)}
	s := stage(t, Config{Handler: always(message.Outcome{Kind: message.Retry, Reason: "not now"})}, m)
	s.settles(1)
	r := s.scheduled()
	if r.Headers["CC"] != nil || r.Headers["BCC"] != nil {
		t.Errorf("headers %v: the broker would send copies to other queues", r.Headers)
	}
}
