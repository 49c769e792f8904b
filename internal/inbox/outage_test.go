package inbox

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"backstep/internal/message"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

// network is the way to a database, and can be cut.
type network struct {
	mu    sync.Mutex // guards below
	down  bool
	dials int
	conns map[net.Conn]bool

	// atCommit, if not nil, is asked at each COMMIT what becomes of it.
	atCommit atomic.Pointer[func() fate]
}

// fate of a COMMIT that is sent. The client never hears of the last two.
type fate int

const (
	answered fate = iota
	lostOnTheWay
	doneButNotAnswered
)

// behind returns a pool whose connections go through a network.
func behind(t *testing.T, dsn string) (*network, *sql.DB) {
	t.Helper()
	n := &network{conns: map[net.Conn]bool{}}
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Net = "test-" + cfg.DBName
	mysql.RegisterDialContext(cfg.Net, n.dial)
	t.Cleanup(func() { mysql.DeregisterDialContext(cfg.Net) })
	return n, open(t, cfg.FormatDSN())
}

func (n *network) dial(ctx context.Context, addr string) (net.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dials++
	if n.down {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("network is unreachable")}
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	n.conns[conn] = true
	return &wire{Conn: conn, n: n}, nil
}

// cut takes the network down, with all connections, or up again.
func (n *network) cut(down bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.down, n.dials = down, 0
	for c := range n.conns {
		if down {
			_ = c.Close() // closed already is as good
			delete(n.conns, c)
		}
	}
}

func (n *network) dialed() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.dials
}

// wire is a connection that looks out for COMMIT.
type wire struct {
	net.Conn
	n *network
}

func (w *wire) Write(b []byte) (int, error) {
	const comQuery = 0x03
	ask := w.n.atCommit.Load()
	if ask == nil || !bytes.Equal(b[4:], append([]byte{comQuery}, "COMMIT"...)) {
		return w.Conn.Write(b)
	}
	switch (*ask)() {
	case lostOnTheWay:
		_ = w.Close()
		return len(b), nil // the kernel has taken it, that is all a client knows
	case doneButNotAnswered:
		n, err := w.Conn.Write(b)
		if err == nil {
			_, err = w.Read(make([]byte, 1024)) // the answer: so the server has done it
		}
		_ = w.Close()
		return n, err
	}
	return w.Conn.Write(b)
}

// B77: the connection is lost during COMMIT, and nobody knows whether it happened. Effects
// happen once, and the message is acked only when it is known.
func TestCommitOutcomeUnknown(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]fate{"server did not get it": lostOnTheWay, "server got it": doneButNotAnswered} {
		for _, idle := range []int{1, 16} {
			t.Run(fmt.Sprintf("%s, %d idle", name, idle), func(t *testing.T) {
				t.Parallel()
				dsn := testenv.Database(t)
				n, db := behind(t, dsn)
				db.SetMaxIdleConns(idle)
				h := &effects{}
				msgs := newMsgs(40)
				b := newBroker("q", msgs...)
				// Every third COMMIT.
				var commits, cuts atomic.Int64
				cut := func() fate {
					if commits.Add(1)%3 != 0 {
						return answered
					}
					cuts.Add(1)
					return f
				}
				n.atCommit.Store(&cut)
				l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 4})
				eventually(t, "all are acked", b.settled(len(msgs)))
				for _, m := range msgs {
					if effectsOf(t, db, m.MessageID) != 1 || !recorded(t, db, "q", m.MessageID) {
						t.Errorf("%d effects of %s", effectsOf(t, db, m.MessageID), m.MessageID)
					}
				}
				if cuts.Load() == 0 {
					t.Error("no COMMIT was cut: the test shows nothing")
				}
				if s := l.stats.Snapshot(); s.Retried+s.Parked != 0 || s.Done+s.Duplicates != int64(len(msgs)) ||
					(s.Duplicates > 0) != (f == doneButNotAnswered) {
					t.Errorf("stats %+v", s)
				}
				equal(t, "faults", b.faults, []string(nil))
			})
		}
	}
}

// kill ends the connection of tx, as an operator or a proxy does.
func kill(ctx context.Context, db *sql.DB, tx *sqltx.Tx) {
	var id int64
	if err := tx.QueryRow(ctx, `SELECT CONNECTION_ID()`, nil, &id); err != nil {
		panic(err)
	}
	if _, err := db.ExecContext(ctx, fmt.Sprintf("KILL %d", id)); err != nil {
		panic(err)
	}
}

