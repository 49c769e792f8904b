package saga

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/sqltx"
)

func TestCompletes(t *testing.T) { bothForms(t, testCompletes) }

func testCompletes(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("flight", "hotel", "car"))
	id := w.start("Zoë 😀")
	queues := []string{"flight", "hotel", "car"}
	for i, queue := range queues {
		m := w.command()
		if m.Exchange != message.CommandsExchange || m.RoutingKey != queue || !m.Mandatory || m.OrderingKey != id {
			t.Errorf("command %d goes to %q %q, mandatory %t, key %q", i, m.Exchange, m.RoutingKey, m.Mandatory, m.OrderingKey)
		}
		if m.Type != "trip."+queue || m.CorrelationID != id || m.DeliveryMode != 2 || m.ContentType != "application/json" {
			t.Errorf("command %d has properties %+v", i, m.Properties)
		}
		equal(t, "headers", m.Headers, message.Headers{
			message.HeaderRequestID: m.MessageID, message.HeaderSagaID: id, message.HeaderSagaType: "trip",
			message.HeaderSagaVersion: int64(1), message.HeaderStep: queue, message.HeaderDirection: "execute",
			message.HeaderAttempt: int64(1), message.HeaderOrderingKey: id,
		})
		equal(t, "body", string(m.Body), `{"Name":"Zoë 😀","Keys":null}`)
		d := w.get(id)
		if d.Status != Running || d.CurrentStep != i || d.CommandID != m.MessageID || d.Attempt != 1 || d.AwaitedSince.IsZero() {
			t.Errorf("before step %d: %+v", i, d.Summary)
		}
		w.done(m)
	}
	equal(t, "commands after the last", w.commands(), []message.Message(nil))
	d := w.get(id)
	if d.Status != Completed || d.CommandID != "" || d.LastError != "" || d.FinishedAt.IsZero() || !d.AwaitedSince.IsZero() {
		t.Errorf("at the end: %+v", d)
	}
	equal(t, "steps", d.steps(), []string{"flight COMPLETED", "hotel COMPLETED", "car COMPLETED"})
	equal(t, "result", string(d.Steps[1].Result), `{"Ref":"hotel of Zoë 😀"}`)
	equal(t, "effects", w.effects(), []string{"flight", "hotel", "car", "completed"})
	equal(t, "info", s.infos[1], Info{SagaID: id, Step: "hotel", Direction: Execute, Attempt: 1})
	equal(t, "idempotency key", s.infos[1].IdempotencyKey(), id+":hotel:execute")
	equal(t, "definition", strings.Join(w.def.StepNames(), " "), "flight hotel car")
}

// B99, B96: a business failure at each step of each shape of definition. Exactly the completed
// steps that can be undone are, in reverse, with what their actions returned; the hook runs
// once, in the last transaction.
func TestFailureAtEachStep(t *testing.T) {
	t.Parallel()
	tests := []struct {
		steps []string // "!": nothing to undo
		fails int
		want  []string // effects
		rows  []string
	}{
		{[]string{"a", "b", "c"}, 0, []string{"compensated (a: no)"}, []string{"a FAILED"}},
		{[]string{"a", "b", "c"}, 1, []string{"a", "undo a a of x", "compensated (b: no)"}, []string{"a COMPENSATED", "b FAILED"}},
		{[]string{"a", "b", "c"}, 2, []string{"a", "b", "undo b b of x", "undo a a of x", "compensated (c: no)"},
			[]string{"a COMPENSATED", "b COMPENSATED", "c FAILED"}},
		{[]string{"a", "b!", "c"}, 2, []string{"a", "b", "undo a a of x", "compensated (c: no)"},
			[]string{"a COMPENSATED", "b COMPLETED", "c FAILED"}},
		{[]string{"a!", "b", "c"}, 2, []string{"a", "b", "undo b b of x", "compensated (c: no)"},
			[]string{"a COMPLETED", "b COMPENSATED", "c FAILED"}},
		{[]string{"a!", "b!", "c!"}, 2, []string{"a", "b", "compensated (c: no)"}, []string{"a COMPLETED", "b COMPLETED", "c FAILED"}},
		{[]string{"a"}, 0, []string{"compensated (a: no)"}, []string{"a FAILED"}},
		{[]string{"a!"}, 0, []string{"compensated (a: no)"}, []string{"a FAILED"}},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprint(tt.steps, " at ", tt.fails), func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, s.define(tt.steps...))
			failing := strings.TrimSuffix(tt.steps[tt.fails], "!")
			s.fail(failing, Fail("%s", "no"))
			id := w.start("x")
			w.run()
			d := w.get(id)
			if d.Status != Compensated || d.CommandID != "" || d.FinishedAt.IsZero() || d.LastError != failing+": no" {
				t.Errorf("at the end: %+v", d.Summary)
			}
			equal(t, "effects", w.effects(), tt.want)
			equal(t, "steps", d.steps(), tt.rows)
			equal(t, "error of the step", d.Steps[tt.fails].Error, "no")
			// One try of the action, and one of each compensation.
			equal(t, "calls", len(s.called()), len(tt.want)+1)
			equal(t, "scheduled", w.number(`SELECT COUNT(*) FROM scheduled_messages`), 0)
		})
	}
}

