package travel

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"backstep/client/participant"
	"backstep/internal/saga"
	"backstep/internal/saga/sagatest"
	"backstep/internal/testenv"
)

// insurer is what the other company has to be like: its policies by key, "" for one that was voided.
type insurer map[string]string

func (i insurer) Insure(_ context.Context, key string, t Trip) (string, error) {
	switch policy, known := i[key]; {
	case known && policy == "" || t.Car == "Trabant":
		return "", ErrRefused
	case !known: // the answer to the first call gets lost
		i[key] = fmt.Sprintf("P-%d", len(i)+1)
		return "", errors.New("time-out")
	}
	return i[key], nil
}

func (i insurer) Void(_ context.Context, key string) error { i[key] = ""; return nil }

func (i insurer) policies() (n int) {
	for _, policy := range i {
		if policy != "" {
			n++
		}
	}
	return n
}

func TestBookInsuredTrip(t *testing.T) {
	db := sagatest.Open(t, testenv.Database(t), Schema, HotelSchema, participant.Schema)
	policies := insurer{}
	version2 := BookInsuredTrip(policies)
	setup := func(w *sagatest.World) {
		clear(policies)
		w.Exec(`REPLACE INTO stock VALUES ('LH 400', 5), ('Mini', 5)`)
		w.Exec(`REPLACE INTO rooms VALUES ('Ritz', 5)`)
		w.Participant("hotel", sagatest.Service(db, Hotel))
	}
	trip := Trip{Flight: "LH 400", Hotel: "Ritz", Car: "Mini"}
	w := sagatest.New(t, db, BookTrip, version2) // as workers have them
	setup(w)
	before, after := w.Start(BookTrip, "trip 1", trip), w.Start(version2, "trip 2", trip)
	refused := w.Start(version2, "trip 3", Trip{"LH 400", "Ritz", "Trabant"})
	w.Run()
	for id, want := range map[string]saga.Status{before: saga.Completed, after: saga.Completed, refused: saga.Compensated} {
		if s := w.Saga(id); s.Status != want {
			t.Errorf("%s, version %d, is %s: %s", s.CorrelationID, s.Version, s.Status, s.LastError)
		}
	}
	sagatest.Certify(t, db, version2, sagatest.Plan{Input: trip, Setup: setup, Check: func(w *sagatest.World, s saga.Detail) error {
		booked := map[saga.Status]int{saga.Completed: 1, saga.Compensated: 0}[s.Status]
		if n := w.Int(`SELECT COUNT(*) FROM (SELECT free FROM stock UNION ALL SELECT free FROM rooms) AS t WHERE free <> ?`, 5-booked); n > 0 {
			return fmt.Errorf("%d of the three stocks are not at %d", n, 5-booked)
		}
		if n := policies.policies(); n != booked {
			return fmt.Errorf("there are %d policies, not %d", n, booked)
		}
		return nil
	}})
}
