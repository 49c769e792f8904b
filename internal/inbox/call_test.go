package inbox

import (
	"context"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// shop is a system that is not ours. Its calls last until the test lets them go.
type shop struct {
	*scene
	begun   chan string // message ids
	release chan any    // an answer for each call
	then    func(m *message.Message) message.Outcome

	mu      sync.Mutex // guards below
	now     int        // calls that are being made
	most    int
	answers []message.Message // that have come back
}

// newShop is the shop of a scene in which a handler sends messages there.
func newShop(t *testing.T, cfg Config, msgs ...message.Message) *shop {
	t.Helper()
	s := &shop{begun: make(chan string, 1000), release: make(chan any, 1000)}
	h, _ := cfg.Handler.(*effects)
	if h == nil {
		h = &effects{}
	}
	h.OutcomeFunc, cfg.Handler = s.outcome, h
	s.scene = stage(t, cfg, msgs...)
	return s
}

// outcome sends messages of the type "outside" there, and takes their answers.
func (s *shop) outcome(_ context.Context, _ *sqltx.Tx, m *message.Message) message.Outcome {
	if m.Type != "outside" {
		return message.Outcome{}
	}
	if m.Answer == nil {
		return message.Outcome{Kind: message.Outside, Call: func(ctx context.Context) any { return s.call(ctx, m.MessageID) }}
	}
	s.mu.Lock()
	s.answers = append(s.answers, *m)
	s.mu.Unlock()
	if s.then != nil {
		return s.then(m)
	}
	return message.Outcome{}
}

func (s *shop) call(ctx context.Context, id string) any {
	s.mu.Lock()
	s.now++
	s.most = max(s.most, s.now)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.now--
		s.mu.Unlock()
	}()
	s.begun <- id
	select {
	case a := <-s.release:
		if a == "panic" {
			panic("the shop is on fire")
		}
		return a
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *shop) answered() []message.Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.answers)
}

func outside() message.Message {
	m := msg(message.NewID())
	m.Type = "outside"
	return m
}

// A lane goes on with other messages while one is outside. That one is neither recorded nor acked
// until its answer is here, and no ack of others covers it.
func TestCall(t *testing.T) {
	t.Parallel()
	out := outside()
	s := newShop(t, Config{Batch: 8}, out)
	equal(t, "the call is for", receive(t, "the call", s.begun), out.MessageID)
	others := newMsgs(20)
	s.b.put(others...)
	eventually(t, "the others are acked", func() bool { return len(s.b.ackedIDs()) == len(others) })
	if slices.Contains(s.b.ackedIDs(), out.MessageID) || s.recorded(out.MessageID) {
		t.Error("acked or recorded while it was outside")
	}
	equal(t, "effects while it is outside", s.effects(out.MessageID), 1)
	// A batch with one that is outside and others, and the answer.
	s.release <- "yes"
	s.settles(len(others) + 1)
	equal(t, "effects", s.effects(out.MessageID), 2)
	if !s.recorded(out.MessageID) {
		t.Error("not recorded")
	}
	equal(t, "answer", one(t, "answers", s.answered()).Answer, any("yes"))
	s.b.put(newMsgs(5)...)
	s.settles(len(others) + 6)
	equal(t, "calls counted", s.stats.Snapshot().Calls, int64(1))
	equal(t, "done counted", s.stats.Snapshot().Done, int64(len(others)+6))
}

// No more are made at a time than there are slots, and all are made.
func TestCallsAreBounded(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{Batch: 8, Prefetch: 100, Calls: 3})
	for range 20 {
		s.b.put(outside())
	}
	for range 3 {
		receive(t, "a call", s.begun)
	}
	lone := msg(message.NewID())
	s.b.put(lone)
	eventually(t, "a message beside them is acked", func() bool { return slices.Contains(s.b.ackedIDs(), lone.MessageID) })
	for i := range 20 {
		s.release <- i
	}
	s.settles(21)
	equal(t, "most at a time", s.most, 3)
	equal(t, "answers", len(s.answered()), 20)
}

// A call that panics, ends its goroutine or does not heed its context is a failed attempt.
func TestCallFails(t *testing.T) {
	t.Parallel()
	gate := make(chan struct{})
	t.Cleanup(func() { close(gate) })
	for what, tt := range map[string]struct {
		call func(ctx context.Context) any
		says string
	}{
		"panic":       {func(context.Context) any { panic("on fire") }, "panic in call: on fire"},
		"Goexit":      {func(context.Context) any { runtime.Goexit(); return nil }, "panic in call: runtime.Goexit"},
		"left behind": {func(context.Context) any { <-gate; return nil }, "does not heed its context"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			h := always(message.Outcome{Kind: message.Outside, Call: tt.call, Limit: 50 * time.Millisecond})
			s := stage(t, Config{Handler: h, Calls: 1, Grace: 50 * time.Millisecond}, newMsgs(1)...)
			s.settles(1)
			next := s.scheduled()
			if next.Attempt() != 2 || !strings.Contains(next.reason, tt.says) {
				t.Errorf("attempt %d because %q, want %q", next.Attempt(), next.reason, tt.says)
			}
			// The slot is free again.
			s.b.put(newMsgs(1)...)
			s.settles(2)
		})
	}
}