// B96: each shape of definition completes too.
func TestEveryShapeCompletes(t *testing.T) {
	t.Parallel()
	for _, steps := range [][]string{{"a"}, {"a!"}, {"a", "b!"}, {"a!", "b!"}, {"a!", "b"}} {
		t.Run(fmt.Sprint(steps), func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, s.define(steps...))
			id := w.start("x")
			w.run()
			equal(t, "status", w.get(id).Status, Completed)
			equal(t, "effects", len(w.effects()), len(steps)+1)
		})
	}
}

func TestRetryableFailure(t *testing.T) { bothForms(t, testRetryableFailure) }

func testRetryableFailure(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("a", "b"))
	s.fail("b", errPassing, errPassing)
	s.fail("undo a", errPassing)
	id := w.start("x")
	w.done(w.command())
	first := w.command()
	m := first
	for attempt := 2; attempt <= 3; attempt++ {
		w.done(m)
		equal(t, "commands", w.commands(), []message.Message(nil))
		next := w.scheduled()
		if next.MessageID == m.MessageID || next.Attempt() != attempt || next.RequestID() != first.MessageID || next.RoutingKey != "b" {
			t.Errorf("attempt %d: %+v %v", attempt, next.Properties, next.Headers)
		}
		d := w.get(id)
		if d.Status != Running || d.CommandID != next.MessageID || d.Attempt != attempt || d.CurrentStep != 1 {
			t.Errorf("attempt %d: %+v", attempt, d.Summary)
		}
		equal(t, "step", d.Steps[1].Error, "wrapped: try again")
		equal(t, "steps", d.steps(), []string{"a COMPLETED", "b RUNNING"})
		// The failed attempt is not awaited any more.
		equal(t, "old attempt", w.deliver(m)[0].Kind, message.Stale)
		m = next
	}
	w.done(m)
	d := w.get(id)
	equal(t, "status", d.Status, Completed)
	equal(t, "attempts of the step", d.Steps[1].Attempts, 3)
	equal(t, "error of the step", d.Steps[1].Error, "")
	equal(t, "effects", w.effects(), []string{"a", "b", "completed"})
	equal(t, "info", s.infos[3].Attempt, 3)
}

// A step that keeps failing counts as failed after its limit; its compensation, tried as
// often, is retried by itself.
func TestGivesUp(t *testing.T) { bothForms(t, testGivesUp) }

