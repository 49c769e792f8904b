package travel

import (
	"fmt"
	"testing"

	"backstep/client/participant"
	"backstep/internal/saga"
	"backstep/internal/saga/sagatest"
	"backstep/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestBookTrip(t *testing.T) {
	db := sagatest.Open(t, testenv.Database(t), Schema, HotelSchema, participant.Schema)
	trip := Trip{Flight: "LH 400", Hotel: "Ritz", Car: "Mini"}
	setup := func(w *sagatest.World) {
		w.Exec(`REPLACE INTO stock VALUES ('LH 400', 5), ('Mini', 5)`)
		w.Exec(`REPLACE INTO rooms VALUES ('Ritz', 5)`)
		w.Participant("hotel", sagatest.Service(db, Hotel))
	}
	w := sagatest.New(t, db, BookTrip)
	setup(w)
	id := w.Start(BookTrip, "trip 1", Trip{"LH 400", "Ritz", "Rolls"})
	w.Run()
	if s := w.Saga(id); s.Status != saga.Compensated || s.LastError != "book-car: no Rolls is free" {
		t.Errorf("without a car the trip is %s: %s", s.Status, s.LastError)
	}
	sagatest.Certify(t, db, BookTrip, sagatest.Plan{Input: trip, Setup: setup, Check: func(w *sagatest.World, s saga.Detail) error {
		free := map[saga.Status]int{saga.Completed: 4, saga.Compensated: 5}[s.Status]
		if n := w.Int(`SELECT COUNT(*) FROM (SELECT free FROM stock UNION ALL SELECT free FROM rooms) AS t WHERE free <> ?`, free); n > 0 {
			return fmt.Errorf("%d of the three stocks are not at %d", n, free)
		}
		return nil
	}})
}
