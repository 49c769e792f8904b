package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// maxBody is the largest body that any worker takes.
const maxBody = 4 << 20

// maxFaults is how many faulty lines are named.
const maxFaults = 20

// readLines reads orders, one JSON object a line; blank lines are passed over, and so is the
// byte order mark that some editors put first. It names the lines that cannot be orders, and
// returns no order then: half a file submitted would have to be told from the other half by
// hand. No line at all is a mistake too: nobody submits nothing.
func readLines(r io.Reader) ([]order, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	switch start, _ := in.Peek(3); { // an error comes again
	case bytes.HasPrefix(start, []byte("\xef\xbb\xbf")):
		_, _ = in.Discard(3) // they are there
	case bytes.HasPrefix(start, []byte("\xff\xfe")), bytes.HasPrefix(start, []byte("\xfe\xff")):
		return nil, errors.New("it is UTF-16; JSON is UTF-8, so save it as that")
	}
	var orders []order
	var faults []error
	for n := 1; ; n++ {
		line, err := readLine(in)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("read line %d: %w", n, err)
		}
		end := err != nil
		body := bytes.TrimSpace(line)
		if len(body) > 0 {
			if err := checkLine(body); err != nil {
				faults = append(faults, fmt.Errorf("line %d: %w", n, err))
			}
			orders = append(orders, order{Line: n, body: body})
		}
		if end {
			break
		}
	}
	if len(orders) == 0 {
		return nil, errors.New("there is no order in it; it should have one JSON object a line")
	}
	if len(faults) > maxFaults {
		faults = append(faults[:maxFaults], fmt.Errorf("and %d more", len(faults)-maxFaults))
	}
	return orders, errors.Join(faults...)
}

// readLine returns a line, also the last one without an end; of one that is too long, enough
// to see that it is.
func readLine(in *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := in.ReadSlice('\n')
		if len(line) <= maxBody {
			line = append(line, part...)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

// checkLine says why a line is not the body of an order.
func checkLine(body []byte) error {
	if len(body) > maxBody {
		return fmt.Errorf("longer than %d bytes, which is the most a worker takes", maxBody)
	}
	var object map[string]json.RawMessage
	err := json.Unmarshal(body, &object)
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		return fmt.Errorf("not JSON: at byte %d: %w", syntax.Offset, err)
	}
	if err != nil || object == nil {
		return errors.New("JSON, but not an object")
	}
	return nil
}
