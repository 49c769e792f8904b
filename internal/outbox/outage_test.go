package outbox_test

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"backstep/internal/outbox"
	"backstep/internal/sqltx"
	"backstep/internal/testenv"
)

// proxy stands between us and a server, and can be cut or frozen.
type proxy struct {
	listener net.Listener
	target   string
	needle   []byte
	seen     atomic.Int64 // how often needle was sent to the server
	received atomic.Int64 // bytes from the server

	mu     sync.Mutex // guards below
	down   bool
	frozen chan struct{} // closed when it is not
	conns  map[net.Conn]bool
	wg     sync.WaitGroup
}

// newProxy stands before target and counts how often needle passes.
func newProxy(t testing.TB, target, needle string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: l, target: target, needle: []byte(needle), frozen: make(chan struct{}), conns: map[net.Conn]bool{}}
	close(p.frozen)
	p.wg.Go(p.serve)
	t.Cleanup(func() {
		p.thaw()
		p.cut()
		_ = l.Close()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) serve() {
	for {
		in, err := p.listener.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", p.target)
		p.mu.Lock()
		if err != nil || p.down {
			p.mu.Unlock()
			_ = in.Close()
			if out != nil {
				_ = out.Close()
			}
			continue
		}
		p.conns[in], p.conns[out] = true, true
		p.mu.Unlock()
		p.wg.Go(func() { p.forward(out, in, true) })
		p.wg.Go(func() { p.forward(in, out, false) })
	}
}

func (p *proxy) forward(to, from net.Conn, up bool) {
	defer func() { _, _ = to.Close(), from.Close() }()
	buf := make([]byte, 64<<10)
	for {
		p.mu.Lock()
		frozen := p.frozen
		p.mu.Unlock()
		<-frozen
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		switch {
		case !up:
			p.received.Add(int64(n))
		case len(p.needle) > 0:
			p.seen.Add(int64(bytes.Count(buf[:n], p.needle)))
		}
		if _, err := io.Copy(to, bytes.NewReader(buf[:n])); err != nil {
			return
		}
	}
}

// cut ends all connections and lets none through.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = true
	for c := range p.conns {
		_ = c.Close()
	}
	clear(p.conns)
}

// mend undoes cut.
func (p *proxy) mend() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = false
}

// freeze lets nothing pass, and keeps the connections.
func (p *proxy) freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.frozen = make(chan struct{})
}

// thaw undoes freeze.
func (p *proxy) thaw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.frozen:
	default:
		close(p.frozen)
	}
}

