package testenv

import (
	"database/sql"
	"errors"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"
)

func TestDatabaseIsFreshAndDropped(t *testing.T) {
	var dsns []string
	t.Run("in use", func(t *testing.T) {
		dsns = append(dsns, Database(t), Database(t))
		for _, dsn := range dsns {
			db := open(t, dsn)
			if _, err := db.Exec("CREATE TABLE t (id INT PRIMARY KEY)"); err != nil {
				t.Errorf("create a table in %s: %v", dsn, err)
			}
		}
	})
	for _, dsn := range dsns {
		if err := open(t, dsn).Ping(); err == nil {
			t.Errorf("%s can still be opened, want it dropped", dsn)
		}
	}
}

func open(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysql", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func TestBroker(t *testing.T) {
	b := Vhost(t)
	declareQuorumQueue(t, b, "q")
	b.channel(t, func(ch *amqp.Channel) error { return ch.ExchangeDeclare("x", "direct", true, false, false, false, nil) })
	b.Bind(t, "x", "q", "k")
	b.Publish(t, "x", "k", amqp.Publishing{Body: []byte("one")}, amqp.Publishing{Body: []byte("two")})
	if ready, _ := b.Queue(t, "q"); ready != 2 {
		t.Errorf("Queue gave %d ready, want 2", ready)
	}
	if d, ok := b.Get(t, "q"); !ok || string(d.Body) != "one" {
		t.Errorf("Get gave %q, %t, want the first message", d.Body, ok)
	}
	if n := b.Purge(t, "q"); n != 1 {
		t.Errorf("Purge gave %d, want 1", n)
	}
	if _, ok := b.Get(t, "q"); ok {
		t.Error("Get found a message in a purged queue")
	}
	b.Unbind(t, "x", "q", "k")
	b.DeleteQueue(t, "q")
}

func TestCloseConnections(t *testing.T) {
	b := Vhost(t)
	conn, err := amqp.Dial(b.URL)
	if err != nil {
		t.Fatal(err)
	}
	closed := conn.NotifyClose(make(chan *amqp.Error, 1))
	b.CloseConnections(t)
	if e := <-closed; e == nil || e.Code != amqp.ConnectionForced {
		t.Errorf("the connection closed with %v, want CONNECTION_FORCED", e)
	}
}

func TestUserMayOnlyWhatItIsPermitted(t *testing.T) {
	b := Vhost(t)
	conn, err := amqp.Dial(b.User(t, "", "", ".*"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	_, err = ch.QueueDeclare("q", true, false, false, false, nil)
	var refused *amqp.Error
	if !errors.As(err, &refused) || refused.Code != amqp.AccessRefused {
		t.Errorf("declaring gave %v, want ACCESS_REFUSED", err)
	}
}

func TestPermissionsChange(t *testing.T) {
	b := Vhost(t)
	user := b.User(t, ".*", "", "")
	declare := func() error {
		conn, err := amqp.Dial(user)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close() }()
		ch, err := conn.Channel()
		if err != nil {
			return err
		}
		return ch.ExchangeDeclare("x", "direct", false, true, false, false, nil)
	}
	if err := declare(); err != nil {
		t.Errorf("permitted: %v", err)
	}
	for what, change := range map[string]func(){
		"nothing permitted":     func() { b.Permit(t, user, "", "", "") },
		"banished":              func() { b.Banish(t, user) },
		"no virtual host":       func() { b.Delete(t) },
		"another, not for user": func() { b.Delete(t); b.Create(t) },
	} {
		change()
		if err := declare(); err == nil {
			t.Errorf("%s: declared all the same", what)
		}
		b.Create(t)
		b.Permit(t, user, ".*", "", "")
		if err := declare(); err != nil {
			t.Errorf("after %s: %v", what, err)
		}
	}
}

func declareQuorumQueue(t *testing.T, b *Broker, name string) {
	t.Helper()
	b.channel(t, func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclare(name, true, false, false, false, amqp.Table{"x-queue-type": "quorum"})
		return err
	})
}
