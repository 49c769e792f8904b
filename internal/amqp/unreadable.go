package amqp

import (
	"bufio"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
)

// unreadableHeader is the header that a message has instead of those that amqp091 would not read, and
// why. It ends the connection over them, and so would the next one, again and again, for all
// queues of the process.
var unreadableHeader = "x-backstep-unreadable-" + rand.Text() // a name that no client knows

// What amqp091 (v1.16, read.go) takes of a header table. Any client may send more in one frame,
// and the management UI more than a frame may hold: the broker sends that on all the same.
const (
	maxEntries = 8192 // of one table or list
	maxDepth   = 32   // of tables and lists in each other
)

// reading is a net.Conn that hides from amqp091 the headers it would not read.
type reading struct {
	net.Conn
	in   *bufio.Reader
	max  func() int // bytes of a frame with its framing; 0 if there is no limit yet
	head []byte     // what comes first
	rest int64      // bytes that then pass as they are
}

// Of frames, from AMQP 0-9-1, section 4.2.3 of the specification.
const (
	frameHead   = 1 + 2 + 4 // type, channel, size
	frameEnd    = 0xce
	headerFrame = 2
	heartbeat   = 8
	// maxHeaderFrame bounds what is read to be looked at. What is larger is so by its headers.
	maxHeaderFrame = 1 << 20
	// beforeHeaders is how long it may be up to the headers' entries.
	beforeHeaders = 2 + 2 + 8 + 2 + 2*(1+255) + 4
)

// Read returns what the broker sends.
func (r *reading) Read(p []byte) (n int, err error) {
	if len(r.head) == 0 && r.rest == 0 {
		if err := r.next(); err != nil {
			return 0, err
		}
	}
	if len(r.head) > 0 {
		n = copy(p, r.head)
		r.head = r.head[n:]
		return n, nil
	}
	n, err = r.in.Read(p[:min(int64(len(p)), r.rest)])
	r.rest -= int64(n)
	return n, err
}

// next reads the beginning of a frame, and all of it if it has headers.
func (r *reading) next() error {
	head := make([]byte, frameHead)
	if _, err := io.ReadFull(r.in, head[:1]); err != nil {
		return err
	}
	if kind := head[0]; kind < 1 || kind > heartbeat { // not AMQP, or a version of it that amqp091 will refuse
		r.head, r.rest = head[:1], 1<<62
		return nil
	}
	if _, err := io.ReadFull(r.in, head[1:]); err != nil {
		return err
	}
	size := int64(binary.BigEndian.Uint32(head[3:]))
	if head[0] != headerFrame {
		r.head, r.rest = head, size+1
		return nil
	}
	if size > maxHeaderFrame {
		return r.skip(head, size)
	}
	frame := append(head, make([]byte, size+1)...)
	if _, err := io.ReadFull(r.in, frame[frameHead:]); err != nil {
		return err
	}
	r.head = readable(frame, r.max())
	return nil
}

// skip reads a header frame that is too large to be looked at, without the entries of its headers.
func (r *reading) skip(head []byte, size int64) error {
	start, err := r.in.Peek(beforeHeaders)
	if err != nil {
		return err
	}
	at, table, ok := tableIn(start)
	behind := size - int64(at) - int64(table)
	if !ok || behind < 0 || behind > maxHeaderFrame { // amqp091 will say what is wrong with it
		r.head, r.rest = head, size+1
		return nil
	}
	before := append([]byte{}, start[:at-4]...)
	if _, err := io.CopyN(io.Discard, r.in, int64(at)+int64(table)); err != nil {
		return err
	}
	after := make([]byte, behind+1)
	if _, err := io.ReadFull(r.in, after); err != nil {
		return err
	}
	r.head = substitute(head[:3], before, after[:behind], fmt.Errorf("headers of %d bytes, more than a frame holds", table))
	return nil
}

