package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
)

func detail(s saga.Status, step int, command string, steps ...saga.StepState) saga.Detail {
	direction := saga.Execute
	if s == saga.Compensating || s == saga.Compensated {
		direction = saga.Compensate
	}
	return saga.Detail{
		Summary: saga.Summary{ID: "the-saga", Type: handlers.PlaceOrder.Type, Version: handlers.PlaceOrder.Version,
			Status: s, Direction: direction, CurrentStep: step, Attempt: 2},
		CommandID: command, Steps: steps, Payload: []byte("{}"),
	}
}

// undoing is a saga on its way back.
func undoing(d saga.Detail) saga.Detail {
	d.Direction = saga.Compensate
	return d
}

// onward is a saga that ended on its way forward.
func onward(d saga.Detail) saga.Detail {
	d.Direction = saga.Execute
	return d
}

// called is a saga whose step has called another system, at an attempt.
func called(d saga.Detail, status string, attempt int) saga.Detail {
	d.Attempt, d.CallOpen = attempt, status != "REFUSED"
	d.Calls = []saga.ExternalCall{{Step: d.CurrentStep, Direction: d.Direction, Status: status}}
	return d
}

func mayHaveHappened(d saga.Detail) saga.Detail {
	d.Calls = append(d.Calls, saga.ExternalCall{Step: d.CurrentStep, Direction: saga.Execute, Status: "OPEN"})
	return d
}

func cancelled(d saga.Detail) saga.Detail {
	d.CancelReason = "cancelled: sick"
	return d
}

func resolved(d saga.Detail) saga.Detail {
	d.Actions = []saga.Action{{Action: "resolve", Actor: "ops", Reason: "ticket 12"}}
	return d
}

// handedBack are the places of a message that a worker has handed back twice.
func handedBack(why string) []outbox.Place {
	since := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	place := func(status string, at, since time.Time) outbox.Place {
		return outbox.Place{Status: status, Exchange: message.CommandsExchange, RoutingKey: "payment", At: at, Deferred: since}
	}
	due := place("SCHEDULED", since.Add(10*time.Second), since)
	due.Age, due.LastError = -3*time.Second, why
	return []outbox.Place{place("PUBLISHED", since, time.Time{}), place("PUBLISHED", since.Add(5*time.Second), since), due}
}

// allDone are the steps of a saga that has run to its end.
var allDone = []saga.StepState{
	{Name: "reserve-stock", Status: saga.StepCompleted}, {Order: 1, Name: "charge-payment", Status: saga.StepCompleted}, {Order: 2, Name: "create-shipment", Status: saga.StepCompleted},
}

// skipped is a saga whose second step, or its compensation, was left out.
func skipped(d saga.Detail, at saga.Direction) saga.Detail {
	d.Steps = allDone
	if d.Status == saga.Compensated {
		d.Steps = []saga.StepState{{Name: "reserve-stock", Status: saga.StepCompensated}, {}}
	}
	d.Steps = slices.Clone(d.Steps)
	d.Steps[1] = saga.StepState{Order: 1, Name: "charge-payment", Status: saga.StepSkipped}
	if at == saga.Execute {
		d.LeftOut = 1 << 1
	}
	return d
}

// refusals are what a saga's definition has against an end by hand, by the status it was to end in.
type refusals map[saga.Status]string

// offered are what a saga that cannot be asked would offer: a retry of what waits for its time besides what its state
// allows, without what its definition is against.
func offered(d saga.Detail, places []outbox.Place, no refusals) offers {
	can := allowed(d)
	if _, err := sagas().Definition(d.Type, d.Version); err != nil {
		can.unfit = err.Error()
	}
	if d.Status == saga.Running && slices.ContainsFunc(places, func(p outbox.Place) bool { return p.Status == "SCHEDULED" }) {
		retry := saga.Operation{Verb: saga.VerbRetry, Step: "charge-payment", Direction: saga.Execute}
		can.list = slices.Insert(can.list, 0, saga.Offer{Operation: retry})
	}
	for i, o := range can.list {
		if why := no[o.As]; why != "" && o.Verb == saga.VerbResolve {
			can.list[i].Against = &saga.RefusedError{Why: why}
		}
	}
	return can
}