// proxied returns a database of the test's own, reached through a proxy that counts the
// relay's reads, and the same without it.
func proxied(t testing.TB) (db, direct *sql.DB, p *proxy) {
	t.Helper()
	dsn := testenv.Database(t)
	direct = open(t, dsn)
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	p = newProxy(t, cfg.Addr, "FORCE INDEX (ix_outbox_relay)")
	cfg.Addr = p.listener.Addr().String()
	if db, err = sqltx.Open(cfg.FormatDSN(), sqltx.Config{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db, direct, p
}

// proxiedBroker is newBroker through a proxy.
func proxiedBroker(t testing.TB) (*broker, *proxy) {
	t.Helper()
	vhost := testenv.Vhost(t)
	u, err := url.Parse(vhost.URL)
	if err != nil {
		t.Fatal(err)
	}
	p := newProxy(t, u.Host, "")
	u.Host = p.listener.Addr().String()
	return connect(t, vhost, u.String()), p
}

// uncharged demands that an outage cost nothing but time.
func uncharged(t testing.TB, db *sql.DB) {
	t.Helper()
	if n := number(t, db, `SELECT COUNT(*) FROM outbox_events WHERE attempts > 0 OR status = 'PARKED' OR last_error IS NOT NULL`); n != 0 {
		t.Errorf("%d rows were charged for an outage", n)
	}
}

// B04, I7: while the broker cannot be reached the relay reads nothing, and it goes on by
// itself soon after.
func TestBrokerUnreachable(t *testing.T) {
	t.Parallel()
	db, direct, reads := proxied(t)
	b, link := proxiedBroker(t)
	b.queue(t, "q", nil)
	start(t, db, b, outbox.Config{PollMax: 10 * time.Millisecond})
	add(t, direct, commands("q", names("m", 50))...)
	published(t, direct, 50)
	link.cut()
	eventually(t, "the loss is noticed", func() bool { return !b.Ready() })
	add(t, direct, commands("q", names("n", 500))...)
	before := reads.seen.Load()
	never(t, "the outbox is read for nothing", time.Second, func() bool { return reads.seen.Load() > before+2 })
	began := time.Now()
	link.mend()
	eventually(t, "it goes on", func() bool { return having(t, direct, "PUBLISHED") > 50 })
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it went on only after %s", took)
	}
	published(t, direct, 550)
	uncharged(t, direct)
	if ids := b.consume(t, "q").await(t, 550); len(ids) != 550 {
		t.Errorf("%d different messages arrived, want 550", len(ids))
	}
}

// B05: connections are closed by force under load. Nothing is lost, nothing is charged.
func TestConnectionClosedUnderLoad(t *testing.T) {
	t.Parallel()
	db := database(t)
	b, link := proxiedBroker(t)
	b.queue(t, "q", nil)
	start(t, db, b, outbox.Config{})
	s := b.consume(t, "q")
	const rounds = 20
	n := 0
	for i := range rounds {
		for range 10 {
			ids := names(fmt.Sprintf("m%d-", n), 10)
			n += len(ids)
			add(t, db, commands("q", ids)...)
		}
		if i == rounds/2 {
			b.CloseConnections(t) // by the broker, with 320 CONNECTION_FORCED
		} else {
			link.cut()
			link.mend()
		}
	}
	published(t, db, n)
	if ids := s.await(t, n); len(ids) != n {
		t.Errorf("%d different messages arrived, want %d", len(ids), n)
	}
	uncharged(t, db)
}

// The database goes away in the middle and comes back.
func TestDatabaseUnreachable(t *testing.T) {
	t.Parallel()
	db, direct, link := proxied(t)
	b := newBroker(t)
	b.queue(t, "q", nil)
	start(t, db, b, outbox.Config{})
	s := b.consume(t, "q")
	for i := range 5 {
		add(t, direct, commands("q", names(fmt.Sprintf("m%d-", i), 200))...)
		eventually(t, "some are published", func() bool { return having(t, direct, "PUBLISHED") > 200*i })
		link.cut()
		add(t, direct, commands("q", names(fmt.Sprintf("n%d-", i), 50))...)
		link.mend()
	}
	published(t, direct, 1250)
	if ids := s.await(t, 1250); len(ids) != 1250 {
		t.Errorf("%d different messages arrived, want 1250", len(ids))
	}
	uncharged(t, direct)
}

// Whatever does not answer: stopping takes the drain time-out and little more.
func TestStopDuringOutages(t *testing.T) {
	t.Parallel()
	const drain = time.Second
	tests := []struct {
		name  string
		fault func(database, broker *proxy)
	}{
		{"broker cut", func(_, b *proxy) { b.cut() }},
		{"broker frozen", func(_, b *proxy) { b.freeze() }}, // B10: it reads nothing any more
		{"database cut", func(d, _ *proxy) { d.cut() }},
		{"database frozen", func(d, _ *proxy) { d.freeze() }},
		{"both cut", func(d, b *proxy) { d.cut(); b.cut() }},
		{"both frozen", func(d, b *proxy) { d.freeze(); b.freeze() }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			db, direct, d := proxied(t)
			b, l := proxiedBroker(t)
			b.queue(t, "q", nil)
			r := start(t, db, b, outbox.Config{DrainTimeout: drain})
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			var added atomic.Int64
			wg.Go(func() {
				for ; ctx.Err() == nil; added.Add(5) {
					msgs := commands("q", names(fmt.Sprintf("m%d-", added.Load()), 5))
					for i := range msgs {
						msgs[i].Body = make([]byte, 50_000)
					}
					add(t, direct, msgs...)
				}
			})
			defer wg.Wait()
			defer cancel()
			eventually(t, "rows are published", func() bool { return having(t, direct, "PUBLISHED") > 50 })
			tt.fault(d, l)
			before := added.Load()
			eventually(t, "more rows come", func() bool { return added.Load() > before+50 })
			cancel()
			wg.Wait()
			n := int(added.Load())
			// Releasing the leases has five seconds of its own.
			stopped(t, r, drain+6*time.Second)
			d.thaw()
			l.thaw()
			d.mend()
			l.mend()
			start(t, direct, b, outbox.Config{LeaseTTL: time.Second})
			published(t, direct, n)
			uncharged(t, direct)
			b.consume(t, "q").await(t, n)
		})
	}
}
