package saga

import (
	"context"
	"testing"

	"backstep/internal/message"
	"backstep/internal/sqltx"
)

// park tells the engine that a message was parked.
func (w *world) park(m message.Message, reason string) {
	w.t.Helper()
	if err := w.tryPark(m, reason); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) tryPark(m message.Message, reason string) error {
	return sqltx.Once(w.t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		return w.engine.CommandParked(ctx, tx, &m, reason)
	})
}

// A parked command stops its saga; its replay, with the same id, moves it on.
func TestCommandParked(t *testing.T) { bothForms(t, testCommandParked) }

func testCommandParked(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("a", "b"))
	id := w.start("x")
	w.done(w.command())
	m := w.command()
	w.park(m, "delivery limit \xff")
	d := w.get(id)
	if d.Status != ManualAction || d.CommandID != m.MessageID || d.LastError != "command parked: delivery limit \uFFFD" {
		t.Errorf("parked: %+v", d.Summary)
	}
	equal(t, "events", one(t, "events", w.outbox()).RoutingKey, "saga.manual_action")
	equal(t, "effects", w.effects(), []string{"a", "manual action (command parked: delivery limit \uFFFD)"})
	equal(t, "steps", d.steps(), []string{"a COMPLETED"})

	// Once is enough, and what is not awaited stops nothing.
	w.park(m, "again")
	equal(t, "parked again", w.get(id), d)
	other := m
	other.MessageID = message.NewID()
	w.park(other, "not awaited")
	w.park(message.Message{}, "no saga")
	w.park(message.Message{Headers: message.Headers{message.HeaderSagaID: "nobody"}}, "unknown saga")
	equal(t, "outbox", len(w.outbox()), 0)

	w.done(m)
	d = w.get(id)
	if d.Status != Completed || d.LastError != "" {
		t.Errorf("after the replay: %+v", d.Summary)
	}
	equal(t, "effects", w.effects()[2:], []string{"resumed", "b", "completed"})
	w.park(m, "too late")
	equal(t, "after the end", w.get(id), d)
}

// A saga that resumes and fails again is compensated for its failure, not for having been
// stopped.
func TestParkedWhileCompensating(t *testing.T) { bothForms(t, testParkedWhileCompensating) }

func testParkedWhileCompensating(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("a", "b", "c"))
	s.fail("c", Fail("no"))
	id := w.start("x")
	w.done(w.command())
	w.done(w.command())
	w.done(w.command())
	m := w.command() // undo b
	w.park(m, "why")
	d := w.get(id)
	if d.Status != ManualAction || d.Direction != Compensate || d.LastError != "command parked: why" {
		t.Errorf("parked: %+v", d.Summary)
	}
	w.outbox()
	w.done(m)
	equal(t, "reason after the replay", w.get(id).LastError, "c: no")
	w.done(w.command())
	equal(t, "status", w.get(id).Status, Compensated)
	equal(t, "effects", w.effects(), []string{
		"a", "b", "manual action (command parked: why)", "resumed", "undo b b of x", "undo a a of x", "compensated (c: no)",
	})
}

// Whatever is wrong with a saga, it can be stopped.
func TestCommandParkedOfUnknownDefinition(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]string{
		"version": `UPDATE saga_instances SET version = 7`,
		"type":    `UPDATE saga_instances SET type = 'journey'`,
		"step":    `UPDATE saga_instances SET current_step = 9`,
		"input":   `UPDATE saga_instances SET payload = '['`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, s.define("a"))
			id := w.start("x")
			m := w.command()
			w.exec(change)
			w.park(m, "why")
			if d := w.get(id); d.Status != ManualAction || d.LastError != "command parked: why" {
				t.Errorf("parked: %+v", d.Summary)
			}
			one(t, "events", w.outbox())
			// A hook needs the definition, and the saga's input.
			equal(t, "hooks called", len(s.called()), map[bool]int{true: 1}[name == "step"])
		})
	}
}

// A message whose last try did not end is not run: only the attempt is counted.
func TestFailureOfTheLastTry(t *testing.T) { bothForms(t, testFailureOfTheLastTry) }

func testFailureOfTheLastTry(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("a", "b"))
	id := w.start("x")
	m := w.command()
	m.Failure = "panic in handler: boom"
	for range 2 {
		w.done(m)
		m = w.scheduled()
		m.Failure = "panic in handler: boom"
	}
	w.done(m)
	d := w.get(id)
	if d.Status != Compensated || d.LastError != "a: gave up after 3 attempts: panic in handler: boom" {
		t.Errorf("at the end: %+v", d.Summary)
	}
	equal(t, "calls", s.called(), []string{"compensated (" + d.LastError + ")"})
}