func testGivesUp(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("a", "b"))
	s.fail("b", errPassing, errPassing, errPassing)
	s.fail("undo a", errPassing, errPassing)
	id := w.start("x")
	w.done(w.command())
	w.done(w.command())
	w.done(w.scheduled())
	w.done(w.scheduled())
	undo := w.command()
	if undo.Headers.String(message.HeaderDirection) != "compensate" || undo.Attempt() != 1 || undo.RequestID() != undo.MessageID || undo.RoutingKey != "a" {
		t.Errorf("compensation: %+v %v", undo.Properties, undo.Headers)
	}
	d := w.get(id)
	if d.Status != Compensating || d.Direction != Compensate || d.Attempt != 1 || d.LastError != "b: gave up after 3 attempts: wrapped: try again" {
		t.Errorf("after the last attempt: %+v", d.Summary)
	}
	w.done(undo)
	equal(t, "steps", w.get(id).Steps[0].Status, StepCompensating)
	w.done(w.scheduled())
	again := w.scheduled()
	if again.Attempt() != 3 || again.RequestID() != undo.MessageID {
		t.Errorf("third compensation: %v", again.Headers)
	}
	w.done(again)
	equal(t, "status", w.get(id).Status, Compensated)
	equal(t, "effects", w.effects(), []string{"a", "undo a a of x", "compensated (b: gave up after 3 attempts: wrapped: try again)"})
}

// B91: a compensation that cannot be done stops the saga for an operator, with the reason.
func TestCompensationFails(t *testing.T) {
	t.Parallel()
	for name, errs := range map[string][]error{
		"permanent": {Fail("cannot %s", "undo")},
		"exhausted": {errPassing, errPassing, errors.New("cannot undo")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, s.define("a", "b", "c"))
			s.fail("c", Fail("no"))
			s.fail("undo b", errs...)
			id := w.start("x")
			w.done(w.command())
			w.done(w.command())
			w.done(w.command())
			m := w.command()
			for range len(errs) - 1 {
				w.done(m)
				m = w.scheduled()
			}
			w.done(m)
			reason := fmt.Sprintf("compensation of step b failed at attempt %d: cannot undo", len(errs))
			d := w.get(id)
			if d.Status != ManualAction || d.CommandID != "" || d.LastError != reason || d.Direction != Compensate || d.CurrentStep != 1 {
				t.Errorf("at the end: %+v", d.Summary)
			}
			equal(t, "steps", d.steps(), []string{"a COMPLETED", "b COMPENSATING", "c FAILED"})
			equal(t, "effects", w.effects(), []string{"a", "b", "manual action (" + reason + ")"})
			ev := one(t, "events", w.outbox())
			if ev.Exchange != message.EventsExchange || ev.RoutingKey != "saga.manual_action" || ev.Mandatory || ev.Type != "saga.manual_action" {
				t.Errorf("event: %+v", ev)
			}
			equal(t, "event", string(ev.Body), fmt.Sprintf(`{"correlation_id":"x","direction":"compensate","reason":%q,"saga_id":%q,"saga_type":"trip","step":"b"}`, reason, id))
			// A copy of the command does nothing.
			equal(t, "copy", w.deliver(m)[0].Kind, message.Stale)
			equal(t, "status", w.get(id).Status, ManualAction)
		})
	}
}

func TestStale(t *testing.T) { bothForms(t, testStale) }

func testStale(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("a", "b"))
	id := w.start("x")
	first := w.command()
	w.done(first)
	second := w.command()
	foreign := second
	foreign.MessageID = message.NewID()
	calls, before := s.called(), w.get(id)
	for what, m := range map[string]message.Message{"the command before": first, "one nobody awaits": foreign} {
		o := w.deliver(m)[0]
		if o.Kind != message.Stale || !strings.Contains(o.Reason, id) || !strings.Contains(o.Reason, second.MessageID) {
			t.Errorf("%s is %s: %s", what, o.Kind, o.Reason)
		}
	}
	// Of several messages for one saga in one batch, the one that is awaited counts.
	out := w.deliver(first, foreign, second, foreign, second)
	var kinds []message.OutcomeKind
	for _, o := range out {
		kinds = append(kinds, o.Kind)
	}
	equal(t, "outcomes", kinds, []message.OutcomeKind{message.Stale, message.Stale, message.Done, message.Stale, message.Stale})
	equal(t, "calls", s.called(), append(calls, "b", "completed"))
	equal(t, "status before", before.Status, Running)
	d := w.get(id)
	equal(t, "status", d.Status, Completed)
	// Nothing happens to a saga that has ended.
	for _, m := range []message.Message{first, second, foreign} {
		equal(t, "after the end", w.deliver(m)[0].Kind, message.Stale)
	}
	equal(t, "after the end", w.get(id), d)
	equal(t, "outbox", len(w.outbox()), 0)
}