func TestWithPending(t *testing.T) {
	done := func(i int, s saga.StepStatus) saga.StepState { return saga.StepState{Order: i, Name: "row", Status: s} }
	unknown := detail(saga.Running, 1, "m", done(0, saga.StepCompleted))
	unknown.Type = "not-ours"
	tests := []struct {
		name string
		d    saga.Detail
		want string
	}{
		{"new", detail(saga.Running, 0, "m"), "RUNNING PENDING PENDING"},
		{"second step", detail(saga.Running, 1, "m", done(0, saga.StepCompleted)), "COMPLETED RUNNING PENDING"},
		{"being undone", detail(saga.Compensating, 0, "m", done(0, saga.StepCompleted), done(1, saga.StepFailed)), "COMPENSATING FAILED PENDING"},
		{"ended", detail(saga.Compensated, 0, "", done(0, saga.StepCompensated), done(1, saga.StepFailed)), "COMPENSATED FAILED PENDING"},
		{"parked", detail(saga.ManualAction, 1, "m", done(0, saga.StepCompleted)), "COMPLETED PENDING PENDING"},
		{"a definition we do not know", unknown, "COMPLETED"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			for _, s := range withPending(tt.d) {
				got = append(got, string(s.Status))
			}
			if s := strings.Join(got, " "); s != tt.want {
				t.Errorf("steps %s, want %s", s, tt.want)
			}
		})
	}
}

