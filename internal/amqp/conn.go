package amqp

import (
	"net"
	"sync"
	"time"
)

const (
	// maxUnsent is how many bytes may wait for the socket before Write waits too.
	maxUnsent = 256 << 10
	// lingerTimeout bounds what Close still tries to send: the answer to the broker's close.
	lingerTimeout = time.Second
)

// writeBehind is a net.Conn whose writes return at once, while one goroutine sends what has
// gathered. amqp091 writes each message to the socket by itself; together they cost a quarter
// less (BenchmarkPublish). The meaning of a write is the same: bytes in the kernel's buffer
// are no nearer to the broker.
//
// It also ends a write into a socket that the peer does not read. amqp091 sets no write
// deadline: without one, a publish to a broker under an alarm can hold the connection's locks
// for ever, and Close waits behind it.
type writeBehind struct {
	net.Conn
	timeout time.Duration
	done    chan struct{} // closed when the socket is and nothing more runs

	mu     sync.Mutex // guards below; not held during a write to the socket
	change sync.Cond  // on mu: any of these changed
	unsent []byte
	err    error // of the socket, or net.ErrClosed; nothing is sent any more
	closed bool  // by Close; what is unsent is sent first
	fixed  bool  // somebody set a deadline, for a handshake or a close: it stands
}

// newWriteBehind starts the goroutine that sends; Close ends it.
func newWriteBehind(nc net.Conn, timeout time.Duration) *writeBehind {
	c := &writeBehind{Conn: nc, timeout: timeout, done: make(chan struct{})}
	c.change.L = &c.mu
	go c.send()
	return c
}

// Write waits only if the peer does not read. Its error is that of an earlier write.
func (c *writeBehind) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.unsent) >= maxUnsent && c.err == nil {
		c.change.Wait()
	}
	if c.closed && c.err == nil {
		return 0, net.ErrClosed
	}
	if c.err != nil {
		return 0, c.err
	}
	if len(c.unsent) == 0 {
		c.change.Broadcast()
	}
	c.unsent = append(c.unsent, b...)
	return len(b), nil
}

// send writes what has gathered until that fails or Close was called.
func (c *writeBehind) send() {
	defer close(c.done)
	var batch []byte
	for {
		var ok bool
		if batch, ok = c.take(batch); !ok {
			break
		}
		if _, err := c.Conn.Write(batch); err != nil {
			c.fail(err)
			break
		}
	}
	_ = c.Conn.Close() // the reader notices; there is nobody else to tell
}

// take waits for something to send and exchanges it for the empty buffer. It returns false
// if there will be nothing.
func (c *writeBehind) take(empty []byte) (batch []byte, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.unsent) == 0 && !c.closed {
		c.change.Wait()
	}
	if len(c.unsent) == 0 {
		c.err = net.ErrClosed
		return nil, false
	}
	if !c.fixed {
		if err := c.Conn.SetWriteDeadline(time.Now().Add(c.timeout)); err != nil {
			c.err = err
			return nil, false
		}
	}
	batch, c.unsent = c.unsent, empty[:0]
	c.change.Broadcast() // there is room
	return batch, true
}

func (c *writeBehind) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
	c.change.Broadcast()
}

// SetDeadline holds for writes to the socket, those under way included.
func (c *writeBehind) SetDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fixed = !t.IsZero()
	return c.Conn.SetDeadline(t)
}

// SetWriteDeadline holds for writes to the socket, those under way included.
func (c *writeBehind) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fixed = !t.IsZero()
	return c.Conn.SetWriteDeadline(t)
}

// Close sends what is unsent, if the peer takes it within a moment, and closes the socket. It
// does not wait for that; done tells.
func (c *writeBehind) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed, c.fixed = true, true
	c.change.Broadcast()
	return c.Conn.SetDeadline(time.Now().Add(lingerTimeout))
}
