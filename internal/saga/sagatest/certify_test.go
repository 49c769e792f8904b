package sagatest

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	"backstep/client/participant"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// hotel is a participant that keeps the rules.
var hotel = participant.Step[trip, ticket]{
	Execute: func(ctx context.Context, tx *sql.Tx, _ participant.Info, _ trip) (ticket, error) {
		_, err := tx.ExecContext(ctx, moveSQL, 1, "hotel")
		return ticket{1}, err
	},
	Compensate: func(ctx context.Context, tx *sql.Tx, _ participant.Info, _ trip, done ticket) error {
		_, err := tx.ExecContext(ctx, moveSQL, -done.Seats, "hotel")
		return err
	},
}

// remoteTrip has its hotel booked by somebody else.
func remoteTrip(options ...saga.StepOption) *saga.Definition {
	return saga.Define("trip", 1, step("flight"), saga.RemoteStep[trip, ticket]("hotel", "hotels", options...), step("car"))
}

// gateway books hotels outside of any transaction, once for each key.
type gateway struct {
	db   *sql.DB
	made map[string]string
}

func (g gateway) book(ctx context.Context, info saga.Info, _ trip) (ticket, error) {
	switch g.made[info.SagaID] {
	case "cancelled":
		return ticket{}, saga.Fail("cancelled before it was booked")
	case "":
		g.made[info.SagaID] = "booked"
		_, err := g.db.ExecContext(ctx, moveSQL, 1, "hotel")
		return ticket{1}, err
	}
	return ticket{1}, nil
}

func (g gateway) cancel(ctx context.Context, info saga.Info, _ trip, _ ticket) (_ ticket, err error) {
	if g.made[info.SagaID] == "booked" {
		_, err = g.db.ExecContext(ctx, moveSQL, -1, "hotel")
	}
	g.made[info.SagaID] = "cancelled"
	return ticket{}, err
}

func (g gateway) trip() *saga.Definition {
	return saga.Define("trip", 1, step("flight"), saga.Step("hotel", "hotel",
		func(ctx context.Context, _ *sqltx.Tx, _ trip) (ticket, error) { return saga.Prepared[ticket](ctx) },
		func(context.Context, *sqltx.Tx, trip, ticket) error { return nil },
		saga.Prepare(g.book), saga.PrepareCompensation(g.cancel), saga.Retry(3, time.Second)), step("car"))
}

func plan(db *sql.DB, p Participant) Plan {
	return Plan{
		Input: trip{"x"}, Check: free,
		Setup: func(w *World) {
			refill(w.t, db)
			exec(w.t, db, `DELETE FROM backstep_barriers`)
			w.Participant("hotels", p)
		},
	}
}

// What is right is found to be, with every option that changes how a saga ends.
func TestCertifySound(t *testing.T) {
	for name, d := range map[string]*saga.Definition{
		"pivot":         saga.Define("trip", 1, step("flight"), step("hotel", saga.Pivot()), saga.Step[trip, ticket]("car", "car", take("car"), nil)),
		"deadlines":     saga.Define("trip", 1, step("flight", saga.Deadline(time.Minute)), step("hotel", saga.Retry(1, 1)), step("car"), saga.Within[trip](time.Hour)),
		"remote":        remoteTrip(saga.Retry(3, time.Second)),
		"remote, once":  remoteTrip(),
		"remote pivot":  saga.Define("trip", 1, step("flight"), saga.RemoteStep[trip, ticket]("hotel", "hotels", saga.Pivot(), saga.NothingToUndo()), saga.Step[trip, ticket]("car", "car", take("car"), nil)),
		"call":          nil, // it needs the database
		"remote behind": saga.Define("trip", 1, step("flight"), step("car", saga.Pivot()), saga.RemoteStep[trip, ticket]("hotel", "hotels", saga.NothingToUndo())),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := openDatabase(t)
			p := plan(db, Service(db, hotel))
			if name == "call" {
				d = gateway{db, map[string]string{}}.trip()
			}
			p.Pairs = 15
			Certify(t, db, d, p)
		})
	}
}

