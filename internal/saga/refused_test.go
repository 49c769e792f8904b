package saga

import (
	"strings"
	"testing"

	"backstep/internal/message"
)

func TestNotForThisEngine(t *testing.T) { bothForms(t, testNotForThisEngine) }

func testNotForThisEngine(t *testing.T, s *script) {
	t.Parallel()
	def := s.define("a", "b")
	w := newWorld(t, def)
	id := w.start("x")
	m := w.command()
	tests := []struct {
		name   string
		change func()
		m      func(m message.Message) message.Message
		want   message.OutcomeKind
		reason string
	}{
		{"unknown saga", nil, func(m message.Message) message.Message {
			m.Headers = message.Headers{message.HeaderSagaID: "nobody\xff"}
			return m
		}, message.Parked, `no saga with id "nobody\xff"`},
		{"no saga", nil, func(m message.Message) message.Message { m.Headers = nil; return m }, message.Parked, `no saga with id ""`},
		{"body that does not decode", nil, func(m message.Message) message.Message { m.Body = []byte("{"); return m }, message.Parked, "body is not JSON"},
		{"unknown version", func() { w.exec(`UPDATE saga_instances SET version = 2`) }, nil, message.Deferred, `version 2 of saga type "trip"`},
		{"unknown type", func() { w.exec(`UPDATE saga_instances SET type = 'journey'`) }, nil, message.Deferred, `does not know saga type "journey"`},
		{"step out of range", func() { w.exec(`UPDATE saga_instances SET current_step = 2`) }, nil, message.Parked, "is at step 2; its definition has 2"},
		{"input that does not decode", func() { w.exec(`UPDATE saga_instances SET payload = '{"Name":1}'`) }, nil, message.Parked, "input of saga " + id},
	}
	before := w.get(id)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w.exec(`UPDATE saga_instances SET type = 'trip', version = 1, current_step = 0, payload = ?`, []byte(before.Payload))
			if tt.change != nil {
				tt.change()
			}
			sent := m
			if tt.m != nil {
				sent = tt.m(m)
			}
			o := w.deliver(sent)[0]
			if o.Kind != tt.want || !strings.Contains(o.Reason, tt.reason) {
				t.Errorf("%s: %s, want %s: %s", o.Kind, o.Reason, tt.want, tt.reason)
			}
			if tt.want == message.Deferred && o.After <= 0 {
				t.Error("deferred to at once")
			}
		})
	}
	equal(t, "calls", s.called(), []string(nil))
	w.exec(`UPDATE saga_instances SET type = 'trip', version = 1, current_step = 0, payload = ?`, []byte(before.Payload))
	equal(t, "instance", w.get(id), before)
	w.done(m)
}

// B86: a definition that was edited in place instead of getting a new version runs no command
// of a saga that started with the other one, wherever that saga is: not at the wrong step, not
// to an end with a step missing, not past a compensation. The command is parked with saga,
// version and both lists of steps. With the definition back, all of them finish.
func TestDefinitionWasEdited(t *testing.T) { bothForms(t, testDefinitionWasEdited) }

func testDefinitionWasEdited(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("a", "b", "c"))
	good := w.engine
	awaited := map[string]message.Message{} // by saga
	for _, tt := range []struct {
		name  string
		steps int // that it has behind it
	}{{"at a", 0}, {"at b", 1}, {"at c", 2}, {"undoing b", 3}, {"undoing a", 4}} {
		id := w.start(tt.name)
		m := w.command()
		for i := range tt.steps {
			if i == 2 {
				s.fail("c", Fail("no"))
			}
			w.done(m)
			m = w.command()
		}
		awaited[id] = m
	}
	calls := len(s.called())
	for name, steps := range map[string][]string{
		"inserted": {"a", "new", "b", "c"}, "swapped": {"a", "c", "b"}, "renamed": {"a", "bb", "c"},
		"removed in the middle": {"a", "c"}, "removed at the end": {"a", "b"}, "added at the end": {"a", "b", "c", "d"},
		"compensation removed": {"a!", "b", "c"}, "compensation of a later step removed": {"a", "b", "c!"},
	} {
		w.engine = NewEngine(good.log, s.define(steps...))
		for id, m := range awaited {
			o := w.deliver(m)[0]
			if o.Kind != message.Parked {
				t.Errorf("%s: command of saga %s is %s: %s", name, id, o.Kind, o.Reason)
			}
			for _, want := range []string{id, "version 1", `"trip"`, "a (undoable), b (undoable), c (undoable)", w.engine.defs["trip"][1].plan} {
				if !strings.Contains(o.Reason, want) {
					t.Errorf("%s: the reason does not say %s: %s", name, want, o.Reason)
				}
			}
		}
	}
	equal(t, "calls of steps by edited definitions", s.called()[calls:], []string{})
	s.fail("c")
	w.engine = good
	for id, m := range awaited {
		undoing := m.Headers.String(message.HeaderDirection) == string(Compensate)
		w.done(m)
		w.run()
		want := map[bool]Status{false: Completed, true: Compensated}[undoing]
		equal(t, "status of a saga of the definition that is back", w.get(id).Status, want)
	}
}
