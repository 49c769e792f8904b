package amqp

import (
	"strings"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"backstep/internal/message"
)

// TestWholeWindowReturned: as many returns as the window holds, and nobody reads.
func TestWholeWindowReturned(t *testing.T) {
	const window = 500
	_, _, p := ordersPublisher(t, PublisherConfig{Window: window})
	ch := acquire(t, p)
	defer ch.Release()
	for i := range window {
		if err := ch.Publish(t.Context(), uint64(i), command("nowhere")); err != nil {
			t.Fatal(err)
		}
	}
	got := results(t, ch, window)
	if n := kinds(got); n[message.Returned] != window {
		t.Errorf("%v, want %d returned", n, window)
	}
	const want = `exchange "backstep.commands", routing key "nowhere": returned: 312 NO_ROUTE`
	if got[0].Reason != want {
		t.Errorf("reason %q, want %q", got[0].Reason, want)
	}
}

// TestReturnsAmongConfirms mixes routable and unroutable messages, with ids, with equal ids
// and without.
func TestReturnsAmongConfirms(t *testing.T) {
	_, _, p := ordersPublisher(t, PublisherConfig{Window: 1000})
	ch := acquire(t, p)
	defer ch.Release()
	var msgs []*message.Message
	var want []message.ResultKind
	for i := range 900 {
		m, kind := command("orders"), message.Confirmed
		if i%3 == 0 {
			m, kind = command("nowhere"), message.Returned
		}
		switch i % 5 {
		case 0:
			m.MessageID = "same"
		case 1:
			m.MessageID, m.Body = "", []byte{byte(i), byte(i >> 8)}
		case 2:
			if kind == message.Returned {
				m.Mandatory, kind = false, message.Confirmed // nobody asked for it back
			}
		}
		msgs, want = append(msgs, m), append(want, kind)
	}
	publish(t, ch, msgs...)
	for tag, r := range results(t, ch, len(msgs)) {
		if r.Kind != want[tag] {
			t.Errorf("message %d with key %q is %v, want %v", tag, msgs[tag].RoutingKey, r.Kind, want[tag])
		}
	}
}

// TestEqualMessagesOneReturned: the binding goes between two copies. One result says so.
func TestEqualMessagesOneReturned(t *testing.T) {
	b, _, p := ordersPublisher(t, PublisherConfig{})
	ch := acquire(t, p)
	defer ch.Release()
	m := command("orders")
	first := result(t, ch, m)
	b.Unbind(t, message.CommandsExchange, "orders", "orders")
	second := result(t, ch, m)
	if first.Kind != message.Confirmed || second.Kind != message.Returned {
		t.Errorf("results %v and %v, want confirmed and returned", first.Kind, second.Kind)
	}
}

func TestNackByFullQueue(t *testing.T) {
	_, c, p := ordersPublisher(t, PublisherConfig{})
	queueWith(t, c, "full", amqp091.Table{"x-queue-type": "quorum", "x-max-length": int32(1), "x-overflow": "reject-publish"})
	ch := acquire(t, p)
	defer ch.Release()
	// A quorum queue lets a few through before it notices that it is full.
	for range patience / time.Millisecond {
		r := result(t, ch, command("full"))
		if r.Kind == message.Confirmed {
			continue
		}
		if r.Kind != message.Nacked || !strings.Contains(r.Reason, `routing key "full"`) {
			t.Errorf("result %+v, want nacked with its routing key", r)
		}
		return
	}
	t.Error("never nacked")
}

// TestLateConfirmHoldsUpNobody: a message whose confirm does not come is the oldest.
func TestLateConfirmHoldsUpNobody(t *testing.T) {
	_, _, p := ordersPublisher(t, PublisherConfig{})
	ch := acquire(t, p)
	if !ch.admit() || !ch.note(flight{tag: 7, confirm: &amqp091.DeferredConfirmation{}}) {
		t.Fatal("the channel has ended")
	}
	msgs := []*message.Message{command("orders"), command("nowhere"), command("orders")}
	for range 3 {
		publish(t, ch, msgs...)
		got := results(t, ch, 3)
		if got[0].Kind != message.Confirmed || got[1].Kind != message.Returned || got[2].Kind != message.Confirmed {
			t.Errorf("results %v, want confirmed, returned, confirmed", got)
		}
	}
	ch.Destroy()
	if r := results(t, ch, 1)[7]; r.Kind != message.Lost {
		t.Errorf("after Destroy the late one is %+v, want lost", r)
	}
}