// What is wrong in known ways is found, and the shortest way there is told.
func TestCertifyFindsPlantedBugs(t *testing.T) {
	open := func(t *testing.T) (*sql.DB, Participant) {
		db := openDatabase(t)
		return db, func(ctx context.Context, c participant.Command) (participant.Reply, error) {
			return hotel.Handle(ctx, db, c)
		}
	}
	find := func(t *testing.T, db *sql.DB, d *saga.Definition, p Plan, want string) {
		t.Helper()
		f := newCertifier(t, db, d, p).search()
		if f == nil {
			t.Fatal("nothing was found")
		}
		if got := f.String(); !strings.Contains(got, want) {
			t.Errorf("found\n%s\nwant\n%s", got, want)
		}
	}
	t.Run("a step writes outside of its transaction", func(t *testing.T) {
		t.Parallel()
		db, p := open(t)
		outside := func(ctx context.Context, _ *sqltx.Tx, _ trip) (ticket, error) {
			_, err := db.ExecContext(ctx, moveSQL, 1, "hotel")
			return ticket{1}, err
		}
		d := saga.Define("trip", 1, step("flight"), saga.Step("hotel", "hotel", outside, giveBack("hotel")), step("car"))
		find(t, db, d, plan(db, p), `with one fault:
  1. flight: done
  2. ! hotel: it does its work, and then fails for good
  3. undo flight: done
Then the saga is COMPENSATED, and 9 hotel seats are free, not 10`)
	})
	t.Run("the last compensation, which only an operator has run, gives back too much", func(t *testing.T) {
		t.Parallel()
		db, p := open(t)
		tooMuch := func(ctx context.Context, tx *sqltx.Tx, _ trip, _ ticket) error {
			_, err := tx.Exec(ctx, moveSQL, -2, "car")
			return err
		}
		d := saga.Define("trip", 1, step("flight"), step("hotel"), saga.Step("car", "car", take("car"), tooMuch))
		find(t, db, d, plan(db, p), `with one fault:
  1. flight: done
  2. hotel: done
  3. car: done
  4. ! an operator has the completed saga undone
  5. undo car: done
  6. undo hotel: done
  7. undo flight: done
Then the saga is COMPENSATED, and 11 car seats are free, not 10`)
	})
	t.Run("it does not complete without a fault either", func(t *testing.T) {
		t.Parallel()
		db, p := open(t)
		never := func(context.Context, *sqltx.Tx, trip) (ticket, error) { return ticket{}, saga.Fail("sold out") }
		d := saga.Define("trip", 1, step("flight"), saga.Step[trip, ticket]("car", "car", never, nil))
		find(t, db, d, plan(db, p), `without any fault:
  1. flight: done
  2. car: not done
  3. undo flight: done
Then the saga is COMPENSATED: car: sold out; give the Plan an Input, and a Setup, with which it completes`)
	})
	t.Run("an action is not undone", func(t *testing.T) {
		t.Parallel()
		db, p := open(t)
		d := saga.Define("trip", 1, step("flight"), saga.Step[trip, ticket]("hotel", "hotel", take("hotel"), nil), step("car"))
		find(t, db, d, plan(db, p), `with one fault:
  1. flight: done
  2. hotel: done
  3. ! car: it does its work, and then fails for good
  4. undo flight: done
Then the saga is COMPENSATED, and 9 hotel seats are free, not 10`)
	})
	t.Run("a participant without a barrier does a copy again", func(t *testing.T) {
		t.Parallel()
		db, _ := open(t)
		find(t, db, remoteTrip(), plan(db, func(ctx context.Context, c participant.Command) (participant.Reply, error) {
			n := 1
			if c.Headers["x-direction"] == "compensate" {
				n = -1
			}
			_, err := db.ExecContext(ctx, moveSQL, n, "hotel")
			return Completed(ticket{1}).To(c), err
		}), `with one fault:
  1. flight: done
  2. ! hotel: the service does it and crashes before its answer is out: completed
  3. hotel again: completed
  4. reply to hotel: done
  5. car: done
Then the saga is COMPLETED, and 8 hotel seats are free, not 9`)
	})
	t.Run("a compensation gives back what was not taken", func(t *testing.T) {
		t.Parallel()
		db, _ := open(t)
		done := map[string]bool{} // by saga and direction: no copy is done again
		find(t, db, remoteTrip(), plan(db, func(ctx context.Context, c participant.Command) (participant.Reply, error) {
			direction := c.Headers["x-direction"].(string)
			if key := c.Headers["x-saga-id"].(string) + direction; done[key] {
				return Completed(ticket{1}).To(c), nil
			} else {
				done[key] = true
			}
			n := 1
			if direction == "compensate" {
				n = -1
			}
			_, err := db.ExecContext(ctx, moveSQL, n, "hotel")
			return Completed(ticket{1}).To(c), err
		}), `with one fault:
  1. flight: done
  2. ! hotel: this time not, says the service, and has not done it
  3. reply to hotel: done
  4. undo hotel: completed
  5. reply to undo hotel: done
  6. undo flight: done
Then the saga is COMPENSATED, and 11 hotel seats are free, not 10`)
	})
	both := func(p Plan) Plan { // without the car
		p.Pairs, p.Check = 1000, func(w *World, s saga.Detail) error {
			w.Exec(`UPDATE seats SET free = ? WHERE what = 'car'`, map[saga.Status]int{saga.Completed: 9, saga.Compensated: 10}[s.Status])
			return free(w, s)
		}
		return p
	}
	t.Run("only two faults show it", func(t *testing.T) {
		t.Parallel()
		db, p := open(t)
		tries := map[string]int{}
		unlucky := func(ctx context.Context, tx *sqltx.Tx, in trip, done ticket) error {
			id := saga.InfoFrom(ctx).SagaID
			if tries[id]++; tries[id] > 1 { // when it is tried again
				done.Seats++
			}
			return giveBack("flight")(ctx, tx, in, done)
		}
		d := saga.Define("trip", 1, saga.Step("flight", "flight", take("flight"), unlucky, saga.Retry(1, 1)), step("hotel", saga.Retry(1, 1)))
		find(t, db, d, both(plan(db, p)), `with two faults:
  1. flight: done
  2. ! hotel: it does its work, and then fails
  3. ! undo flight: the worker crashes before it commits
  4. undo flight again: done
Then the saga is COMPENSATED, and 11 flight seats are free, not 10`)
	})
	t.Run("rows nobody checks", func(t *testing.T) {
		t.Parallel()
		db, p := open(t)
		noted := func(ctx context.Context, tx *sqltx.Tx, in trip) (ticket, error) {
			if _, err := db.ExecContext(ctx, `INSERT INTO notes VALUES ('hotel')`); err != nil {
				return ticket{}, err
			}
			return take("hotel")(ctx, tx, in)
		}
		d := saga.Define("trip", 1, step("flight"), saga.Step("hotel", "hotel", noted, giveBack("hotel")), step("car"))
		find(t, db, d, plan(db, p), `with one fault:
  1. flight: done
  2. ! hotel: the worker crashes before it commits
  3. hotel again: done
  4. car: done
Then the saga is COMPLETED, and table notes has 2 rows; without a fault it has 1 rows`)
	})
	t.Run("a call without a key", func(t *testing.T) {
		t.Parallel()
		db, p := open(t)
		charge := func(ctx context.Context, _ saga.Info, _ trip) (ticket, error) {
			_, err := db.ExecContext(ctx, moveSQL, 1, "hotel")
			return ticket{1}, err
		}
		refund := func(ctx context.Context, _ saga.Info, _ trip, _ ticket) (ticket, error) {
			_, err := db.ExecContext(ctx, moveSQL, -1, "hotel")
			return ticket{}, err
		}
		d := saga.Define("trip", 1, step("flight"), saga.Step("hotel", "hotel",
			func(ctx context.Context, _ *sqltx.Tx, _ trip) (ticket, error) { return saga.Prepared[ticket](ctx) },
			func(context.Context, *sqltx.Tx, trip, ticket) error { return nil },
			saga.Prepare(charge), saga.PrepareCompensation(refund)), step("car"))
		find(t, db, d, plan(db, p), `with one fault:
  1. flight: done
  2. ! hotel: the worker crashes when its call is made, before it has written down the answer
  3. hotel again: done
  4. car: done
Then the saga is COMPLETED, and 8 hotel seats are free, not 9`)
	})
	t.Run("a call that is not taken back", func(t *testing.T) {
		t.Parallel()
		db, p := open(t)
		charge := func(ctx context.Context, info saga.Info, _ trip) (ticket, error) {
			if info.Called {
				return ticket{1}, nil
			}
			_, err := db.ExecContext(ctx, moveSQL, 1, "hotel")
			return ticket{1}, err
		}
		d := saga.Define("trip", 1, step("flight"), saga.Step("hotel", "hotel",
			func(ctx context.Context, _ *sqltx.Tx, _ trip) (ticket, error) { return saga.Prepared[ticket](ctx) },
			func(context.Context, *sqltx.Tx, trip, ticket) error { return nil }, saga.Prepare(charge)), step("car"))
		find(t, db, d, plan(db, p), `with one fault:
  1. flight: done
  2. ! hotel: its call succeeds, and then it fails for good
  3. undo hotel: done
  4. undo flight: done
Then the saga is COMPENSATED, and 9 hotel seats are free, not 10`)
	})
	t.Run("a compensation that refuses", func(t *testing.T) {
		t.Parallel()
		db, p := open(t)
		refused := func(context.Context, *sqltx.Tx, trip, ticket) error { return saga.Fail("tickets are not taken back") }
		d := saga.Define("trip", 1, saga.Step("flight", "flight", take("flight"), refused), step("hotel"), step("car"))
		find(t, db, d, plan(db, p), `with one fault:
  1. flight: done
  2. ! hotel: it does its work, and then fails for good
  3. undo flight: not done
Then the saga is MANUAL_ACTION at step flight: compensation of step flight failed at attempt 1: tickets are not taken back`)
	})
}

// A schedule that once left a room booked for ever: the command of the first attempt is late, that of
// the second is refused, and then the first arrives.
func TestCertifyLateBehindRefusal(t *testing.T) {
	t.Parallel()
	db := openDatabase(t)
	c := newCertifier(t, db, remoteTrip(saga.Retry(3, time.Second)), plan(db, Service(db, hotel)))
	if f := c.run(fault{kind: late, at: 2}, fault{kind: refuse, at: 3}).verdict(); f != nil {
		t.Error(f)
	}
}
