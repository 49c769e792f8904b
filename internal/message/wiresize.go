package message

import (
	"fmt"
	"math"
	"time"
)

const (
	// MaxHeaderBytes is the largest encoded header table that is published. A frame must hold it;
	// the broker's default frame is 128 KiB, and the parked copy of a message carries more headers.
	MaxHeaderBytes = 64 << 10

	// What amqp091 v1.16 reads of a field table (read.go). It cuts the connection over more,
	// that of whoever consumes the message, or ours when the broker returns it.
	maxTableDepth   = 32
	maxTableEntries = 8192
)

// WireSize returns how many bytes h has in AMQP's encoding. An error says what of it cannot be
// published, and names the header: neither we, nor the broker, nor a reader could take it.
func (h Headers) WireSize() (int, error) {
	n, err := tableSize(h, 0)
	if err == nil && n > MaxHeaderBytes {
		err = fmt.Errorf("the headers have %d bytes encoded, the limit is %d", n, MaxHeaderBytes)
	}
	return n, err
}

// tableSize returns how many bytes t has on the wire.
func tableSize(t Headers, depth int) (int, error) {
	if depth > maxTableDepth {
		return 0, fmt.Errorf("headers are nested deeper than %d", maxTableDepth)
	}
	if len(t) > maxTableEntries {
		return 0, fmt.Errorf("a header table has %d entries, readers take %d", len(t), maxTableEntries)
	}
	size := 4
	for k, v := range t {
		if len(k) > MaxIDBytes {
			return 0, fmt.Errorf("a header name has %d bytes, AMQP allows %d", len(k), MaxIDBytes)
		}
		n, err := fieldSize(v, depth)
		if err != nil {
			return 0, fmt.Errorf("%w (header %q)", err, k)
		}
		size += 1 + len(k) + n
	}
	return size, nil
}

// fieldSize returns how many bytes v has on the wire with its type.
func fieldSize(v any, depth int) (int, error) {
	switch v := v.(type) {
	case nil:
		return 1, nil
	case bool, int8, uint8:
		return 1 + 1, nil
	case int16, uint16:
		return 1 + 2, nil
	case int32, uint32:
		return 1 + 4, nil
	case float32:
		return 1 + 4, checkFloat(float64(v))
	case Decimal:
		return 1 + 5, nil
	case int, int64, time.Time:
		return 1 + 8, nil
	case float64:
		return 1 + 8, checkFloat(v)
	case string:
		return 1 + 4 + len(v), nil
	case []byte:
		return 1 + 4 + len(v), nil
	case Headers:
		n, err := tableSize(v, depth+1)
		return 1 + n, err
	case []any:
		return listSize(v, depth+1)
	}
	return 0, fmt.Errorf("AMQP has no type for %T", v)
}

// checkFloat refuses what Erlang has no number for: RabbitMQ closes the connection over it
// with 541 INTERNAL_ERROR.
func checkFloat(f float64) error {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return fmt.Errorf("RabbitMQ cannot read the number %v", f)
	}
	return nil
}

func listSize(list []any, depth int) (int, error) {
	if depth > maxTableDepth {
		return 0, fmt.Errorf("headers are nested deeper than %d", maxTableDepth)
	}
	if len(list) > maxTableEntries {
		return 0, fmt.Errorf("a list has %d entries, readers take %d", len(list), maxTableEntries)
	}
	size := 1 + 4
	for _, v := range list {
		n, err := fieldSize(v, depth)
		if err != nil {
			return 0, err
		}
		size += n
	}
	return size, nil
}
