package main

import (
	"testing"
	"time"
)

func TestShort(t *testing.T) {
	tests := []struct {
		d    time.Duration
		want string
	}{
		{0, "0s"},
		{1234 * time.Microsecond, "1ms"},
		{2345 * time.Millisecond, "2.3s"},
		{-2345 * time.Millisecond, "-2.3s"},
		{61*time.Second + 400*time.Millisecond, "1m1s"},
		{50 * time.Hour, "2d2h"},
	}
	for _, tt := range tests {
		if got := short(tt.d); got != tt.want {
			t.Errorf("short(%s) = %q, want %q", tt.d, got, tt.want)
		}
	}
}

func TestPercentile(t *testing.T) {
	var hundred []time.Duration
	for i := range 100 {
		hundred = append(hundred, time.Duration(i+1))
	}
	tests := []struct {
		in   []time.Duration
		p    float64
		want time.Duration
	}{
		{hundred, 0.50, 50},
		{hundred, 0.99, 99},
		{hundred[:1], 0.99, 1},
		{hundred[:2], 0.50, 1},
		{hundred[:3], 0.50, 2},
	}
	for _, tt := range tests {
		if got := percentile(tt.in, tt.p); got != tt.want {
			t.Errorf("percentile of %d at %v = %d, want %d", len(tt.in), tt.p, got, tt.want)
		}
	}
}

func TestVhost(t *testing.T) {
	for url, want := range map[string]string{
		"amqp://a:b@h":         "/",
		"amqp://a:b@h:5672/":   "/",
		"amqp://a:b@h/orders":  "orders",
		"amqp://a:b@h/%2F":     "/",
		"amqp://a:b@h/a%2Fb":   "a/b",
		"amqp://a:b@h/v?x=y":   "v",
		"amqp://a:b@h/%2Fdemo": "/demo",
	} {
		if got, err := vhost(url); got != want || err != nil {
			t.Errorf("vhost(%q) = %q, %v, want %q", url, got, err, want)
		}
	}
}
