package amqp_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"backstep/internal/amqp"
	"backstep/internal/message"
)

// A process runs one client for as long as it works. Whoever needs the broker asks the client
// for its session, again after each loss.
func Example() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	client, err := amqp.New(amqp.Config{
		URL:       "amqp://app:password@localhost:5672/prod",
		Name:      "backstep/example@host-1 v1.2",
		OnSession: amqp.Topology{Queues: []string{"orders"}}.Ensure,
	})
	if err != nil {
		log.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = client.Run(ctx) }) // nil: it ends with ctx
	defer wg.Wait()

	if err := consume(ctx, client); err != nil {
		log.Print(err)
	}
	cancel() // after what uses the session has finished
}

func consume(ctx context.Context, client *amqp.Client) error {
	sub, err := amqp.NewConsumer(client, "backstep@host-1").Subscribe(ctx, "orders", 20)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Close() }()
	for d := range sub.Deliveries() {
		fmt.Println(d.MessageID)
		if err := sub.Ack(d.Tag, false); errors.Is(err, amqp.ErrSessionGone) {
			break // the broker delivers it again, on another session
		}
	}
	return sub.Err()
}

// Publish does not wait; results come when the broker has answered.
func ExampleConfirmChannel() {
	publish := func(ctx context.Context, p *amqp.Publisher, msgs []*message.Message) error {
		ch, err := p.Acquire(ctx)
		if err != nil {
			return err
		}
		defer ch.Release() // a Destroy, if anything is in doubt
		for i, m := range msgs {
			if err := ch.Publish(ctx, uint64(i), m); err != nil {
				return err
			}
		}
		for range msgs {
			if r := <-ch.Results(); r.Kind != message.Confirmed {
				return fmt.Errorf("message %q is %v: %s", msgs[r.Tag].MessageID, r.Kind, r.Reason)
			}
		}
		return nil
	}
	_ = publish
}
