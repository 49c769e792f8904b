package sagatest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"backstep/client/participant"
	"backstep/internal/message"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

func TestRun(t *testing.T) {
	t.Parallel()
	d := saga.Define("trip", 1, step("flight"), step("hotel"), step("car"),
		saga.OnCompleted(func(ctx context.Context, _ *sqltx.Tx, _ trip) error {
			saga.Emit(ctx, message.Message{
				Properties: message.Properties{MessageID: message.NewID(), Type: "trip.booked"},
				Exchange:   message.EventsExchange, RoutingKey: "trip.booked", Body: []byte(`{}`),
			})
			return nil
		}))
	w := New(t, openDatabase(t), d)
	id := w.Start(d, "x", trip{"x"})
	equal(t, "status before", w.Saga(id).Status, saga.Running)
	w.Run()
	equal(t, "status", w.Saga(id).Status, saga.Completed)
	equal(t, "events", []string{w.Events()[0].Type}, []string{"trip.booked"})
	equal(t, "the same again", w.Start(d, "x", trip{"x"}), id)
	if err := free(w, w.Saga(id)); err != nil {
		t.Error(err)
	}
}

// What is another service's in one version may be done here in the next.
func TestTwoVersions(t *testing.T) {
	t.Parallel()
	old := saga.Define("trip", 1, step("flight"), saga.RemoteStep[trip, ticket]("hotel", "far"), step("car"))
	d := saga.Define("trip", 2, step("flight"), step("hotel"), step("car"))
	w := New(t, openDatabase(t), old, d)
	w.Participant("far", func(_ context.Context, c participant.Command) (participant.Reply, error) {
		return Completed(ticket{}).To(c), nil
	})
	for _, d := range []*saga.Definition{old, d} {
		id := w.Start(d, fmt.Sprint(d.Version), trip{"x"})
		w.Run()
		equal(t, fmt.Sprintf("version %d", d.Version), w.Saga(id).Status, saga.Completed)
	}
	equal(t, "hotels", w.Int(`SELECT free FROM seats WHERE what = 'hotel'`), 9)
}

// Retries are waited for, on a clock that nobody else waits for.
func TestRunWaitsForRetries(t *testing.T) {
	t.Parallel()
	d := saga.Define("trip", 1, step("flight"), step("hotel", saga.Retry(3, time.Hour), saga.RetryCap(100*time.Hour)), step("car"))
	w := New(t, openDatabase(t), d)
	passing := w.Start(d, "passing", trip{"x"})
	w.FailStep("hotel", errors.New("busy"))
	w.Run()
	s := w.Saga(passing)
	equal(t, "status", s.Status, saga.Completed)
	equal(t, "attempts", s.Steps[1].Attempts, 2)
	refused := w.Start(d, "refused", trip{"x"})
	w.FailStep("hotel", saga.Fail("full"))
	w.Run()
	s = w.Saga(refused)
	equal(t, "status", s.Status, saga.Compensated)
	equal(t, "reason", s.LastError, "hotel: full")
	equal(t, "hotels", w.Int(`SELECT free FROM seats WHERE what = 'hotel'`), 9)
}

// A panic counts as an attempt, as in a worker.
func TestRunPanic(t *testing.T) {
	t.Parallel()
	n := 0
	d := saga.Define("trip", 1, step("flight"), saga.Step("hotel", "hotel", func(ctx context.Context, tx *sqltx.Tx, in trip) (ticket, error) {
		if n++; n == 1 {
			panic("oh")
		}
		return take("hotel")(ctx, tx, in)
	}, giveBack("hotel")))
	w := New(t, openDatabase(t), d)
	id := w.Start(d, "x", trip{"x"})
	w.Run()
	s := w.Saga(id)
	equal(t, "status", s.Status, saga.Completed)
	equal(t, "attempts", s.Steps[1].Attempts, 2)
	equal(t, "hotels", w.Int(`SELECT free FROM seats WHERE what = 'hotel'`), 9)
}

// Deadlines pass when the test says so, in their order with what is due.
func TestAdvance(t *testing.T) {
	t.Parallel()
	d := remoteTrip(saga.Deadline(time.Hour), saga.Retry(2, time.Microsecond))
	w := New(t, openDatabase(t), d)
	id := w.Start(d, "x", trip{"x"})
	w.Run()
	s := w.Saga(id)
	equal(t, "step", s.Steps[1].Status, saga.StepWaiting)
	w.Advance(59 * time.Minute)
	equal(t, "attempt", w.Saga(id).Attempt, 1)
	w.Advance(2 * time.Minute)
	equal(t, "attempt", w.Saga(id).Attempt, 2)
	w.Advance(time.Hour)
	s = w.Saga(id)
	equal(t, "it is undone", string(s.Steps[1].Status)+" "+string(s.Direction), "COMPENSATING compensate")
	w.Reply("hotel", Completed(nil))
	w.Run()
	equal(t, "status", w.Saga(id).Status, saga.Compensated)
}

func TestReplyAndCancel(t *testing.T) {
	t.Parallel()
	d := remoteTrip()
	w := New(t, openDatabase(t), d)
	id := w.Start(d, "x", trip{"x"})
	w.Run()
	w.Reply("hotel", Completed(ticket{1}))
	equal(t, "step", w.Saga(id).CurrentStep, 2)
	w.Cancel(id, "ill")
	w.Run()
	equal(t, "command", string(w.Command("hotel").Body), `{"input":{"Name":"x"},"result":{"Seats":1}}`)
	w.Reply("hotel", Completed(nil))
	w.Run()
	s := w.Saga(id)
	equal(t, "status", s.Status, saga.Compensated)
	equal(t, "reason", s.LastError, "cancelled: ill")

	id = w.Start(d, "y", trip{"y"})
	w.Participant("hotels", func(_ context.Context, c participant.Command) (participant.Reply, error) {
		return Refused("full").To(c), nil
	})
	w.Run()
	equal(t, "reason", w.Saga(id).LastError, "hotel: full")
}