func TestKilledConnection(t *testing.T) {
	t.Parallel()
	db := database(t)
	var killed atomic.Bool
	m := msg(message.NewID())
	h := &effects{BatchFunc: func(ctx context.Context, tx *sqltx.Tx, _ []string) {
		if !killed.Swap(true) {
			_, _ = tx.Exec(ctx, addSQL, "a")
			kill(ctx, db, tx)
		}
	}}
	b := newBroker("q", m)
	l := run(t, db, b, Config{Queue: "q", Handler: h})
	eventually(t, "it is acked", b.settled(1))
	equal(t, "effects", effectsOf(t, db, m.MessageID), 1)
	equal(t, "a", number(t, db, `SELECT n FROM counters WHERE id = 'a'`), 0)
	if s := l.stats.Snapshot(); s.Done != 1 || s.Retried+s.Parked != 0 {
		t.Errorf("stats %+v", s)
	}
}

// A message that loses the connection again and again while the server is up is to blame: for
// it a failed attempt is counted, and its neighbours are processed once.
func TestPoisonLosesTheConnection(t *testing.T) {
	t.Parallel()
	db := database(t)
	msgs := newMsgs(6)
	poison := msgs[3].MessageID
	h := &effects{OutcomeFunc: func(ctx context.Context, tx *sqltx.Tx, m *message.Message) message.Outcome {
		if m.MessageID == poison {
			kill(ctx, db, tx)
		}
		return message.Outcome{}
	}}
	b := newBroker("q", msgs...)
	l := run(t, db, b, Config{Queue: "q", Handler: h, RetryBase: time.Hour, RetryMax: time.Hour})
	eventually(t, "all are acked", b.settled(6))
	for _, m := range msgs {
		want := 1
		if m.MessageID == poison {
			want = 0
		}
		equal(t, "effects", effectsOf(t, db, m.MessageID), want)
	}
	if r := one(t, "scheduled rows", scheduledRows(t, db)); r.RequestID() != poison || r.Attempt() != 2 {
		t.Errorf("next attempt: %+v", r)
	}
	if s := l.stats.Snapshot(); s.Done != 5 || s.Retried != 1 {
		t.Errorf("stats %+v", s)
	}
}

// P5: while the database is unreachable deliveries are held. Nothing is acked, parked or
// spent, and the flow goes on without anybody's help.
func TestDatabaseAway(t *testing.T) {
	t.Parallel()
	dsn := testenv.Database(t)
	n, db := behind(t, dsn)
	entered, gate := make(chan struct{}, 100), make(chan struct{})
	h := &effects{BatchFunc: func(context.Context, *sqltx.Tx, []string) { entered <- struct{}{}; <-gate }}
	b := newBroker("q", msg("opener"))
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 4, MaxAttempts: 1})
	receive(t, "the opener", entered)
	msgs := newMsgs(20)
	b.put(msgs...)
	n.cut(true) // in the middle of the transaction
	close(gate)
	eventually(t, "it has looked for the database several times", func() bool {
		return n.dialed() >= 5 && l.logged("database away; holding deliveries") == 1
	})
	b.look(func() {
		equal(t, "what the lane said", b.log, []string(nil))
		equal(t, "held", len(b.sub.unacked), 1)
	})
	n.cut(false)
	eventually(t, "all are acked", b.settled(21))
	for _, m := range msgs {
		equal(t, "effects", effectsOf(t, db, m.MessageID), 1)
	}
	if s := l.stats.Snapshot(); s.Done != 21 || s.Retried+s.Parked+s.Deferred != 0 {
		t.Errorf("stats %+v", s)
	}
	b.look(func() { equal(t, "deliveries of the first", b.delivered["opener"], 1) })

	// A lane that is to stop does not wait for the database.
	n.cut(true)
	b.put(newMsgs(3)...)
	eventually(t, "it has looked for the database", func() bool { return n.dialed() >= 2 })
	l.stop()
	b.look(func() {
		equal(t, "left for others", len(b.ready), 3)
		equal(t, "faults", b.faults, []string(nil))
	})
}

// Before the broker would complain, the deliveries go back, and the lane subscribes again when
// the database is there.
func TestHeldTooLong(t *testing.T) {
	t.Parallel()
	dsn := testenv.Database(t)
	n, db := behind(t, dsn)
	entered, gate := make(chan struct{}, 100), make(chan struct{})
	h := &effects{BatchFunc: func(context.Context, *sqltx.Tx, []string) { entered <- struct{}{}; <-gate }}
	b := newBroker("q", msg("m"))
	l := run(t, db, b, Config{Queue: "q", Handler: h, MaxHold: time.Millisecond})
	receive(t, "the message is in hand", entered)
	n.cut(true)
	close(gate)
	eventually(t, "it goes back", func() (ok bool) {
		b.look(func() { ok = b.sub == nil && len(b.ready) == 1 })
		return ok
	})
	n.cut(true) // counts anew
	eventually(t, "it looks for the database", func() bool { return n.dialed() >= 3 })
	b.look(func() { equal(t, "subscriptions", b.prefetch, []int{1}) })
	n.cut(false)
	eventually(t, "it is acked", b.settled(1))
	equal(t, "effects", effectsOf(t, db, "m"), 1)
	if s := l.stats.Snapshot(); s.Done != 1 || s.Retried+s.Parked != 0 {
		t.Errorf("stats %+v", s)
	}
}

