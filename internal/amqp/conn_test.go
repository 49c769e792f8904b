package amqp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

// pair returns both ends of a TCP connection, ours wrapped.
func pair(t *testing.T, timeout time.Duration) (*writeBehind, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	nc, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	peer, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	c := newWriteBehind(nc, timeout)
	t.Cleanup(func() {
		_ = c.Close()
		<-c.done
		_ = peer.Close()
	})
	return c, peer
}

// TestCloseSendsWhatIsUnsent, in order.
func TestCloseSendsWhatIsUnsent(t *testing.T) {
	c, peer := pair(t, time.Minute)
	var want bytes.Buffer
	for i := range 10000 {
		b := bytes.Repeat([]byte{byte(i)}, i%100)
		want.Write(b)
		if n, err := c.Write(b); n != len(b) || err != nil {
			t.Fatalf("Write = %d, %v", n, err)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(peer)
	if err != nil || !bytes.Equal(got, want.Bytes()) {
		t.Errorf("the peer read %d bytes, %v, want the %d written", len(got), err, want.Len())
	}
	if _, err := c.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Write after Close = %v, want net.ErrClosed", err)
	}
}

// stuff writes until that fails. The peer reads nothing.
func stuff(c *writeBehind) error {
	for {
		if _, err := c.Write(make([]byte, 4096)); err != nil {
			return err
		}
	}
}

func TestWriteTimeout(t *testing.T) {
	c, _ := pair(t, 50*time.Millisecond)
	if err := stuff(c); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Write = %v, want a time-out", err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Read after a write timed out = %v, want net.ErrClosed", err)
	}
}

// TestSetDeadlineEndsAWrite that is under way, as CloseDeadline needs.
func TestSetDeadlineEndsAWrite(t *testing.T) {
	c, _ := pair(t, time.Hour)
	stuffed := make(chan error, 1)
	go func() { stuffed <- stuff(c) }()
	c.mu.Lock()
	for len(c.unsent) < maxUnsent {
		c.change.Wait()
	}
	c.mu.Unlock()
	if err := c.SetDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if err := <-stuffed; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Write = %v, want a time-out", err)
	}
}
