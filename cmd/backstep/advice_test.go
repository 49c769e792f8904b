package main

import (
	"strings"
	"testing"
	"time"

	"backstep/internal/handlers"
	"backstep/internal/message"
	"backstep/internal/outbox"
	"backstep/internal/saga"
)

func detail(s saga.Status, step int, command string, steps ...saga.StepState) saga.Detail {
	return saga.Detail{
		Summary:   saga.Summary{Type: handlers.PlaceOrder.Type, Version: handlers.PlaceOrder.Version, Status: s, CurrentStep: step, Attempt: 2},
		CommandID: command, Steps: steps,
	}
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
		want  string
	}{
		{"completed", detail(saga.Completed, 2, ""), nil, "nothing to do"},
		{"retry", detail(saga.Running, 1, "m"), []outbox.Place{{Status: "SCHEDULED", Age: -3 * time.Second, LastError: "gateway away"}},
			"attempt 2 is due in 3s, because the one before failed: gateway away"},
		{"no relay", detail(saga.Running, 1, "m"), []outbox.Place{{Status: "PENDING", Age: time.Minute}}, "waited for a relay for 1m0s"},
		{"refused", detail(saga.Running, 1, "m"), []outbox.Place{{Status: "PENDING", LastError: "NO_ROUTE"}}, "NO_ROUTE"},
		{"no worker", detail(saga.Compensating, 1, "m"), []outbox.Place{{Status: "PUBLISHED", RoutingKey: "payment"}}, "queue payment"},
		{"lost", detail(saga.Running, 1, "m"), nil, "in no table"},
		{"parked by a worker", detail(saga.ManualAction, 1, "m"),
			[]outbox.Place{{Status: "PUBLISHED", Exchange: message.CommandsExchange, RoutingKey: "payment"}, {Status: "PUBLISHED", Exchange: message.ParkedExchange, RoutingKey: "payment"}},
			"in the queue payment.parked: backstep parked replay m --queue payment --reason"},
		{"parked by the relay", detail(saga.ManualAction, 1, "m"),
			[]outbox.Place{{Status: "PARKED", Exchange: message.CommandsExchange, RoutingKey: "payment"}}, "is PARKED: backstep outbox requeue m --reason"},
		{"dropped", detail(saga.ManualAction, 1, "m"), nil, "in no table. It was dropped, or published longer ago than rows are kept: backstep outbox show m"},
		{"compensation failed", detail(saga.ManualAction, 0, ""), nil, "a compensation failed for good"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := strings.Join(advice(tt.d, tt.place), "\n"); !strings.Contains(got, tt.want) {
				t.Errorf("advice %q, want %q", got, tt.want)
			}
		})
	}
}