// A step that does not end is ended, and counts as a failed attempt; its neighbours go on.
func TestTimeout(t *testing.T) {
	t.Parallel()
	db := database(t)
	msgs := newMsgs(4)
	slow := msgs[2].MessageID
	h := &effects{OutcomeFunc: func(ctx context.Context, tx *sqltx.Tx, m *message.Message) message.Outcome {
		switch {
		case m.MessageID == slow: // waits for the server, which goes on when we are gone
			_ = tx.QueryRow(ctx, `SELECT SLEEP(2)`, nil, new(int))
		case m.RequestID() == slow: // or waits for something else
			<-ctx.Done()
		}
		return message.Outcome{}
	}}
	b := newBroker("q", msgs...)
	run(t, db, b, Config{Queue: "q", Handler: h, Timeout: 1500 * time.Millisecond, MaxAttempts: 2, RetryBase: time.Hour, RetryMax: time.Hour})
	eventually(t, "all are acked", b.settled(4))
	r := one(t, "scheduled rows", scheduledRows(t, db))
	if r.RequestID() != slow || r.reason != "not done within 1.5s: context deadline exceeded" {
		t.Errorf("next attempt of %s because %q", r.RequestID(), r.reason)
	}
	equal(t, "effects", number(t, db, `SELECT COUNT(*) FROM effects`), 3)
	b.put(r.Message)
	eventually(t, "all are acked", b.settled(5))
	parked := one(t, "outbox rows", outboxRows(t, db, "TRUE"))
	if got := parked.Headers.String(message.HeaderParkedReason); got != "failed 2 times: not done within 1.5s: context deadline exceeded" {
		t.Errorf("parked because %q", got)
	}
}

// B66: what a message is charged for an error of the database in its handler, as documented in
// docs/architecture.md. Each number comes once; then all is well.
func TestWhatAnErrorCosts(t *testing.T) {
	t.Parallel()
	db := database(t)
	numbers := map[string]bool{ // whether an attempt is spent
		"1020": false, "1205": false, "1213": false,
		"1040": false, "1053": false, "1317": false, "1927": false, "2006": false, "2013": false, "3169": false, "4031": false,
		"1290": false, "1792": false, "1836": false,
		"1021": false, "1026": false, "1114": false, "3675": false,
		"1062": true,
		"1146": true, "1264": true, "1364": true, "1406": true, "1452": true, "3024": true, "9999": true,
	}
	var msgs []message.Message
	spent := map[string]bool{}
	for n, is := range numbers {
		m := msg(message.NewID())
		m.Body = []byte(n)
		msgs = append(msgs, m)
		if is {
			spent[m.MessageID] = true
		}
	}
	var seen sync.Map
	h := &effects{OutcomeFunc: func(ctx context.Context, tx *sqltx.Tx, m *message.Message) message.Outcome {
		if _, again := seen.LoadOrStore(m.MessageID, true); again {
			return message.Outcome{}
		}
		if _, err := tx.Exec(ctx, `SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = `+string(m.Body)); err != nil {
			return message.Outcome{Kind: message.Retry, Reason: err.Error()} // as the saga engine does with a step's error
		}
		return message.Outcome{}
	}}
	b := newBroker("q", msgs...)
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 1, RetryBase: time.Hour, RetryMax: time.Hour})
	eventually(t, "all are acked", b.settled(len(msgs)))
	retried := map[string]bool{}
	for _, r := range scheduledRows(t, db) {
		retried[r.RequestID()] = true
	}
	for _, m := range msgs {
		if retried[m.MessageID] != spent[m.MessageID] {
			t.Errorf("error %s spent an attempt: %t, want %t", m.Body, retried[m.MessageID], spent[m.MessageID])
		}
		equal(t, "effects of "+string(m.Body), effectsOf(t, db, m.MessageID), 1)
	}
	s := l.stats.Snapshot()
	if s.Done != int64(len(msgs)-len(spent)) || s.Retried != int64(len(spent)) || s.Parked > 0 {
		t.Errorf("stats %+v", s)
	}
	equal(t, "warnings", l.logged("message will be retried"), len(spent))
}

