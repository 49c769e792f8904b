package saga

import (
	"fmt"
	"testing"

	"backstep/internal/message"
)

// What is said of the command that a retry leaves to arrive is what its row says, and where more can be found.
func TestRetrySaysWhatIsKnown(t *testing.T) {
	t.Parallel()
	s := &script{}
	o := &operator{newWorld(t, Define("trip", 1, append(s.hooks(), s.part("a"), RemoteStep[trip, booking]("car", "cars", Deadline(1<<40)))...)), s}
	id := o.start("x")
	says := func(want string) {
		t.Helper()
		got := o.already(id, Operation{Verb: VerbRetry}).Detail
		equal(t, "a retry says", got, fmt.Sprintf("attempt %d to execute step %s", o.get(id).Attempt, want))
	}
	says("a is PENDING and waits for a relay, so no other is sent. See backstep outbox show " + o.get(id).CommandID)
	o.exec(`UPDATE outbox_events SET status = 'PARKED'`)
	says("a is PARKED in the outbox, so no other is sent. See backstep outbox show " + o.get(id).CommandID)
	o.exec(`UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6)`)
	says("a is PUBLISHED in the outbox, and no more is known: it may be in queue a, in hand, dead-lettered or lost, so no other is sent. " +
		"If it was lost, a worker of queue a emits it again. See backstep saga show " + id + ", backstep parked list --queue a")
	o.exec(`DELETE FROM outbox_events`)
	says("a is in no table: its row was published longer ago than rows are kept, or deleted, so no other is sent. " +
		"If it was lost, a worker of queue a emits it again. See backstep saga show " + id)
	o.deliver(message.Message{Properties: message.Properties{MessageID: o.get(id).CommandID}, Headers: message.Headers{message.HeaderSagaID: id}})
	o.exec(`DELETE FROM outbox_events`)
	o.does(id, Operation{Verb: VerbRetry}) // a participant is asked once more
	o.exec(`UPDATE outbox_events SET status = 'PUBLISHED', published_at = NOW(6)`)
	says("car is PUBLISHED in the outbox, and no more is known: it may be in queue cars, in hand, dead-lettered or lost, so no other is sent. See backstep saga show " + id)
	o.exec(`DELETE FROM outbox_events`)
	says("car is in no table: its row was published longer ago than rows are kept, or deleted, so no other is sent. See backstep saga show " + id)
}
