package testenv

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Broker is a virtual host that one test has for itself. Its methods connect anew each
// time, so that they work after the broker or the test closed connections.
type Broker struct {
	URL           string // AMQP, with credentials and the virtual host
	ManagementURL string // root of the management API, with credentials
	Vhost         string

	lasting bool // see Servers.lasting
}

// Vhost creates a virtual host on the shared broker. It is deleted when the test ends.
func Vhost(t testing.TB) *Broker {
	t.Helper()
	return Shared(t).Vhost(t)
}

// Vhost creates a virtual host. It is deleted when the test ends, with the connections to it.
func (s *Servers) Vhost(t testing.TB) *Broker {
	t.Helper()
	vhost := "test-" + randomName()
	b := &Broker{URL: s.AMQPURL(vhost), ManagementURL: s.ManagementURL(), Vhost: vhost, lasting: s.lasting()}
	t.Cleanup(func() { b.delete(t, "vhosts", vhost) })
	b.Create(t)
	return b
}

// Create creates the virtual host again after Delete, empty.
func (b *Broker) Create(t testing.TB) {
	t.Helper()
	b.Manage(t, http.MethodPut, nil, nil, "vhosts", b.Vhost)
	b.Permit(t, b.URL, ".*", ".*", ".*")
}

// Delete deletes the virtual host with all that is in it. The broker closes its connections.
func (b *Broker) Delete(t testing.TB) {
	t.Helper()
	b.Manage(t, http.MethodDelete, nil, nil, "vhosts", b.Vhost)
}

// User creates a user with these permissions (regular expressions) on the virtual host and
// returns the AMQP URL to connect as it. The user is deleted when the test ends.
func (b *Broker) User(t testing.TB, configure, write, read string) string {
	t.Helper()
	u, err := url.Parse(b.URL)
	if err != nil {
		t.Fatalf("testenv: %v", err)
	}
	name := "test-" + randomName()
	u.User = url.UserPassword(name, name)
	b.Manage(t, http.MethodPut, map[string]string{"password": name, "tags": ""}, nil, "users", name)
	t.Cleanup(func() { b.delete(t, "users", name) })
	b.Permit(t, u.String(), configure, write, read)
	return u.String()
}

// Permit sets the permissions of the user who connects with rawURL. What a channel has done
// already, it may do for as long as it is open.
func (b *Broker) Permit(t testing.TB, rawURL, configure, write, read string) {
	t.Helper()
	b.Manage(t, http.MethodPut, map[string]string{"configure": configure, "write": write, "read": read}, nil,
		"permissions", b.Vhost, userOf(t, rawURL))
}

// Banish takes all permissions from the user who connects with rawURL: there is no virtual host
// for it any more.
func (b *Broker) Banish(t testing.TB, rawURL string) {
	t.Helper()
	b.Manage(t, http.MethodDelete, nil, nil, "permissions", b.Vhost, userOf(t, rawURL))
}

func userOf(t testing.TB, raw string) string {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatalf("testenv: %v", err)
	}
	return u.User.Username()
}

// Queue returns how many messages of a queue are ready and how many are delivered but not
// acked. ready is exact; unacked is the management API's figure, which is seconds old.
func (b *Broker) Queue(t testing.TB, name string) (ready, unacked int) {
	t.Helper()
	b.channel(t, func(ch *amqp.Channel) error {
		q, err := ch.QueueDeclarePassive(name, false, false, false, false, nil)
		ready = q.Messages
		return err
	})
	var stats struct {
		Unacked int `json:"messages_unacknowledged"`
	}
	b.Manage(t, http.MethodGet, nil, &stats, "queues", b.Vhost, name)
	return ready, stats.Unacked
}

// Purge deletes the ready messages of a queue and returns how many they were.
func (b *Broker) Purge(t testing.TB, queue string) (purged int) {
	t.Helper()
	b.channel(t, func(ch *amqp.Channel) (err error) {
		purged, err = ch.QueuePurge(queue, false)
		return err
	})
	return purged
}

// DeleteQueue deletes a queue with its messages and bindings.
func (b *Broker) DeleteQueue(t testing.TB, name string) {
	t.Helper()
	b.channel(t, func(ch *amqp.Channel) error {
		_, err := ch.QueueDelete(name, false, false, false)
		return err
	})
}