func TestAdvice(t *testing.T) {
	tests := []struct {
		name  string
		d     saga.Detail
		place []outbox.Place
		no    refusals
		want  string
	}{
		{"completed", detail(saga.Completed, 2, "", allDone...), nil, nil, "nothing to do"},
		{"retry", detail(saga.Running, 1, "m"), []outbox.Place{{Status: "SCHEDULED", Age: -3 * time.Second, LastError: "gateway away"}}, nil,
			"attempt 2 is due in 3s, because the one before failed: gateway away"},
		{"handed back", called(detail(saga.Running, 1, "m"), "OPEN", 1), handedBack("it has called a system"), nil,
			`what became of it is not known yet.
Since 2026-01-02 12:00:00.000 UTC a worker of queue payment hands the message back, and no attempt is spent: it has called a system. It comes again in 3s. ` +
				`It goes on when a worker with the BACKSTEP_PAYMENT_URL of the one that made the call consumes queue payment; after 15 minutes the message is parked. A retry does not help: it asks the same workers.
What you can do (each with --dry-run first):
  backstep saga cancel`},
		{"handed back by an older worker", detail(saga.Running, 1, "m"), handedBack("this worker does not know version 2"), nil,
			"It goes on when a worker that is set up for it, or of the release that knows the definition, consumes queue payment"},
		{"handed back, and on its way again", detail(saga.Running, 1, "m"), handedBack("")[:2], nil, "Since 2026-01-02 12:00:00.000 UTC workers hand it back; their log says why (message deferred).\nWhat"},
		{"no relay", detail(saga.Running, 1, "m"), []outbox.Place{{Status: "PENDING", Age: time.Minute}}, nil,
			"waited for a relay for 1m0s. An earlier one of the saga goes first, or no relay is running (backstep outbox relays), or none reaches the broker. See backstep outbox show m.\nWhat"},
		{"refused", detail(saga.Running, 1, "m"), []outbox.Place{{Status: "PENDING", LastError: "530 full", Age: time.Minute}}, nil,
			"The message has waited for 1m0s, for the broker refused it: 530 full. It is tried again every few seconds, and parked after a while. See backstep outbox show m.\nWhat"},
		{"returned", detail(saga.Running, 1, "m"), []outbox.Place{{Status: "PENDING", Exchange: "backstep.commands", RoutingKey: "hotel", LastError: "returned: 312 NO_ROUTE"}}, nil,
			"refused it: returned: 312 NO_ROUTE. No queue is bound under hotel on exchange backstep.commands: declare it, and bind it. It"},
		{"returned for long", detail(saga.Running, 1, "m"), []outbox.Place{{Status: "PARKED", Exchange: "backstep.commands", RoutingKey: "hotel", LastError: "returned: 312 NO_ROUTE"}}, nil,
			"and parked it: returned: 312 NO_ROUTE. No queue is bound under hotel on exchange backstep.commands: declare it, and bind it.\nWhat"},
		{"no worker", detail(saga.Compensating, 1, "m"), []outbox.Place{{Status: "PUBLISHED", RoutingKey: "payment"}}, nil, "queue payment"},
		{"lost", detail(saga.Running, 1, "m"), nil, nil, "in no table"},
		{"lost: commands", detail(saga.Running, 1, "m"), nil, nil, `(1 min, unless they are told else).
What you can do (each with --dry-run first):
  backstep saga skip`},
		{"parked by a worker", detail(saga.ManualAction, 1, "m"),
			[]outbox.Place{{Status: "PUBLISHED", Exchange: message.CommandsExchange, RoutingKey: "payment"}, {Status: "PUBLISHED", Exchange: message.ParkedExchange, RoutingKey: "payment"}}, nil,
			"in the queue payment.parked: backstep parked replay m --queue payment --reason"},
		{"parked by the relay", detail(saga.ManualAction, 1, "m"),
			[]outbox.Place{{Status: "PARKED", Exchange: message.CommandsExchange, RoutingKey: "payment"}}, nil, "is PARKED: backstep outbox requeue m --reason"},
		{"dropped", detail(saga.ManualAction, 1, "m"), nil, nil, "in no table. It was dropped, or published longer ago than rows are kept: backstep outbox show m"},
		{"compensation failed", undoing(detail(saga.ManualAction, 0, "")), nil, nil, "step reserve-stock failed for good, so what the step did stands. Cure"},
		{"compensation failed: commands", undoing(detail(saga.ManualAction, 0, "")), nil, nil, `What you can do (each with --dry-run first):
  backstep saga retry the-saga --reason '…'    # try the compensation of step reserve-stock now
  backstep saga skip the-saga --step reserve-stock --compensation --reason '…'    # leave out the compensation of step reserve-stock
  backstep saga resolve the-saga --as compensated --reason '…'    # you have undone by hand what it did`},
		{"compensation tried often enough", called(undoing(detail(saga.ManualAction, 1, "")), "OPEN", 5), nil, nil,
			"the compensation of step charge-payment has used up its 5 attempts. Its call to another system may have happened: nobody knows. Ask"},
		{"compensation that may have happened: no skip", called(undoing(detail(saga.ManualAction, 1, "")), "OPEN", 5), nil, nil, `first):
  backstep saga retry the-saga --reason '…'    # try the compensation of step charge-payment now
  backstep saga resolve the-saga --as compensated`},
		{"compensation has happened", called(undoing(detail(saga.ManualAction, 1, "")), "DONE", 5), nil, nil, "Its call to another system has happened"},
		{"compensation refused", called(undoing(detail(saga.ManualAction, 1, "")), "REFUSED", 5), nil, nil,
			"failed for good, for the other system refused its call: its answer says whether what the step did stands. Cure"},
		{"compensation refused of what may have happened", mayHaveHappened(called(undoing(detail(saga.ManualAction, 1, "")), "REFUSED", 5)), nil, nil,
			"refused its call. Nobody knows whether the call that was to be undone has happened: ask that system. Cure"},
		{"to be resolved", detail(saga.ManualAction, 1, ""), nil, nil, `
  backstep saga resolve the-saga --as completed --reason '…'    # you have put it right by hand
  backstep saga resolve the-saga --as compensated --reason '…'    # you have undone by hand what it did`},
		{"resolve that is refused", detail(saga.ManualAction, 1, ""), nil, refusals{saga.Completed: "not shipped"}, `    # undo what it did
  backstep saga resolve the-saga --as compensated`},
		{"no resolve is accepted", detail(saga.ManualAction, 1, ""), nil, refusals{saga.Completed: "ship it first", saga.Compensated: "refund it first"}, `    # undo what it did
Its definition refuses, until that is put right:
  resolve --as completed: ship it first
  resolve --as compensated: refund it first`},
		{"call under way", called(detail(saga.Running, 1, "m"), "OPEN", 1), []outbox.Place{{Status: "PUBLISHED"}}, nil, "call to another system is being made"},
		{"cancel noted", cancelled(called(detail(saga.Running, 1, "m"), "OPEN", 1)), nil, nil, "to be undone is noted (cancelled: sick)"},
		{"cancel noted, and the call has failed", cancelled(called(detail(saga.Running, 1, "m"), "OPEN", 2)), []outbox.Place{{Status: "SCHEDULED", Age: -3 * time.Second, LastError: "HTTP 500"}}, nil,
			`when its message comes again, as if the call had been made: no other is made.
Its call has failed, so it is undone in 3s: HTTP 500
What you can do (each with --dry-run first):
  backstep saga retry the-saga --reason '…'    # undo it now`},
		{"cancelled", cancelled(detail(saga.Compensated, 0, "")), nil, nil, "It was undone as was asked for (cancelled: sick); there"},
		{"undone", detail(saga.Compensated, 0, ""), nil, nil, "because of the failure above; there is nothing to do"},
		{"resolved", resolved(detail(saga.Compensated, 1, "", saga.StepState{Name: "reserve-stock", Status: saga.StepCompleted}, saga.StepState{Order: 1, Name: "charge-payment", Status: saga.StepCompensating})), nil, nil,
			"It was resolved by hand by ops (ticket 12); not undone, unless that was done by hand: charge-payment, reserve-stock."},
		{"resolved, and begun to be undone", resolved(undoing(detail(saga.Completed, 0, "", saga.StepState{Name: "reserve-stock", Status: saga.StepCompensating}, saga.StepState{Order: 1, Name: "charge-payment", Status: saga.StepFailed}))), nil, nil,
			"(ticket 12); not run, unless that was done by hand: charge-payment, create-shipment; undone, or begun to be, unless that was done again by hand: reserve-stock."},
		{"resolved, and its call may have happened", resolved(called(onward(detail(saga.Compensated, 1, "", saga.StepState{Name: "reserve-stock", Status: saga.StepCompleted}, saga.StepState{Order: 1, Name: "charge-payment", Status: saga.StepRunning})), "OPEN", 1)), nil, nil,
			"(ticket 12); not undone, unless that was done by hand: charge-payment, reserve-stock."},
		{"resolved, and its call was refused", resolved(called(onward(detail(saga.Compensated, 1, "", saga.StepState{Name: "reserve-stock", Status: saga.StepCompleted}, saga.StepState{Order: 1, Name: "charge-payment", Status: saga.StepRunning})), "REFUSED", 1)), nil, nil,
			"(ticket 12); not undone, unless that was done by hand: reserve-stock."},
		{"a step was skipped", skipped(detail(saga.Completed, 2, ""), saga.Execute), nil, nil, "It has completed; not run, unless that was done by hand: charge-payment.\nWhat"},
		{"a compensation was skipped", skipped(cancelled(detail(saga.Compensated, 0, "")), saga.Compensate), nil, nil,
			"It was undone as was asked for (cancelled: sick); not undone, unless that was done by hand: charge-payment."},
		{"a step was skipped, and then nothing of it undone", skipped(detail(saga.Compensated, 0, ""), saga.Execute), nil, nil,
			"failure above; left out, so not undone if that was done by hand: charge-payment."},
		{"resolved behind a step that was skipped", resolved(skipped(detail(saga.Completed, 2, ""), saga.Execute)), nil, nil, "(ticket 12); not run, unless that was done by hand: charge-payment."},
		{"waits: commands", detail(saga.Running, 1, "m"), []outbox.Place{{Status: "SCHEDULED"}}, nil, "backstep saga retry the-saga"},
		{"failed past the pivot", detail(saga.ManualAction, 2, ""), nil, nil, "there is no way back"},
		{"at work: commands", detail(saga.Running, 1, "m"), []outbox.Place{{Status: "PENDING"}}, nil, `first):
  backstep saga skip the-saga --step charge-payment --reason '…'    # leave out step charge-payment
  backstep saga cancel the-saga --reason '…'    # undo what it did`},
		{"completed: commands", detail(saga.Completed, 2, "", allDone...), nil, nil, "backstep saga compensate the-saga --reason '…'    # undo it all the same"},
		{"unknown", saga.Detail{Summary: saga.Summary{Type: "not-ours", Version: 1, Status: saga.Running}, CommandID: "m"}, nil, nil,
			"This binary does not know its definition"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := strings.Join(advice(tt.d, tt.place, nil, offered(tt.d, tt.place, tt.no)), "\n"); !strings.Contains(got, tt.want) {
				t.Errorf("advice %q, want %q", got, tt.want)
			}
		})
	}
}

