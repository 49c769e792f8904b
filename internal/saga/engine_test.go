package saga

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

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

// B96: each shape of definition completes too, in the transaction of the last effect, and is compensated
// in that of the last one if its last step fails. One of no steps is refused: TestDefinePanicsOnMistakes.
func TestEveryShapeCompletes(t *testing.T) {
	t.Parallel()
	for _, steps := range [][]string{{"a"}, {"a!"}, {"a", "b!"}, {"a!", "b!"}, {"a!", "b"}} {
		t.Run(fmt.Sprint(steps), func(t *testing.T) {
			t.Parallel()
			var s script
			w := newWorld(t, s.define(steps...))
			last := strings.TrimSuffix(steps[len(steps)-1], "!")
			for end, fails := range map[Status]error{Completed: nil, Compensated: Fail("no")} {
				w.exec(`DELETE FROM effects`)
				s.fail(last, fails)
				id := w.start(string(end))
				for next := []message.Message{w.command()}; len(next) > 0; next = w.commands() {
					before, effects := w.get(id), w.effects()
					tx, err := w.db.BeginTx(t.Context(), nil)
					w.must(err)
					w.engine.HandleBatch(t.Context(), sqltx.Join(tx), next)
					equal(t, "before the commit", []any{w.get(id), w.effects()}, []any{before, effects})
					w.must(tx.Commit())
					taken := w.taken
					ended := len(w.commands()) == 0
					w.taken = taken
					equal(t, "it has ended", w.get(id).Status == end, ended)
					list := w.effects()
					equal(t, "the hook has run", len(list) > 0 && strings.HasPrefix(list[len(list)-1], strings.ToLower(string(end))), ended)
				}
			}
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
