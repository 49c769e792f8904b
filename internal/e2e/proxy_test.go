package e2e

import (
	"encoding/binary"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/go-sql-driver/mysql"
)

// fate of a statement that is on its way to the database. The client never hears of the others:
// its connection is gone, or seems to be there.
type fate int

const (
	answered fate = iota
	lostOnTheWay
	doneButNotAnswered
	swallowed // and so is all that comes after it, either way; neither side is told
)

// proxied returns the DSN of the wheel's database by way of a proxy that asks decide what is to
// become of each statement.
func (w *wheel) proxied(decide func(statement string) fate) (dsn string) {
	w.t.Helper()
	cfg, err := mysql.ParseDSN(w.dsn)
	if err != nil {
		w.t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	target := cfg.Addr
	over := make(chan struct{})
	var open sync.WaitGroup
	open.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return // closed
			}
			server, err := net.Dial("tcp", target)
			if err != nil {
				_ = client.Close() // that is what a client sees of a server that is away
				continue
			}
			l := &link{client: client, server: server, decide: decide, over: over}
			open.Go(l.forward)
			open.Go(l.back)
		}
	})
	// Cleanups run last first: the processes have ended, and with them their connections.
	w.t.Cleanup(func() {
		close(over)
		_ = listener.Close() // which ends the loop
		open.Wait()
	})
	cfg.Addr = listener.Addr().String()
	return cfg.FormatDSN()
}

// link is one connection through the proxy.
type link struct {
	client, server net.Conn
	decide         func(statement string) fate
	over           <-chan struct{} // the test is over

	mu   sync.Mutex // guards below
	mute bool       // the next answer is not passed on
	hole bool       // nothing is, not even that a side has closed the connection
}

func (l *link) set(what *bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	*what = true
}

func (l *link) close() {
	_ = l.client.Close() // closed already is as good
	_ = l.server.Close()
}

// forward passes on what the client sends, packet by packet: three bytes of length, one of
// sequence, payload (MySQL's "Protocol::Packet").
func (l *link) forward() {
	defer l.close()
	header := make([]byte, 4)
	for {
		if _, err := io.ReadFull(l.client, header); err != nil {
			return
		}
		size := int(binary.LittleEndian.Uint32([]byte{header[0], header[1], header[2], 0}))
		packet := append(header[:4:4], make([]byte, size)...)
		if _, err := io.ReadFull(l.client, packet[4:]); err != nil {
			return
		}
		const comQuery = 0x03
		if header[3] == 0 && size > 1 && packet[4] == comQuery {
			switch l.decide(string(packet[5:])) {
			case lostOnTheWay:
				return
			case doneButNotAnswered:
				l.set(&l.mute)
			case swallowed:
				l.set(&l.hole)
				<-l.over
				return
			}
		}
		if _, err := l.server.Write(packet); err != nil {
			return
		}
	}
}

// back passes on what the server answers. A client sends nothing before it has the whole
// answer to its last statement, so all that comes after mute is set answers that one.
func (l *link) back() {
	defer l.close()
	buf := make([]byte, 64<<10)
	for {
		n, err := l.server.Read(buf)
		l.mu.Lock()
		mute, hole := l.mute, l.hole
		l.mu.Unlock()
		if hole {
			<-l.over
			return
		}
		if n > 0 {
			if mute {
				return // the server has done it
			}
			if _, werr := l.client.Write(buf[:n]); werr != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// The proxy itself: what it forwards is done, what it loses is not.
func TestProxy(t *testing.T) {
	w := newWheel(t)
	var mu sync.Mutex // guards next
	next := answered
	db := openDSN(t, w.proxied(func(statement string) fate {
		if !strings.HasPrefix(statement, "UPDATE") {
			return answered // what the driver says when it connects
		}
		mu.Lock()
		defer mu.Unlock()
		return next
	}))
	db.SetMaxIdleConns(0) // a lost connection is not tried again with another
	for i, f := range []fate{answered, lostOnTheWay, doneButNotAnswered} {
		mu.Lock()
		next = f
		mu.Unlock()
		_, err := db.ExecContext(t.Context(), `UPDATE inventory SET initial = initial + 1, available = available + 1`)
		if (err != nil) != (f != answered) {
			t.Errorf("fate %d: %v", f, err)
		}
		want := []int{1_001, 1_001, 1_002}[i]
		if got := w.count(`SELECT MIN(available) FROM inventory`); got != want {
			t.Errorf("fate %d: available is %d, want %d", f, got, want)
		}
	}
}