// B90: the same command on two lanes at once has its effect once; the other is stale.
func TestTwoLanesOneSaga(t *testing.T) { bothForms(t, testTwoLanesOneSaga) }

func testTwoLanesOneSaga(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("a", "b", "c"))
	for range 10 {
		w.start(message.NewID())
	}
	for range 3 {
		msgs := w.commands()
		equal(t, "commands", len(msgs), 10)
		var wg sync.WaitGroup
		done, stale := make([]int, 4), make([]int, 4)
		for lane := range 4 {
			wg.Go(func() {
				mine := slices.Clone(msgs)
				if lane%2 == 1 {
					slices.Reverse(mine)
				}
				err := sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
					done[lane], stale[lane] = 0, 0
					for _, o := range w.engine.HandleBatch(ctx, tx, mine) {
						switch o.Kind {
						case message.Done:
							done[lane]++
						case message.Stale:
							stale[lane]++
						}
					}
					return tx.Err()
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		slices.Sort(done)
		slices.Sort(stale)
		equal(t, "done by each lane", done, []int{0, 0, 0, 10})
		equal(t, "stale for each lane", stale, []int{0, 10, 10, 10})
	}
	counts, err := Counts(t.Context(), w.db)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "completed", counts[Completed], 10)
	equal(t, "effects", len(w.effects()), 40)
}

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
		{"unknown type", func() { w.exec(`UPDATE saga_instances SET type = 'journey'`) }, nil, message.Parked, `no definition of saga type "journey"`},
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

// A batch with a step that fails: only its own writes and messages are undone.
func TestFailingStepHarmsNoNeighbour(t *testing.T) { bothForms(t, testFailingStepHarmsNoNeighbour) }

func testFailingStepHarmsNoNeighbour(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("a", "b"))
	ids := []string{w.start("0"), w.start("1"), w.start("2"), w.start("3")}
	s.on("a", func(ctx context.Context, tx *sqltx.Tx) error {
		n := slices.Index(ids, InfoFrom(ctx).SagaID)
		if err := outbox.Add(ctx, tx, message.Message{Exchange: message.EventsExchange, RoutingKey: fmt.Sprint("added ", n)}); err != nil {
			return err
		}
		Emit(ctx, message.Message{Exchange: message.EventsExchange, RoutingKey: fmt.Sprint("emitted ", n)})
		switch n {
		case 1:
			return Fail("no")
		case 2:
			return errPassing
		}
		return nil
	})
	w.done(w.commands()...)
	var statuses []Status
	for _, id := range ids {
		statuses = append(statuses, w.get(id).Status)
	}
	equal(t, "statuses", statuses, []Status{Running, Compensated, Running, Running})
	equal(t, "effects", w.effects(), []string{"a", "a", "compensated (a: no)"})
	var sent []string
	for _, m := range w.outbox() {
		sent = append(sent, m.RoutingKey)
	}
	equal(t, "messages", sent, []string{"added 0", "added 3", "b", "b", "emitted 0", "emitted 3"})
	equal(t, "attempt", w.get(ids[2]).Attempt, 2)
	w.scheduled()
}

// A step that swallows the error of a statement after which the server has ended the
// transaction cannot have the rest committed.
func TestSwallowedDeadlock(t *testing.T) { bothForms(t, testSwallowedDeadlock) }

