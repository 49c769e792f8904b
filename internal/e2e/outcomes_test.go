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
	t.Run("refusals", func(t *testing.T) {
		w := wired(t, servers.AMQPURL(""))
		s := newStage(t, servers, []string{"good", "late", "deleted"}, w)
		testRefusals(t, s, w)
	})
	t.Run("parking", func(t *testing.T) {
		testParking(t, newStage(t, servers, []string{"good"}, nil, "BACKSTEP_RELAY_PARK_AFTER=2s"))
	})
}

// Since 4.0 the broker keeps the limit in a second place, from its start on.
const setMaxBody = `N = %d, application:set_env(rabbit, max_message_size, N), persistent_term:put(max_message_size, N).`
