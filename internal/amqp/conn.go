package amqp

import (
	"net"
	"sync"
	"time"
)

// deadlineConn ends a write into a socket that the peer does not read. amqp091 sets no write
// deadline: without one, a publish to a broker under an alarm can hold the connection's locks
// for ever, and Close waits behind it.
type deadlineConn struct {
	net.Conn
	timeout time.Duration

	mu    sync.Mutex // guards below; held for no longer than it takes to set a deadline
	fixed bool       // somebody set a deadline, for a handshake or a close: it stands
	until time.Time  // the deadline we set last
}

// Write gives each write at least half the timeout. Setting a deadline costs about as much as
// a small write, so it is not done for every one.
func (c *deadlineConn) Write(b []byte) (int, error) {
	if err := c.arm(); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

func (c *deadlineConn) arm() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if c.fixed || c.until.Sub(now) > c.timeout/2 {
		return nil
	}
	c.until = now.Add(c.timeout)
	return c.Conn.SetWriteDeadline(c.until)
}

func (c *deadlineConn) SetDeadline(t time.Time) error {
	c.fix(t)
	return c.Conn.SetDeadline(t)
}

func (c *deadlineConn) SetWriteDeadline(t time.Time) error {
	c.fix(t)
	return c.Conn.SetWriteDeadline(t)
}

func (c *deadlineConn) fix(t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fixed, c.until = !t.IsZero(), time.Time{}
}