func testSwallowedDeadlock(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, s.define("a", "b"))
	w.exec(`CREATE PROCEDURE deadlock() SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213`)
	id := w.start("0")
	w.start("1")
	s.on("a", func(ctx context.Context, tx *sqltx.Tx) error {
		_, _ = tx.Exec(ctx, `CALL deadlock()`)
		return nil
	})
	msgs := w.commands()
	_, err := w.try(msgs...)
	if sqltx.Classify(err) != sqltx.Conflict {
		t.Errorf("the batch gave %v, want the conflict", err)
	}
	equal(t, "effects", w.effects(), []string(nil))
	equal(t, "step rows", w.number(`SELECT COUNT(*) FROM saga_steps`), 0)
	equal(t, "calls: it goes no further", s.called(), []string{"a"})
	if d := w.get(id); d.Attempt != 1 || d.CommandID != msgs[0].MessageID {
		t.Errorf("an attempt was spent: %+v", d.Summary)
	}
	s.on("a", nil)
	w.done(msgs...)
}

// What a hook refuses does not half commit.
func TestHookFails(t *testing.T) {
	t.Parallel()
	for _, hook := range []string{"completed", "compensated"} {
		t.Run(hook, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, s.define("a"))
			if hook == "compensated" {
				s.fail("a", Fail("no"), Fail("no"))
			}
			s.fail(hook, errors.New("hook says no"))
			id := w.start("x")
			m := w.command()
			if _, err := w.try(m); err == nil || !strings.Contains(err.Error(), "hook says no") || !strings.Contains(err.Error(), id) {
				t.Errorf("the batch gave %v", err)
			}
			d := w.get(id)
			if d.Status != Running || d.CommandID != m.MessageID || len(d.Steps) != 0 || len(w.effects()) != 0 {
				t.Errorf("half committed: %+v, effects %q", d, w.effects())
			}
			w.done(m) // the hook says yes now
			if got := w.get(id).Status; got == Running {
				t.Errorf("status %s", got)
			}
		})
	}
}

// The hook of the last resort cannot keep a saga from being stopped: it would be stuck.
func TestManualActionHookFails(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]func(context.Context, *sqltx.Tx) error{
		"error": func(context.Context, *sqltx.Tx) error { return errors.New("boom") },
		"panic": func(context.Context, *sqltx.Tx) error { panic("boom") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, s.define("a", "b"))
			s.on("manual action", f)
			parked, undone := w.start("x"), w.start("y")
			msgs := w.commands()
			w.park(msgs[0], "why")
			d := w.get(parked)
			if d.Status != ManualAction || !strings.Contains(d.LastError, "command parked: why") || !strings.Contains(d.LastError, "boom") {
				t.Errorf("parked: %+v", d.Summary)
			}
			w.done(msgs[1])
			s.fail("b", Fail("no"))
			s.fail("undo a", Fail("cannot undo"))
			w.done(w.command())
			w.done(w.command())
			d = w.get(undone)
			if d.Status != ManualAction || !strings.Contains(d.LastError, "cannot undo") || !strings.Contains(d.LastError, "boom") {
				t.Errorf("compensation failed: %+v", d.Summary)
			}
			equal(t, "effects", w.effects(), []string{"a"}) // not the hook's
			// In an ended transaction it is not the hook's fault.
			s.on("manual action", func(ctx context.Context, tx *sqltx.Tx) error { tx.Fail(errors.New("gone")); return tx.Err() })
			id := w.start("z")
			if err := w.tryPark(w.command(), "why"); err == nil {
				t.Error("parked in a transaction that has ended")
			}
			equal(t, "status", w.get(id).Status, Running)
		})
	}
}

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

// One statement each for steps, instances and commands, however large the batch.
func TestWritesOfABatch(t *testing.T) { bothForms(t, testWritesOfABatch) }

