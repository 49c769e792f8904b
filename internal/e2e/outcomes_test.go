package e2e

import (
	"fmt"
	"testing"

	"backstep/internal/testenv"
)

// TestOutcomes provokes whatever a broker can say to a relay, and all the ways it can say
// nothing, on a broker of its own, and demands of the real relay what docs/architecture.md
// says becomes of the rows. No relay is restarted, but where that is the case itself.
func TestOutcomes(t *testing.T) {
	t.Parallel()
	servers := testenv.Private(t)
	if _, err := servers.Rabbitmqctl(t.Context(), "eval", fmt.Sprintf(setMaxBody, maxBody)); err != nil {
		t.Fatal(err)
	}
	t.Run("virtual hosts", func(t *testing.T) { // which do not harm each other
		t.Run("refusals", func(t *testing.T) {
			t.Parallel()
			w := wired(t, servers.AMQPURL(""))
			testRefusals(t, newStage(t, servers, []string{"good", "late", "deleted"}, w), w)
		})
		t.Run("parking", func(t *testing.T) {
			t.Parallel()
			testParking(t, newStage(t, servers, []string{"good"}, nil, "BACKSTEP_RELAY_PARK_AFTER=2s"))
		})
		t.Run("outages", func(t *testing.T) {
			t.Parallel()
			testOutages(t, newStage(t, servers, nil, nil), vhostOutages())
		})
	})
	t.Run("broker", func(t *testing.T) {
		testOutages(t, newStage(t, servers, nil, nil), brokerOutages())
	})
}

func testOutages(t *testing.T, s *stage, outages []outage) {
	for i, o := range outages {
		t.Run(o.name, func(t *testing.T) { testOutage(t, s, o, fmt.Sprintf("outage%d", i)) })
	}
}

// Since 4.0 the broker keeps the limit in a second place, from its start on.
const setMaxBody = `N = %d, application:set_env(rabbit, max_message_size, N), persistent_term:put(max_message_size, N).`
