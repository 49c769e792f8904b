package participant_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"

	"backstep/client/participant"
)

// The service's own; the tests give the example a database with participant.Schema and a broker.
var (
	hotelDB     *sql.DB
	hotelBroker string
)

type stay struct {
	Guest  string `json:"guest"`
	Nights int    `json:"nights"`
}

type booking struct {
	Rooms int `json:"rooms"`
}

// bookRoom is a hotel's part in sagas.
var bookRoom = participant.Step[stay, booking]{
	Execute: func(ctx context.Context, tx *sql.Tx, _ participant.Info, in stay) (booking, error) {
		if in.Nights > 14 {
			return booking{}, participant.Refuse("%d nights are too many", in.Nights)
		}
		_, err := tx.ExecContext(ctx, `UPDATE hotel SET free = free - 1`)
		return booking{Rooms: 1}, err
	},
	Compensate: func(ctx context.Context, tx *sql.Tx, _ participant.Info, _ stay, done booking) error {
		_, err := tx.ExecContext(ctx, `UPDATE hotel SET free = free + ?`, done.Rooms)
		return err
	},
}

// A service's loop: take a command, handle it, publish the reply, and ack only then.
func ExampleStep_Handle() {
	ctx := context.Background()
	for {
		err := serve(ctx, hotelDB, hotelBroker)
		fmt.Println("hotel: again in a second:", err)
		time.Sleep(time.Second) // the broker is away, or the session was lost: connect again, not at once
	}
}

// serve answers the commands of the queue "hotel", which is bound to the exchange
// backstep.commands under its name, until the connection or the database fails.
func serve(ctx context.Context, db *sql.DB, broker string) error {
	conn, err := amqp091.Dial(broker)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // what is not acked goes back to the queue
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	returned := ch.NotifyReturn(make(chan amqp091.Return, 1))
	if err := errors.Join(ch.Confirm(false), ch.Qos(1, 0, false)); err != nil {
		return err
	}
	deliveries, err := ch.ConsumeWithContext(ctx, "hotel", "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	for d := range deliveries {
		reply, err := bookRoom.Handle(ctx, db, participant.Command{
			MessageID: d.MessageId, ReplyTo: d.ReplyTo, Headers: d.Headers, Body: d.Body,
		})
		switch {
		case errors.Is(err, participant.ErrNoCommand):
			err = d.Reject(false) // the queue's dead-letter exchange, if any, gets it
		case err == nil:
			if err = publish(ctx, ch, returned, reply); err == nil {
				err = d.Ack(false)
			}
		}
		if err != nil {
			return err // and it is called again after a moment
		}
	}
	return amqp091.ErrClosed
}

// publish returns nil once the broker has the reply in a queue.
func publish(ctx context.Context, ch *amqp091.Channel, returned <-chan amqp091.Return, r participant.Reply) error {
	confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, participant.Exchange, r.RoutingKey, true, false, amqp091.Publishing{
		DeliveryMode: amqp091.Persistent, Timestamp: time.Now(),
		MessageId: r.MessageID, Type: r.Type, CorrelationId: r.CorrelationID, ContentType: r.ContentType, Headers: r.Headers, Body: r.Body,
	})
	if err != nil {
		return err
	}
	acked, err := confirm.WaitContext(ctx)
	select {
	case m := <-returned: // it comes before the confirm
		return fmt.Errorf("reply %s returned: %s", r.MessageID, m.ReplyText)
	default:
	}
	if err == nil && !acked {
		err = fmt.Errorf("reply %s: nack", r.MessageID)
	}
	return err
}
