package testenv

import (
	"context"
	"fmt"
	"os"
)

// KillBroker ends the broker as kill -9 does. Its data stay.
func (s *Servers) KillBroker() error { return s.broker.kill() }

// StopBroker shuts the broker down in an orderly way. Its data stay.
func (s *Servers) StopBroker(ctx context.Context) error { return s.broker.stop(ctx) }

// StartBroker starts the broker again, at its old address, and returns when it serves.
func (s *Servers) StartBroker(ctx context.Context) error { return s.broker.start(ctx) }

// RestartBroker is StopBroker and StartBroker.
func (s *Servers) RestartBroker(ctx context.Context) error {
	if err := s.broker.stop(ctx); err != nil {
		return err
	}
	return s.broker.start(ctx)
}

// WipeBroker deletes all that the broker has stored: queues, virtual hosts and users are gone when
// it is started again. It must have been stopped.
func (s *Servers) WipeBroker() error {
	r, ok := s.broker.(*rabbit)
	if !ok {
		return fmt.Errorf("wipe the broker: %w", ErrNotOurs)
	}
	return os.RemoveAll(r.data)
}

// KillDatabase ends the database as kill -9 does. Its data stay.
func (s *Servers) KillDatabase() error { return s.database.kill() }

// StopDatabase shuts the database down in an orderly way. Its data stay.
func (s *Servers) StopDatabase(ctx context.Context) error { return s.database.stop(ctx) }

// StartDatabase starts the database again, at its old address, and returns when it serves.
func (s *Servers) StartDatabase(ctx context.Context) error { return s.database.start(ctx) }

// RestartDatabase is StopDatabase and StartDatabase.
func (s *Servers) RestartDatabase(ctx context.Context) error {
	if err := s.database.stop(ctx); err != nil {
		return err
	}
	return s.database.start(ctx)
}

// BrokerLog returns what the broker has logged so far: warnings and errors.
func (s *Servers) BrokerLog() (string, error) {
	r, ok := s.broker.(*rabbit)
	if !ok {
		return "", fmt.Errorf("read the broker's log: %w", ErrNotOurs)
	}
	text, err := os.ReadFile(r.log)
	return string(text), err
}

// Rabbitmqctl runs the broker's own tool, to set off alarms, say, and returns what it printed.
func (s *Servers) Rabbitmqctl(ctx context.Context, args ...string) (string, error) {
	r, ok := s.broker.(*rabbit)
	if !ok {
		return "", fmt.Errorf("run rabbitmqctl: %w", ErrNotOurs)
	}
	out, err := r.ctl(ctx, args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("run rabbitmqctl %v: %w: %s", args, err, lastLine(out))
	}
	return string(out), nil
}
