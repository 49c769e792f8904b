package message

import (
	"bytes"
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"
)

var everyType = Headers{
	"nil": nil, "bool": true, "int64": int64(math.MinInt64), "text": "grüße 😀", "empty": "",
	"bytes": []byte{0, 255}, "not utf-8": "\xff\xfe", "int8": int8(-8), "int16": int16(-16), "int32": int32(-32),
	"uint8": uint8(8), "uint16": uint16(16), "uint32": uint32(math.MaxUint32),
	"float32": float32(0.1), "float64": 0.1, "time": time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC),
	"decimal": Decimal{Scale: 2, Value: -1999},
	"table":   Headers{"inner": int32(1), "deeper": Headers{"list": []any{int64(1), "two", []byte("three"), nil}}},
	"list":    []any{Headers{"a": true}, []any{}},
}

func TestHeadersSurvive(t *testing.T) {
	b, err := EncodeHeaders(everyType)
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeHeaders(b)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, everyType) {
		t.Errorf("decode(encode(h)) = %#v, want %#v", got, everyType)
	}
}

func TestDecodeHeadersWrittenByHand(t *testing.T) {
	tests := []struct {
		name, in string
		want     Headers
		fault    string
	}{
		{"nothing", "", Headers{}, ""},
		{"plain values", `{"a":"x","n":42,"b":false,"z":null}`, Headers{"a": "x", "n": int64(42), "b": false, "z": nil}, ""},
		{"a fraction is a float64", `{"f":0.5}`, Headers{"f": 0.5}, ""},
		{"typed", `{"n":{"$int32":"7"}}`, Headers{"n": int32(7)}, ""},
		{"not JSON", `{`, nil, "decode headers"},
		{"not UTF-8", "{\"\xff\":1}", nil, "UTF-8"},
		{"more behind it", `{} {}`, nil, "more behind"},
		{"garbage behind it", `{} x`, nil, "more behind"},
		{"a brace behind it", `{"a":1}}`, nil, "more behind"},
		{"a comma behind it", `{},`, nil, "more behind"},
		{"a NUL behind it", "{}\x00", nil, "more behind"},
		{"garbage behind null", `nullx`, nil, "more behind"},
		{"a quote behind it", `{}"`, nil, "more behind"},
		{"space behind it", " {} \n", Headers{}, ""},
		{"garbage in a decimal", `{"d":{"$decimal":"2,1999abc"}}`, nil, "header \"d\""},
		{"null", `null`, Headers{}, ""},
		{"no value", `{"a":}`, nil, "header \"a\""},
		{"cut off", `{"a":`, nil, "decode headers"},
		{"two commas", `{"a":1,,"b":2}`, nil, "decode headers"},
		{"a comma too many", `{"a":1,}`, nil, "decode headers"},
		{"not an object", `[]`, nil, "decode headers"},
		{"a bare list", `{"l":[1]}`, nil, "$list"},
		{"an untyped object", `{"o":{"a":1,"b":2}}`, nil, "exactly one member"},
		{"an unknown type", `{"o":{"$int128":"1"}}`, nil, "unknown type"},
		{"out of range", `{"o":{"$int8":"300"}}`, nil, "out of range"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := DecodeHeaders([]byte(tt.in))
			if tt.fault != "" {
				if err == nil || !strings.Contains(err.Error(), tt.fault) {
					t.Errorf("DecodeHeaders(%s) gave error %v, want one about %q", tt.in, err, tt.fault)
				}
				return
			}
			if err != nil || !reflect.DeepEqual(got, tt.want) {
				t.Errorf("DecodeHeaders(%s) = %#v, %v, want %#v", tt.in, got, err, tt.want)
			}
		})
	}
}

// An AMQP timestamp is any 64 bits of seconds.
func TestAnyTimeSurvives(t *testing.T) {
	for _, n := range []int64{0, -1, 1e12, -1e12, 1 << 62, -1 << 62, 253402300799, 253402300800, -62167219200, -62167219201} {
		want := time.Unix(n, 0).UTC()
		b, err := EncodeHeaders(Headers{"t": want})
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeHeaders(b)
		if at, ok := got["t"].(time.Time); err != nil || !ok || at.Unix() != n {
			t.Errorf("%d became %s and then %v, %v", n, b, got["t"], err)
		}
	}
}

func TestEncodeHeadersRefuses(t *testing.T) {
	for name, v := range map[string]any{"uint64": uint64(1), "struct": struct{}{}, "chan": make(chan int)} {
		if _, err := EncodeHeaders(Headers{"x": v}); err == nil || !strings.Contains(err.Error(), `"x"`) {
			t.Errorf("%s: error %v, want one that names the header", name, err)
		}
	}
}

func FuzzDecodeHeaders(f *testing.F) {
	seed, err := EncodeHeaders(everyType)
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{string(seed), `{}`, `{"a":1e300}`, `{"a":{"$time":"x"}}`, `{"a":{"$float32":"7fc00000"}}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		h, err := DecodeHeaders(in)
		if err != nil {
			return
		}
		if len(bytes.TrimSpace(in)) > 0 && !json.Valid(in) {
			t.Fatalf("this is no JSON and was decoded to %v", h)
		}
		b, err := EncodeHeaders(h)
		if err != nil {
			t.Fatalf("what decodes does not encode: %v", err)
		}
		again, err := DecodeHeaders(b)
		if err != nil {
			t.Fatalf("what encodes does not decode: %v", err)
		}
		b2, err := EncodeHeaders(again)
		if err != nil || string(b2) != string(b) { // bytes, because NaN is not itself
			t.Fatalf("encode∘decode changed %s to %s (%v)", b, b2, err)
		}
	})
}

func TestPropertiesSurvive(t *testing.T) {
	want := Properties{
		ContentType: "a", ContentEncoding: "b", DeliveryMode: 2, Priority: 255, CorrelationID: "c\xff", ReplyTo: "d",
		Expiration: "60000", MessageID: "id ", Timestamp: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Type: "e", UserID: "f", AppID: "g",
	}
	b, err := EncodeProperties(want)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := DecodeProperties(b); err != nil || got != want {
		t.Errorf("decode(encode(p)) = %+v, %v, want %+v", got, err, want)
	}
	if got, err := DecodeProperties([]byte(`{"type":"t","delivery_mode":2,"timestamp":1764417600}`)); err != nil ||
		got.Timestamp.Unix() != 1764417600 || got.Type != "t" {
		t.Errorf("properties written by hand: %+v, %v", got, err)
	}
	for _, bad := range []string{`{"priority":256}`, `{"delivery_mode":"x"}`, `{"timestamp":true}`, `{"typo":"t"}`, `{"type":1}`} {
		if _, err := DecodeProperties([]byte(bad)); err == nil {
			t.Errorf("DecodeProperties(%s) gave no error", bad)
		}
	}
}
