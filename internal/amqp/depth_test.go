package amqp

import (
	"errors"
	"testing"

	"backstep/internal/testenv"
)

func TestDepth(t *testing.T) {
	b := testenv.Vhost(t)
	c := start(t, Config{URL: b.URL})
	s := session(t, c)
	if n, err := s.Depth(within(t), "orders"); !errors.Is(err, ErrMissing) {
		t.Errorf("Depth of no queue = %d, %v, want ErrMissing", n, err)
	}
	declare(t, c, "orders")
	if n, err := s.Depth(within(t), "orders"); n != 0 || err != nil {
		t.Errorf("Depth of an empty queue = %d, %v", n, err)
	}
	fill(t, c, "orders", 3)
	if n, err := s.Depth(within(t), "orders"); n != 3 || err != nil {
		t.Errorf("Depth = %d, %v, want 3", n, err)
	}
}
