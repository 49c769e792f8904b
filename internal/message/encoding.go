package message

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-faster/jx"
)

// The outbox keeps properties and headers as JSON objects that a writer in any language can
// build: null, true, "text" and 42 mean nil, bool, string and int64. Everything JSON cannot
// say is an object with one member naming its AMQP type, the value as text:
//
//	{"$int32":"42"}  {"$float64":"0.5"}  {"$bytes":"aGk="}  {"$text":"/w=="}  {"$time":"2026-11-29T12:00:00Z"}
//	{"$decimal":"2,1999"}  {"$table":{…}}  {"$list":[…]}
//
// $bytes and $text are base64; $text is a string that is not valid UTF-8.

// EncodeHeaders returns h in the outbox's typed encoding, sorted by name. The error names the
// header whose value AMQP cannot carry.
func EncodeHeaders(h Headers) ([]byte, error) {
	var e jx.Encoder
	if err := encodeTable(&e, h); err != nil {
		return nil, err
	}
	return e.Bytes(), nil
}

// DecodeHeaders reads what EncodeHeaders wrote. Empty input is an empty table.
func DecodeHeaders(b []byte) (Headers, error) {
	h := Headers{}
	if err := decodeObject(b, h.member); err != nil {
		return nil, fmt.Errorf("decode headers: %w", err)
	}
	return h, nil
}

// decodeObject calls member for each member of the object that b is. Empty input has none, nor
// has null.
func decodeObject(b []byte, member func(d *jx.Decoder, name string) error) error {
	if b = bytes.TrimSpace(b); len(b) == 0 || string(b) == "{}" {
		return nil
	}
	if !utf8.Valid(b) {
		return errors.New("they are not valid UTF-8")
	}
	d := jx.DecodeBytes(b)
	var err error
	if d.Next() == jx.Null {
		err = d.Null()
	} else {
		err = eachMember(d, member)
	}
	if err != nil {
		return err
	}
	if !errors.Is(d.Skip(), io.EOF) {
		return errors.New("there is more behind the object")
	}
	return nil
}

func encodeTable(e *jx.Encoder, h Headers) error {
	e.ObjStart()
	for _, k := range slices.Sorted(maps.Keys(h)) {
		if !utf8.ValidString(k) {
			return fmt.Errorf("header name %q is not valid UTF-8", k)
		}
		e.FieldStart(k)
		if err := encodeValue(e, h[k]); err != nil {
			return fmt.Errorf("header %q: %w", k, err)
		}
	}
	e.ObjEnd()
	return nil
}

func encodeTagged(e *jx.Encoder, tag, v string) {
	e.ObjStart()
	e.FieldStart(tag)
	e.Str(v)
	e.ObjEnd()
}

func encodeValue(e *jx.Encoder, v any) error {
	switch v := v.(type) {
	case nil:
		e.Null()
	case bool:
		e.Bool(v)
	case int64:
		e.Int64(v)
	case int:
		e.Int(v)
	case string:
		if utf8.ValidString(v) {
			e.Str(v)
		} else {
			encodeTagged(e, "$text", base64.StdEncoding.EncodeToString([]byte(v)))
		}
	case []byte:
		encodeTagged(e, "$bytes", base64.StdEncoding.EncodeToString(v))
	case int8, int16, int32, uint8, uint16, uint32:
		encodeTagged(e, fmt.Sprintf("$%T", v), fmt.Sprint(v))
	case float32:
		encodeTagged(e, "$float32", strconv.FormatUint(uint64(math.Float32bits(v)), 16))
	case float64:
		encodeTagged(e, "$float64", strconv.FormatFloat(v, 'g', -1, 64))
	case time.Time:
		encodeTagged(e, "$time", encodeTime(v))
	case Decimal:
		encodeTagged(e, "$decimal", fmt.Sprintf("%d,%d", v.Scale, v.Value))
	case Headers:
		e.ObjStart()
		e.FieldStart("$table")
		if err := encodeTable(e, v); err != nil {
			return err
		}
		e.ObjEnd()
	case []any:
		e.ObjStart()
		e.FieldStart("$list")
		e.ArrStart()
		for i := range v {
			if err := encodeValue(e, v[i]); err != nil {
				return err
			}
		}
		e.ArrEnd()
		e.ObjEnd()
	default:
		return fmt.Errorf("type %T has no AMQP field type", v)
	}
	return nil
}

func decodeTable(d *jx.Decoder) (Headers, error) {
	h := Headers{}
	return h, eachMember(d, h.member)
}

