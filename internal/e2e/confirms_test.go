package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"backstep/internal/testenv"
)

// Confirms of one queue do not come, on a link that is healthy, as when a quorum queue has
// lost its majority. Its rows are held, uncharged, and tried one at a time; all others go on;
// and all flows when the queue confirms again.
func TestConfirmsThatDoNotCome(t *testing.T) {
	t.Parallel()
	servers := testenv.Shared(t)
	w := wired(t, servers.AMQPURL(""))
	s := newStage(t, servers, []string{"good", "stuck"}, w)
	w.keepBack("stuck")
	stuck := commands("stuck", 50, "stuck")
	s.plant(stuck...)
	var good [][]planted
	const given = `"msg":"confirms did not come; publishing again"`
	var gaveUp time.Time
	for gaveUp.IsZero() || time.Since(gaveUp) < 3*time.Second {
		good = append(good, commands(fmt.Sprintf("good-%d", len(good)), 5, "good"))
		s.plant(good[len(good)-1]...)
		time.Sleep(250 * time.Millisecond) // there is nothing to wait for: it is about what does not happen
		switch {
		case gaveUp.IsZero() && strings.Contains(s.relay.text(), given):
			gaveUp = time.Now()
		case len(good) > 4*60:
			t.Fatal("the relay still waits for confirms after a minute")
		}
	}
	if st := s.of("stuck"); st.pending != len(stuck) || st.charged > 0 {
		t.Errorf("%+v, want all PENDING, none charged", st)
	}
	s.eventually(lag, "the others were published", func() error {
		if st := s.of("good"); st.pending > 0 {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	if st := s.of("good"); st.latest > lag.Seconds() || st.charged > 0 || st.parked > 0 {
		t.Errorf("neighbours: %+v", st)
	}
	s.eventually(lag, "a row tries whether confirms come", func() error {
		if w.waiting() == 0 {
			return errors.New("none is in flight")
		}
		return nil
	})

	w.keepBack("")
	began := time.Now()
	s.published(recovery+slack, "stuck", len(stuck))
	t.Logf("all flowed %.1f s after confirms came again", time.Since(began).Seconds())
	if n := s.count(`SELECT COUNT(*) FROM outbox_events WHERE attempts > 0 OR status = 'PARKED' OR last_error IS NOT NULL`); n > 0 {
		t.Errorf("%d rows were charged", n)
	}
	s.arrived("stuck", stuck)
	s.arrived("good", good...)
	s.lives()
}