func testWritesOfABatch(t *testing.T, s *script) {
	t.Parallel()
	w := newWorld(t, Define("trip", 1, append(s.hooks(), quiet("a"), quiet("b"), quiet("c"))...))
	const n = 20
	for i := range n {
		w.start(fmt.Sprint(i))
	}
	for round := range 3 {
		msgs := w.commands()
		equal(t, "commands", len(msgs), n)
		var writes []string
		err := sqltx.Once(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
			w.engine.HandleBatch(ctx, tx, msgs)
			for _, wr := range tx.Writes() {
				writes = append(writes, strings.Join(strings.Fields(wr.Query)[:3], " "))
			}
			return tx.Err()
		})
		if err != nil {
			t.Fatal(err)
		}
		want := []string{"INSERT INTO saga_steps", "UPDATE (SELECT ?", "INSERT INTO outbox_events"}
		if round == 2 { // the hooks, and no commands
			want = append(slices.Repeat([]string{"INSERT INTO effects"}, n), want[:2]...)
		}
		equal(t, "writes", writes, want)
	}
}

// quiet is a step that writes nothing.
func quiet(name string) Part[trip] {
	return Step(name, Queue(name), func(context.Context, *sqltx.Tx, trip) (struct{}, error) { return struct{}{}, nil }, nil)
}

// locker records what it was asked to lock.
type locker struct{ asked [][]string }

func (l *locker) take(_ context.Context, _ *sqltx.Tx, keys []string) error {
	l.asked = append(l.asked, slices.Clone(keys))
	return nil
}

// Locks are taken once for the whole batch, before any step runs: the sorted union of what the
// steps name. Steps that name another function lock rows of another kind.
func TestLocks(t *testing.T) { bothForms(t, testLocks) }

func testLocks(t *testing.T, s *script) {
	t.Parallel()
	var rows, other locker
	keysOf := func(in trip) []string { return in.Keys }
	takeRows := func(ctx context.Context, tx *sqltx.Tx, keys []string) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.calls) > 0 {
			t.Errorf("locks are taken after %q", s.calls)
		}
		return rows.take(ctx, tx, keys)
	}
	takeOther := func(ctx context.Context, tx *sqltx.Tx, keys []string) error { return other.take(ctx, tx, keys) }
	at := func(name string, options ...StepOption) Part[trip] {
		return Step(name, "q", func(ctx context.Context, tx *sqltx.Tx, in trip) (booking, error) {
			return booking{}, s.do(ctx, tx, name, "")
		}, nil, options...)
	}
	one := Define("one", 1, at("a", Locks(keysOf, takeRows)), at("b", Locks(keysOf, takeRows)))
	two := Define("two", 1, at("a", Locks(keysOf, takeOther)))
	three := Define("three", 1, at("a"))
	w := newWorld(t, one, two, three)
	start := func(d *Definition, keys ...string) {
		t.Helper()
		err := sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
			_, _, err := Start(ctx, tx, d, message.NewID(), trip{Keys: keys})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	start(one, "c", "a")
	start(two, "z", "y")
	start(one, "b", "a", "c")
	start(one)
	start(two, "x", "z")
	start(three, "never")
	start(one, "failed")
	msgs := w.commands()
	msgs[6].Failure = "panic" // it will not be run
	w.done(msgs...)
	equal(t, "rows", rows.asked, [][]string{{"a", "b", "c"}})
	equal(t, "other", other.asked, [][]string{{"x", "y", "z"}})
}

// An error of take ends the batch like one of a statement.
func TestLocksFail(t *testing.T) { bothForms(t, testLocksFail) }

func testLocksFail(t *testing.T, s *script) {
	t.Parallel()
	fail := true
	take := func(context.Context, *sqltx.Tx, []string) error {
		if fail {
			return errors.New("no locks today")
		}
		return nil
	}
	w := newWorld(t, Define("trip", 1, s.part("a", Locks(func(in trip) []string { return []string{"k"} }, take))))
	id := w.start("x")
	m := w.command()
	if _, err := w.try(m); err == nil || !strings.Contains(err.Error(), "no locks today") {
		t.Errorf("the batch gave %v", err)
	}
	equal(t, "calls", s.called(), []string(nil))
	fail = false
	w.done(m)
	equal(t, "status", w.get(id).Status, Completed)
}

