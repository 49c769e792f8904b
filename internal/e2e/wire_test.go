package e2e

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
)

// wire is a proxy before a broker that reads the frames of AMQP 0-9-1 on their way, and does to
// some of them what happens on no healthy link, or to nobody who asks for it.
type wire struct {
	address string // of the proxy

	mu       sync.Mutex // guards below; held while a frame is written to a client
	mute     string     // confirms of messages with this routing key are kept back
	spoilt   []byte     // message headers with this in them arrive as a malformed frame
	again    int        // how many acks of deliveries are still to arrive twice
	channels map[channel]*confirms
}

// channel is one of a connection.
type channel struct {
	client net.Conn
	id     uint16
}

// confirms is what a channel in confirm mode waits for.
type confirms struct {
	last uint64            // delivery tag
	keys map[uint64]string // routing keys, by delivery tag
	kept []uint64
}

// wired returns a wire to the broker at rawURL.
func wired(t *testing.T, rawURL string) *wire {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	target := u.Host
	w := &wire{address: listener.Addr().String(), channels: map[channel]*confirms{}}
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
			open.Go(func() { w.forward(client, server) })
			open.Go(func() { w.back(client, server) })
		}
	})
	t.Cleanup(func() { // the processes have ended, and with them their connections
		_ = listener.Close()
		open.Wait()
	})
	return w
}

// keepBack keeps back the confirms of messages with this routing key; "" lets them go, those
// that were kept back as well.
func (w *wire) keepBack(key string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mute = key
	if key != "" {
		return
	}
	for ch, c := range w.channels {
		for _, tag := range c.kept {
			_, _ = ch.client.Write(ackFrame(ch.id, tag)) // nobody waits for it if that fails
		}
		c.kept = nil
	}
}

// waiting returns how many confirms are kept back from channels that are open.
func (w *wire) waiting() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.channels {
		n += len(c.kept)
	}
	return n
}

// spoil makes the broker meet a malformed frame where message headers hold this text; "" ends it.
func (w *wire) spoil(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.spoilt = []byte(text)
}

// ackTwice makes the broker meet the next acks of deliveries twice: it closes the channel.
func (w *wire) ackTwice(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.again = n
}

// ackedTwice reports whether all of them have come.
func (w *wire) ackedTwice() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.again == 0
}

const (
	methodFrame, headerFrame = 1, 2
	frameHead                = 7 // type, channel, size; behind the payload there is one byte more
)

// methods we know of, by class and method
const (
	channelOpen    = 20<<16 | 10
	channelClose   = 20<<16 | 40
	confirmSelect  = 85<<16 | 10
	basicPublish   = 60<<16 | 40
	basicAck       = 60<<16 | 80
	protocolHeader = 8 // bytes a client begins with
)

// readFrame returns a whole frame.
func readFrame(r io.Reader) ([]byte, error) {
	head := make([]byte, frameHead)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	frame := append(head, make([]byte, binary.BigEndian.Uint32(head[3:])+1)...)
	_, err := io.ReadFull(r, frame[frameHead:])
	return frame, err
}

// method returns a frame's method, its arguments and its channel.
func method(frame []byte) (id uint32, args []byte, ch uint16) {
	ch = binary.BigEndian.Uint16(frame[1:])
	if frame[0] != methodFrame {
		return 0, nil, ch
	}
	return binary.BigEndian.Uint32(frame[frameHead:]), frame[frameHead+4 : len(frame)-1], ch
}

func (w *wire) forward(client, server net.Conn) {
	defer func() { _, _ = client.Close(), server.Close() }()
	if _, err := io.CopyN(server, client, protocolHeader); err != nil {
		return
	}
	for {
		frame, err := readFrame(client)
		if err != nil {
			return
		}
		if _, err := server.Write(w.note(client, frame)); err != nil {
			return
		}
	}
}

// note takes note of what is published, and returns what is to be passed on of a frame.
func (w *wire) note(client net.Conn, frame []byte) (passed []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if frame[0] == headerFrame && len(w.spoilt) > 0 && bytes.Contains(frame, w.spoilt) {
		frame[len(frame)-1] = 0 // a frame ends with 0xCE
	}
	id, args, ch := method(frame)
	at := channel{client, ch}
	switch id {
	case channelOpen, channelClose:
		delete(w.channels, at)
	case confirmSelect:
		w.channels[at] = &confirms{keys: map[uint64]string{}}
	case basicPublish:
		if c := w.channels[at]; c != nil {
			key := args[2:]     // behind a reserved number there are
			_, key = short(key) // the exchange
			key, _ = short(key) // and the routing key
			c.last++
			c.keys[c.last] = string(key)
		}
	case basicAck:
		if w.again > 0 {
			w.again--
			return append(frame, frame...)
		}
	}
	return frame
}

// short reads a short string.
func short(b []byte) (text, rest []byte) {
	n := 1 + int(b[0])
	return b[1:n], b[n:]
}

func (w *wire) back(client, server net.Conn) {
	defer func() { _, _ = client.Close(), server.Close() }()
	for {
		frame, err := readFrame(server)
		if err != nil {
			return
		}
		w.mu.Lock()
		_, err = client.Write(w.thin(client, frame))
		w.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// thin returns what is to be passed on of a frame: of a confirm those messages that are not
// kept back, one by one.
func (w *wire) thin(client net.Conn, frame []byte) (passed []byte) {
	id, args, ch := method(frame)
	c := w.channels[channel{client, ch}]
	if id != basicAck || c == nil {
		return frame
	}
	last, multiple := binary.BigEndian.Uint64(args), args[8]&1 != 0
	for tag, key := range c.keys {
		switch {
		case tag != last && (!multiple || tag > last):
			continue
		case w.mute != "" && key == w.mute:
			c.kept = append(c.kept, tag)
		default:
			passed = append(passed, ackFrame(ch, tag)...)
		}
		delete(c.keys, tag)
	}
	return passed
}

func ackFrame(ch uint16, tag uint64) []byte {
	f := binary.BigEndian.AppendUint16([]byte{methodFrame}, ch)
	f = binary.BigEndian.AppendUint32(f, 4+8+1)
	f = binary.BigEndian.AppendUint32(f, basicAck)
	return append(binary.BigEndian.AppendUint64(f, tag), 0, 0xCE)
}