// Where workers are with the queue tells why a message in it waits.
func TestQueueAdvice(t *testing.T) {
	now := time.Now()
	p := outbox.Place{Status: "PUBLISHED", Exchange: message.CommandsExchange, RoutingKey: "payment", At: now, Age: time.Minute}
	for want, consumers := range map[string][]saga.Consumer{
		"queue payment 1m0s ago, and no worker that consumes it":                     nil,
		"consumed by 2 workers, and what was taken last was published 5s before it.": {{Latest: now.Add(-5 * time.Second)}, {IdleSince: now, Latest: now.Add(-time.Hour)}},
		"consumed by 1 worker, with nothing in hand. Either it has just been worked off, or it was lost, as by a purge, or the broker has dead-lettered it (then backstep parked list --queue payment has it): the workers send it again by themselves, when they have had nothing in hand, or only later messages, for BACKSTEP_RESCUE_AFTER": {{IdleSince: now}},
		"consumed by 1 worker: one has it in hand": {{Latest: now.Add(time.Second)}},
	} {
		if got := strings.Join(advice(detail(saga.Running, 1, "m"), []outbox.Place{p}, consumers, allowed(detail(saga.Running, 1, "m"))), "\n"); !strings.Contains(got, want) {
			t.Errorf("advice %q, want %q", got, want)
		}
	}
}