// Whatever text a step gives as its error, the transaction takes it.
func TestAnyErrorCanBeStored(t *testing.T) {
	t.Parallel()
	huge := strings.Repeat("é", 100_000)
	for name, text := range map[string]string{"huge": huge, "not UTF-8": "\xff\xfe", "4 bytes": "😀", "empty": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, s.define("a", "b"))
			s.fail("a", errors.New(text)) // retried, so it is stored with the scheduled message too
			s.fail("b", Fail("%s", text))
			s.fail("undo a", Fail("%s", text))
			// What hooks are given they may want to store in a column like ours.
			s.on("manual action", func(context.Context, *sqltx.Tx) error { return nil })
			w.exec(`ALTER TABLE effects MODIFY what LONGBLOB NOT NULL`)
			id := w.start("x")
			w.done(w.command())
			w.done(w.scheduled())
			w.done(w.command())
			w.done(w.command())
			d := w.get(id)
			equal(t, "status", d.Status, ManualAction)
			if name == "4 bytes" && d.LastError != "compensation of step a failed at attempt 1: 😀" {
				t.Errorf("reason %q", d.LastError)
			}
			for _, what := range w.effects() {
				if len(what) > 5000 {
					t.Errorf("a hook was given %d bytes", len(what))
				}
			}
		})
	}
}

// Inputs and results of any shape come back as they were.
func TestValues(t *testing.T) {
	t.Parallel()
	type nested struct {
		Text  string
		Bytes []byte
		Map   map[string]any
		Ptr   *int
		At    time.Time
		Big   int64
	}
	want := nested{
		Text: "書籍 😀 \u0000 <&> \\ '\"", Bytes: []byte{0, 255}, Map: map[string]any{"😀": []any{"x", true, nil}},
		At: time.Date(2026, 11, 29, 12, 0, 0, 123456789, time.UTC), Big: 1<<62 + 1,
	}
	var got []nested
	keep := func(v nested) { got = append(got, v) }
	var empties int
	def := Define("values", 1,
		Step("full", "q", func(_ context.Context, _ *sqltx.Tx, in nested) (nested, error) { keep(in); return in, nil },
			func(_ context.Context, _ *sqltx.Tx, in, done nested) error { keep(in); keep(done); return nil }),
		Step("empty", "q", func(context.Context, *sqltx.Tx, nested) (struct{}, error) { return struct{}{}, nil },
			func(_ context.Context, _ *sqltx.Tx, _ nested, _ struct{}) error { empties++; return nil }),
		Step("nothing", "q", func(context.Context, *sqltx.Tx, nested) (any, error) { return nil, nil },
			func(_ context.Context, _ *sqltx.Tx, _ nested, done any) error {
				if done == nil {
					empties++
				}
				return nil
			}),
		Step("large", "q", func(context.Context, *sqltx.Tx, nested) (string, error) { return strings.Repeat("😀", 1<<18), nil },
			func(_ context.Context, _ *sqltx.Tx, _ nested, done string) error {
				if len(done) == 1<<20 {
					empties++
				}
				return nil
			}),
		Step("fails", "q", func(context.Context, *sqltx.Tx, nested) (int, error) { return 0, Fail("no") }, nil),
	)
	w := newWorld(t, def)
	var id string
	err := sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		id, _, err = Start(ctx, tx, def, "\x00any \xff bytes ", want)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	w.run()
	d := w.get(id)
	equal(t, "status", d.Status, Compensated)
	equal(t, "correlation id", d.CorrelationID, "\x00any \xff bytes ")
	equal(t, "values", got, []nested{want, want, want})
	equal(t, "empty, nothing, large", empties, 3)

	nothing := Define("nothing", 1, Step("a", "q", func(context.Context, *sqltx.Tx, struct{}) (struct{}, error) { return struct{}{}, nil }, nil))
	w = newWorld(t, nothing)
	err = sqltx.WithTx(t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) (err error) {
		id, _, err = Start(ctx, tx, nothing, "x", struct{}{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	w.run()
	equal(t, "status", w.get(id).Status, Completed)
}