// readable returns a header frame, or the same with other headers if amqp091 would not read it.
func readable(frame []byte, frameMax int) []byte {
	payload := frame[frameHead : len(frame)-1]
	at, size, ok := headersIn(payload)
	if !ok {
		return frame
	}
	table := payload[at : at+size]
	err := walk(table, 0, true)
	if err == nil && frameMax > 0 && len(frame) > frameMax {
		err = fmt.Errorf("headers of %d bytes, more than a frame holds", size)
	}
	if err == nil {
		return frame
	}
	return substitute(frame[:3], payload[:at-4], payload[at+size:], err)
}

// substitute makes a header frame with another table: its kind and channel, what stands before and
// behind the table, and why the table could not stay.
func substitute(kind, before, behind []byte, why error) []byte {
	text := "headers cannot be read: " + why.Error()
	table := append([]byte{byte(len(unreadableHeader))}, unreadableHeader...)
	table = binary.BigEndian.AppendUint32(append(table, 'S'), uint32(len(text)))
	table = append(table, text...)
	out := append([]byte{}, kind...)
	out = binary.BigEndian.AppendUint32(out, uint32(len(before)+4+len(table)+len(behind)))
	out = append(out, before...)
	out = binary.BigEndian.AppendUint32(out, uint32(len(table)))
	out = append(out, table...)
	return append(append(out, behind...), frameEnd)
}

// headersIn returns where in a header frame's payload the entries of the header table are.
func headersIn(payload []byte) (at, size int, ok bool) {
	at, size, ok = tableIn(payload)
	return at, size, ok && size <= len(payload)-at
}

// tableIn is headersIn for the beginning of a payload: where the entries begin, and how long they
// say they are.
func tableIn(payload []byte) (at, size int, ok bool) {
	const fixed = 2 + 2 + 8 + 2 // class, weight, body size, flags
	const contentType, contentEncoding, headers = 1 << 15, 1 << 14, 1 << 13
	if len(payload) < fixed {
		return 0, 0, false
	}
	flags := binary.BigEndian.Uint16(payload[fixed-2:])
	at = fixed
	for _, text := range []uint16{contentType, contentEncoding} {
		if flags&text == 0 {
			continue
		}
		if at >= len(payload) {
			return 0, 0, false
		}
		at += 1 + int(payload[at])
	}
	if flags&headers == 0 || at+4 > len(payload) {
		return 0, 0, false
	}
	size = int(binary.BigEndian.Uint32(payload[at:]))
	return at + 4, size, true
}

var errCut = errors.New("they end too early")

// walk says what amqp091 would not read in the entries of a table, or the elements of a list.
func walk(b []byte, depth int, named bool) error {
	if depth > maxDepth {
		return fmt.Errorf("more than %d tables in each other", maxDepth)
	}
	for n := 0; len(b) > 0; n++ {
		if n == maxEntries {
			return fmt.Errorf("more than %d in one table", maxEntries)
		}
		if named {
			if name := 1 + int(b[0]); name < len(b) {
				b = b[name:]
			} else {
				return errCut
			}
		}
		kind, size := b[0], 0
		b = b[1:]
		switch kind {
		case 'V':
		case 't', 'b', 'B':
			size = 1
		case 's', 'u':
			size = 2
		case 'I', 'i', 'f':
			size = 4
		case 'D':
			size = 5
		case 'l', 'd', 'T':
			size = 8
		case 'S', 'x', 'A', 'F':
			if len(b) < 4 {
				return errCut
			}
			size = int(binary.BigEndian.Uint32(b))
			b = b[4:]
		default:
			return fmt.Errorf("a value of the unknown type %q", kind)
		}
		if size > len(b) {
			return errCut
		}
		if kind == 'A' || kind == 'F' {
			if err := walk(b[:size], depth+1, kind == 'F'); err != nil {
				return err
			}
		}
		b = b[size:]
	}
	return nil
}
