package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"regexp"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
)

// Statements counts the commands that clients send to a MySQL server, each of which is a
// round trip. It stands between the two, so it sees all of them, and only those of the
// clients that are told its address: counters of the server are of all its clients. It costs
// time; what goes through it is not to be timed. It understands neither TLS nor compression.
type Statements struct {
	network, server string
	ln              net.Listener

	mu     sync.Mutex // guards below; not held during I/O
	counts map[string]int
	err    error // the first command it did not understand
}

// CountStatements returns a counter for the server at this address. It counts while Run runs.
func CountStatements(network, server string) (*Statements, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("count statements: %w", err)
	}
	return &Statements{network: network, server: server, ln: ln, counts: map[string]int{}}, nil
}

// Addr is where clients connect, by TCP.
func (s *Statements) Addr() string { return s.ln.Addr().String() }

// Counts returns how often each kind of statement was sent so far, such as "INSERT orders" or
// "COMMIT". The error says that a client spoke in a way that was not understood.
func (s *Statements) Counts() (map[string]int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.counts), s.err
}

// Run serves until ctx ends, closes all connections and returns nil.
func (s *Statements) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	stop := context.AfterFunc(ctx, func() { _ = s.ln.Close() }) // nobody can be waiting on it any more
	defer stop()
	for {
		client, err := s.ln.Accept()
		if err != nil {
			if ctx.Err() == nil {
				return errors.Join(fmt.Errorf("count statements: %w", err), g.Wait())
			}
			return g.Wait()
		}
		g.Go(func() error {
			s.serve(ctx, client)
			return nil
		})
	}
}

// serve passes on what one client and the server say, until either hangs up.
func (s *Statements) serve(ctx context.Context, client net.Conn) {
	defer client.Close() //nolint:errcheck // both ends have been told
	var d net.Dialer
	server, err := d.DialContext(ctx, s.network, s.server)
	if err != nil {
		return // the client sees that it cannot connect
	}
	hangUp := func() {
		_ = client.Close() // again, maybe
		_ = server.Close()
	}
	stop := context.AfterFunc(ctx, hangUp)
	defer stop()
	var g errgroup.Group
	g.Go(func() error {
		defer hangUp()
		_, err := io.Copy(client, server)
		return err
	})
	g.Go(func() error {
		defer hangUp()
		return s.pass(server, bufio.NewReaderSize(client, 64<<10))
	})
	_ = g.Wait() // one of the two hung up
}

// pass passes on packets: three bytes of length, a sequence number that begins at 0 with each
// command, and, in the first packet of a command, a byte that says which (MySQL internals,
// "MySQL Packets" and "Command Phase").
func (s *Statements) pass(server io.Writer, client *bufio.Reader) error {
	for {
		head, err := client.Peek(4)
		if err != nil {
			return err
		}
		n := int(head[0]) | int(head[1])<<8 | int(head[2])<<16
		packet := make([]byte, 4+n)
		if _, err := io.ReadFull(client, packet); err != nil {
			return err
		}
		if packet[3] == 0 && n > 0 {
			s.count(packet[4], packet[5:])
		}
		if _, err := server.Write(packet); err != nil {
			return err
		}
	}
}

// The commands of the protocol that our driver sends.
const (
	comQuit        = 0x01
	comQuery       = 0x03
	comPing        = 0x0e
	comStmtPrepare = 0x16
	comStmtExecute = 0x17
	comStmtClose   = 0x19
)

func (s *Statements) count(command byte, text []byte) {
	what := ""
	switch command {
	case comQuit, comStmtClose: // the server does not answer
		return
	case comQuery:
		what = kindOf(string(text))
	case comPing:
		what = "PING"
	case comStmtPrepare:
		what = "PREPARE"
	case comStmtExecute:
		what = "EXECUTE"
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if what == "" {
		s.err = fmt.Errorf("a command of MySQL's protocol is not understood: %#x", command)
		return
	}
	s.counts[what]++
}

var (
	phrase = regexp.MustCompile(`(?i)^[\s(]*(SET SESSION|SET TRANSACTION|START TRANSACTION|ROLLBACK TO|\w+)`)
	table  = regexp.MustCompile("(?i)(?:INTO|FROM|JOIN|UPDATE)\\s+`?([a-z_][a-z0-9_]*)")
	locks  = regexp.MustCompile(`(?i)\sFOR\s+UPDATE$`)
)

// kindOf says what a statement does, and to which table.
func kindOf(query string) string {
	verb := "OTHER"
	if m := phrase.FindStringSubmatch(query); m != nil {
		verb = strings.ToUpper(m[1])
	}
	switch verb {
	case "SELECT", "INSERT", "UPDATE", "DELETE":
	default:
		return verb
	}
	query = strings.TrimSpace(withoutValues(query))
	if m := table.FindStringSubmatch(query); m != nil {
		verb += " " + strings.ToLower(m[1])
	}
	if locks.MatchString(query[max(0, len(query)-20):]) {
		verb += " FOR UPDATE"
	}
	return verb
}

// withoutValues leaves out what is quoted, in which anything may stand.
func withoutValues(query string) string {
	var b strings.Builder
	inside := false
	for i := 0; i < len(query); i++ {
		switch c := query[i]; {
		case c == '\'':
			inside = !inside // a quote that is doubled ends one and begins another
		case !inside:
			b.WriteByte(c)
		case c == '\\':
			i++ // the next is no end
		}
	}
	return b.String()
}
