package e2e

import (
	"context"
	"errors"
	"log/slog"

	"backstep/internal/amqp"
	"backstep/internal/handlers"
	"backstep/internal/inbox"
	"backstep/internal/saga"
	"backstep/internal/sqltx"
)

// begin starts a saga of a definition that the real worker does not know.
func (w *wheel) begin(d *saga.Definition, correlationID string, input any) {
	w.t.Helper()
	err := sqltx.WithTx(w.t.Context(), w.db, func(ctx context.Context, tx *sqltx.Tx) error {
		_, _, err := saga.Start(ctx, tx, d, correlationID, input)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// ownWorker runs the sagas of such a definition, and keeps them, as cmd/worker does those it knows.
func (w *wheel) ownWorker(d *saga.Definition, keep saga.KeeperConfig, batch int, queues ...string) {
	w.t.Helper()
	log := slog.New(slog.NewTextHandler(w.t.Output(), nil))
	topology := amqp.Topology{Queues: handlers.Queues}
	client, err := amqp.New(amqp.Config{URL: w.broker.URL, Name: w.t.Name(), Log: log, OnSession: topology.Ensure})
	if err != nil {
		w.t.Fatal(err)
	}
	engine := saga.NewEngine(log, d)
	source := laneSource{amqp.NewConsumer(client, "test")}
	ctx, stop := context.WithCancel(context.Background()) // until the test's cleanup
	var stats inbox.Stats
	ended := make(chan error, 2+len(queues))
	go func() { ended <- client.Run(ctx) }()
	keep.Queues, keep.Ready, keep.Log = map[string]func() saga.Standing{}, client.Ready, log
	for _, queue := range queues {
		progress := &inbox.Progress{}
		keep.Queues[queue] = func() saga.Standing { return saga.Standing(progress.Standing()) }
		lane := inbox.NewLane(w.db, source, inbox.Config{
			Queue: queue, Handler: &inbox.Mux{Sagas: engine}, Parked: engine.CommandParked, Batch: batch, Progress: progress, Log: log,
		}, &stats)
		go func() { ended <- lane.Run(ctx) }()
	}
	keeper := saga.NewKeeper(engine, w.db, keep)
	go func() { ended <- keeper.Run(ctx) }()
	w.t.Cleanup(func() {
		stop()
		for range 2 + len(queues) {
			if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
				w.t.Errorf("worker: %v", err)
			}
		}
	})
}

// laneSource is the amqp consumer as the inbox knows it.
type laneSource struct{ *amqp.Consumer }

func (c laneSource) Subscribe(ctx context.Context, queue string, prefetch int) (inbox.Subscription, error) {
	sub, err := c.Consumer.Subscribe(ctx, queue, prefetch)
	if err != nil {
		return nil, err
	}
	return sub, nil
}
