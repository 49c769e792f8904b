package message

import (
	"testing"
	"time"
)

func TestTime(t *testing.T) {
	stamp := time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)
	tests := []struct {
		name string
		id   string
		want time.Time
	}{
		{"UUIDv7", "0194f1a4-5c00-7000-8000-000000000000", time.UnixMilli(0x0194f1a45c00).UTC()},
		{"UUIDv4 says nothing", "7f2b3c1e-8a4d-4f6b-9c1d-2e3f4a5b6c7d", stamp},
		{"foreign id", "order-17", stamp},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := Message{Properties: Properties{MessageID: tt.id, Timestamp: stamp}}
			if got := m.Time(); !got.Equal(tt.want) {
				t.Errorf("Time of id %s = %s, want %s", tt.id, got, tt.want)
			}
		})
	}
	m := Message{Properties: Properties{MessageID: NewID()}}
	if age := time.Since(m.Time()); age < 0 || age > time.Minute {
		t.Errorf("a new id is %s old", age)
	}
}

func TestHeaderInt(t *testing.T) {
	tests := []struct {
		v    any
		want int
		ok   bool
	}{
		{int8(3), 3, true}, {uint32(3), 3, true}, {int64(-3), -3, true}, {3.0, 3, true}, {"3", 3, true}, {[]byte("3"), 3, true},
		{3.5, 0, false}, {"x", 0, false}, {nil, 0, false}, {true, 0, false},
	}
	for _, tt := range tests {
		if got, ok := (Headers{"h": tt.v}).Int("h"); got != tt.want || ok != tt.ok {
			t.Errorf("Int of %#v = %d, %t, want %d, %t", tt.v, got, ok, tt.want, tt.ok)
		}
	}
}

func TestAttemptAndRequestID(t *testing.T) {
	m := Message{Properties: Properties{MessageID: "b"}}
	if m.Attempt() != 1 || m.RequestID() != "b" || m.Key() != "b" {
		t.Errorf("defaults: attempt %d, request %q, key %q", m.Attempt(), m.RequestID(), m.Key())
	}
	m.Headers = Headers{HeaderAttempt: int32(4), HeaderRequestID: "a"}
	m.OrderingKey = "k"
	if m.Attempt() != 4 || m.RequestID() != "a" || m.Key() != "k" {
		t.Errorf("set: attempt %d, request %q, key %q", m.Attempt(), m.RequestID(), m.Key())
	}
	m.Headers[HeaderAttempt] = int32(-1)
	if m.Attempt() != 1 {
		t.Errorf("a negative attempt counts as %d, want 1", m.Attempt())
	}
}