// When the session goes, answers go nowhere: what is delivered again is called again.
func TestCallOfASessionThatIsGone(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{Grace: time.Second}, outside())
	receive(t, "the first call", s.begun)
	s.b.drop()
	receive(t, "the second call", s.begun)
	if n := len(s.b.ackedIDs()); n > 0 {
		t.Errorf("%d acked", n)
	}
	s.release <- "yes"
	s.settles(1)
	equal(t, "answers", len(s.answered()), 1)
}

// A second copy of a message that is outside makes no second call, in whichever batch it is.
func TestCopyOfACall(t *testing.T) {
	t.Parallel()
	h := &effects{}
	entered, gate := h.held()
	s := newShop(t, Config{Handler: h}, newMsgs(1)...)
	receive(t, "the opener", entered)
	out := outside()
	s.b.put(out, out) // in one batch
	close(gate)
	receive(t, "the call", s.begun)
	s.b.put(out) // in a later one
	s.b.put(newMsgs(1)...)
	eventually(t, "all but the first copy are acked", func() bool { return len(s.b.ackedIDs()) == 4 })
	s.release <- "yes"
	s.settles(5)
	equal(t, "answers", len(s.answered()), 1)
	equal(t, "duplicates", s.stats.Duplicates.Load(), int64(2))
	s.b.put(out)
	s.settles(6)
	equal(t, "calls", s.stats.Calls.Load(), int64(1))
}

// A lane that is to stop waits for the calls that are being made, and hands back what has not
// begun at once.
func TestCallsWhenTheLaneStops(t *testing.T) {
	t.Parallel()
	made, waiting := outside(), outside()
	s := newShop(t, Config{Calls: 1}, made)
	receive(t, "the call", s.begun)
	s.b.put(waiting)
	eventually(t, "the other waits for its turn", func() bool { return s.effects(waiting.MessageID) == 1 })
	stopped := make(chan struct{})
	go func() { defer close(stopped); s.stop() }()
	eventually(t, "what has not begun is handed back", func() (ok bool) {
		s.b.look(func() { ok = slices.Contains(s.b.requeued, waiting.MessageID) })
		return ok
	})
	s.release <- "yes"
	receive(t, "the lane stops", stopped)
	equal(t, "acked", s.b.ackedIDs(), []string{made.MessageID})
	equal(t, "answers", len(s.answered()), 1)
	if !s.recorded(made.MessageID) || s.recorded(waiting.MessageID) {
		t.Error("records are not those of what was acked")
	}
}

// It does not wait for ever.
func TestCallsAreGivenUp(t *testing.T) {
	t.Parallel()
	out := outside()
	s := newShop(t, Config{Drain: 50 * time.Millisecond}, out)
	receive(t, "the call", s.begun)
	s.stop()
	if len(s.b.ackedIDs()) > 0 || s.recorded(out.MessageID) {
		t.Error("acked or recorded")
	}
	s.b.look(func() { equal(t, "back at the broker", one(t, "messages", s.b.ready).MessageID, out.MessageID) })
}

// What becomes of an answered message is the handler's matter as with any other, and its failures
// harm nobody.
func TestAnswers(t *testing.T) {
	t.Parallel()
	for what, then := range map[string]func(m *message.Message) message.Outcome{
		"parked": func(*message.Message) message.Outcome { return message.Park("no") },
		"deferred": func(*message.Message) message.Outcome {
			return message.Outcome{Kind: message.Deferred, After: time.Hour}
		},
		"retried": func(*message.Message) message.Outcome { return message.Outcome{Kind: message.Retry, Reason: "no"} },
		"panics":  func(*message.Message) message.Outcome { panic("no") },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := newShop(t, Config{})
			s.then = then
			s.b.put(outside())
			receive(t, "the call", s.begun)
			others := newMsgs(3)
			s.b.put(others...)
			s.release <- "yes"
			s.settles(4)
			for _, m := range others {
				equal(t, "effects of another", s.effects(m.MessageID), 1)
			}
			if what == "parked" {
				one(t, "parked copies", outboxRows(t, s.db, `exchange = 'backstep.parked'`))
			} else {
				s.scheduled()
			}
		})
	}
}