// A server of the test's own: read-only for a while, as after a fail-over, then restarted,
// then killed.
func TestReadOnlyAndRestart(t *testing.T) {
	t.Parallel()
	servers := testenv.PrivateDatabase(t)
	dsn := servers.Database(t)
	root := open(t, dsn)
	// Root may write to a read-only server.
	exec(t, root, `CREATE USER worker IDENTIFIED BY 'worker'`)
	exec(t, root, `GRANT SELECT, INSERT, UPDATE, DELETE ON *.* TO worker`)
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	cfg.User, cfg.Passwd = "worker", "worker"
	db, err := sqltx.Open(cfg.FormatDSN(), sqltx.Config{LockWaitTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })

	b := newBroker("q", newMsgs(3)...)
	var seen atomic.Int64
	h := &effects{BatchFunc: func(context.Context, *sqltx.Tx, []string) { seen.Add(1) }}
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 4, MaxAttempts: 1})
	total := 3
	eventually(t, "all are acked", b.settled(total))
	for i, fault := range []struct {
		name       string
		begin, end func() error
	}{
		{"read-only",
			func() error { _, err := root.ExecContext(t.Context(), `SET GLOBAL read_only = 1`); return err },
			func() error { _, err := root.ExecContext(t.Context(), `SET GLOBAL read_only = 0`); return err }},
		{"restart", func() error { return servers.StopDatabase(t.Context()) }, func() error { return servers.StartDatabase(t.Context()) }},
		{"crash", servers.KillDatabase, func() error { return servers.StartDatabase(t.Context()) }},
	} {
		if err := fault.begin(); err != nil {
			t.Fatalf("%s: %v", fault.name, err)
		}
		msgs := newMsgs(10)
		b.put(msgs...)
		total += len(msgs)
		eventually(t, "it holds deliveries", func() bool { return l.logged("database away; holding deliveries") == i+1 })
		if err := sqltx.Probe(t.Context(), db); err == nil {
			t.Errorf("%s: the database takes writes", fault.name)
		}
		b.look(func() {
			equal(t, fault.name+": held", len(b.sub.unacked), 8)
			equal(t, fault.name+": acked", len(b.acked), total-len(msgs))
		})
		if err := fault.end(); err != nil {
			t.Fatalf("%s: %v", fault.name, err)
		}
		eventually(t, fault.name+" is over and all are acked", b.settled(total))
	}
	equal(t, "effects", number(t, db, `SELECT COUNT(*) FROM effects`), total)
	if s := l.stats.Snapshot(); s.Done != int64(total) || s.Retried+s.Parked != 0 {
		t.Errorf("stats %+v, want %d done", s, total)
	}
	equal(t, "faults", b.faults, []string(nil))
}

// P5: an account that cannot log in for a while, as while its password is being changed, is an
// outage like any other, whatever number the server gives it.
func TestAccountIsLocked(t *testing.T) {
	t.Parallel()
	dsn := testenv.Database(t)
	root := open(t, dsn)
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	user := cfg.DBName // nobody else has this name
	exec(t, root, `CREATE USER '`+user+`'@'%' IDENTIFIED BY 'secret'`)
	t.Cleanup(func() {
		if _, err := root.ExecContext(context.WithoutCancel(t.Context()), `DROP USER '`+user+`'@'%'`); err != nil {
			t.Error(err)
		}
	})
	exec(t, root, `GRANT ALL ON `+cfg.DBName+`.* TO '`+user+`'@'%'`)
	cfg.User, cfg.Passwd = user, "secret"
	db, err := sqltx.Open(cfg.FormatDSN(), sqltx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	db.SetMaxIdleConns(0) // each transaction logs in anew
	h := &effects{}
	msgs := newMsgs(20)
	b := newBroker("q", msgs[0])
	l := run(t, db, b, Config{Queue: "q", Handler: h, Batch: 4, RetryBase: time.Hour, RetryMax: time.Hour})
	eventually(t, "the lane works", b.settled(1))
	exec(t, root, `ALTER USER '`+user+`'@'%' ACCOUNT LOCK`)
	b.put(msgs[1:]...)
	eventually(t, "deliveries are held", func() bool { return l.logged("database away; holding deliveries") > 0 })
	exec(t, root, `ALTER USER '`+user+`'@'%' ACCOUNT UNLOCK`)
	eventually(t, "all are acked", b.settled(20))
	if s := l.stats.Snapshot(); s.Done != 20 || s.Parked+s.Retried != 0 {
		t.Errorf("stats %+v", s)
	}
}