// Bind binds a queue to an exchange.
func (b *Broker) Bind(t testing.TB, exchange, queue, key string) {
	t.Helper()
	b.channel(t, func(ch *amqp.Channel) error { return ch.QueueBind(queue, key, exchange, false, nil) })
}

// Unbind undoes Bind.
func (b *Broker) Unbind(t testing.TB, exchange, queue, key string) {
	t.Helper()
	b.channel(t, func(ch *amqp.Channel) error { return ch.QueueUnbind(queue, key, exchange, nil) })
}

// Publish publishes messages and waits until the broker has taken responsibility for each
// in at least one queue.
func (b *Broker) Publish(t testing.TB, exchange, key string, msgs ...amqp.Publishing) {
	t.Helper()
	b.channel(t, func(ch *amqp.Channel) error {
		returns := ch.NotifyReturn(make(chan amqp.Return, len(msgs)))
		if err := ch.Confirm(false); err != nil {
			return err
		}
		var confirms []*amqp.DeferredConfirmation
		for _, m := range msgs {
			c, err := ch.PublishWithDeferredConfirm(exchange, key, true, false, m)
			if err != nil {
				return err
			}
			confirms = append(confirms, c)
		}
		for _, c := range confirms {
			if ok, err := c.WaitContext(t.Context()); err != nil || !ok {
				return fmt.Errorf("publish to %q with key %q: acked %t, %w", exchange, key, ok, err)
			}
		}
		select {
		case r := <-returns: // a return comes before its confirm
			return fmt.Errorf("publish to %q with key %q: returned: %s", exchange, key, r.ReplyText)
		default:
			return nil
		}
	})
}

// Get takes one message off a queue. ok is false if none is ready.
func (b *Broker) Get(t testing.TB, queue string) (d amqp.Delivery, ok bool) {
	t.Helper()
	b.channel(t, func(ch *amqp.Channel) (err error) {
		d, ok, err = ch.Get(queue, true)
		return err
	})
	return d, ok
}

// CloseConnections closes all connections to the virtual host, as an operator would. It
// waits until the management API lists at least one, which takes it a moment after they
// opened.
func (b *Broker) CloseConnections(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var names []string
	err := wait(ctx, nil, func(context.Context) error {
		var connections []struct {
			Name string
			Own  string `json:"user_provided_name"`
		}
		b.Manage(t, http.MethodGet, nil, &connections, "vhosts", b.Vhost, "connections")
		for _, c := range connections {
			if c.Own != ownConnection { // ours may be listed for a while after they closed
				names = append(names, c.Name)
			}
		}
		if len(names) == 0 {
			return fmt.Errorf("no connection to %s is listed", b.Vhost)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("testenv: close connections: %v", err)
	}
	for _, name := range names {
		b.Manage(t, http.MethodDelete, nil, nil, "connections", name) // closed meanwhile: answered 404
	}
}

// ownConnection is the name of our own connections.
const ownConnection = "testenv"

// channel runs use with a channel of a connection of its own.
func (b *Broker) channel(t testing.TB, use func(*amqp.Channel) error) {
	t.Helper()
	err := func() error {
		conn, err := amqp.DialConfig(b.URL, amqp.Config{Properties: amqp.Table{"connection_name": ownConnection}})
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		ch, err := conn.Channel()
		if err != nil {
			return err
		}
		return use(ch)
	}()
	if err != nil {
		t.Fatalf("testenv: %v", err)
	}
}

// Manage calls the management API at the path made of the segments, and reads the answer into out
// unless that is nil.
func (b *Broker) Manage(t testing.TB, method string, in, out any, segments ...string) {
	t.Helper()
	if err := b.call(t.Context(), method, in, out, segments...); err != nil {
		t.Fatalf("testenv: %v", err)
	}
}

// delete is for t.Cleanup, where the test's context is done.
func (b *Broker) delete(t testing.TB, segments ...string) {
	t.Helper()
	if err := b.call(context.Background(), http.MethodDelete, nil, nil, segments...); err != nil && b.lasting {
		t.Errorf("testenv: %v", err)
	}
}

func (b *Broker) call(ctx context.Context, method string, in, out any, segments ...string) error {
	root, err := url.Parse(b.ManagementURL)
	if err != nil {
		return err
	}
	return callManagement(ctx, root, method, in, out, segments...)
}