// eachMember calls member for each member of an object, and gives its error as it is.
func eachMember(d *jx.Decoder, member func(d *jx.Decoder, name string) error) error {
	members, err := d.ObjIter()
	if err != nil {
		return err
	}
	for members.Next() {
		if err := member(d, string(members.Key())); err != nil {
			return err
		}
	}
	return members.Err()
}

// member reads the value of one header.
func (h Headers) member(d *jx.Decoder, name string) error {
	v, err := decodeValue(d)
	if err != nil {
		return fmt.Errorf("header %q: %w", name, err)
	}
	h[name] = v
	return nil
}

func decodeValue(d *jx.Decoder) (any, error) {
	switch d.Next() {
	case jx.Null:
		return nil, d.Null()
	case jx.Bool:
		return d.Bool()
	case jx.String:
		return d.Str()
	case jx.Number:
		n, err := d.Num()
		if err != nil {
			return nil, err
		}
		if i, err := strconv.ParseInt(string(n), 10, 64); err == nil {
			return i, nil
		}
		return strconv.ParseFloat(string(n), 64)
	case jx.Array:
		return nil, errors.New(`a list is written {"$list":[…]}`)
	case jx.Object:
		return decodeTagged(d)
	}
	return nil, cmp.Or(d.Skip(), errors.New("a value is missing"))
}

func decodeTagged(d *jx.Decoder) (v any, err error) {
	members := 0
	oneMember := errors.New(`an object needs exactly one member naming its type, like {"$int32":"42"}`)
	err = eachMember(d, func(d *jx.Decoder, tag string) (err error) {
		if members++; members > 1 || len(tag) == 0 || tag[0] != '$' {
			return oneMember
		}
		switch tag {
		case "$table":
			v, err = decodeTable(d)
			return err
		case "$list":
			v, err = decodeList(d)
			return err
		}
		s, err := d.Str()
		if err != nil {
			return fmt.Errorf("%s: %w", tag, err)
		}
		if v, err = decodeScalar(tag, s); err != nil {
			return fmt.Errorf("%s %q: %w", tag, s, err)
		}
		return nil
	})
	if err == nil && members == 0 {
		err = oneMember
	}
	return v, err
}

func decodeList(d *jx.Decoder) (any, error) {
	list := []any{}
	elements, err := d.ArrIter()
	if err != nil {
		return nil, err
	}
	for elements.Next() {
		v, err := decodeValue(d)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	return list, elements.Err()
}

func decodeScalar(tag, s string) (any, error) {
	switch tag {
	case "$text":
		b, err := base64.StdEncoding.DecodeString(s)
		return string(b), err
	case "$bytes":
		return base64.StdEncoding.DecodeString(s)
	case "$int8":
		n, err := strconv.ParseInt(s, 10, 8)
		return int8(n), err
	case "$int16":
		n, err := strconv.ParseInt(s, 10, 16)
		return int16(n), err
	case "$int32":
		n, err := strconv.ParseInt(s, 10, 32)
		return int32(n), err
	case "$uint8":
		n, err := strconv.ParseUint(s, 10, 8)
		return uint8(n), err
	case "$uint16":
		n, err := strconv.ParseUint(s, 10, 16)
		return uint16(n), err
	case "$uint32":
		n, err := strconv.ParseUint(s, 10, 32)
		return uint32(n), err
	case "$float32":
		n, err := strconv.ParseUint(s, 16, 32)
		return math.Float32frombits(uint32(n)), err
	case "$float64":
		return strconv.ParseFloat(s, 64)
	case "$time":
		return decodeTime(s)
	case "$decimal":
		scale, value, _ := strings.Cut(s, ",")
		n, err := strconv.ParseUint(scale, 10, 8)
		if err != nil {
			return nil, err
		}
		v, err := strconv.ParseInt(value, 10, 32)
		return Decimal{Scale: uint8(n), Value: int32(v)}, err
	}
	return nil, fmt.Errorf("unknown type")
}

// encodeTime writes years that RFC 3339 has not as @ and Unix seconds: an AMQP timestamp is any
// 64 bits, and a client that sends milliseconds is in year 58,000.
func encodeTime(t time.Time) string {
	s := t.UTC().Format(time.RFC3339Nano)
	if back, err := time.Parse(time.RFC3339Nano, s); err == nil && back.Equal(t) {
		return s
	}
	return "@" + strconv.FormatInt(t.Unix(), 10)
}

func decodeTime(s string) (time.Time, error) {
	seconds, ok := strings.CutPrefix(s, "@")
	if !ok {
		return time.Parse(time.RFC3339Nano, s)
	}
	n, err := strconv.ParseInt(seconds, 10, 64)
	return time.Unix(n, 0).UTC(), err
}
