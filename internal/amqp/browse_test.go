package amqp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"backstep/internal/message"
	"backstep/internal/testenv"
)

// bodies browses a queue and returns what it saw.
func bodies(t *testing.T, c *Client, queue string, most int) (got []string) {
	t.Helper()
	seen, err := NewConsumer(c, "test").Browse(within(t), queue, most, func(d *message.Delivery) (bool, error) {
		got = append(got, string(d.Body))
		return false, nil
	})
	if err != nil || seen.Seen != len(got) {
		t.Fatalf("Browse saw %d of %d, %v", seen.Seen, len(got), err)
	}
	return got
}

// numbers are the bodies that fill gives.
func numbers(n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprint(i))
	}
	return all
}

// parkedQueue declares a queue as those for parked messages are, and puts total messages into it.
func parkedQueue(t *testing.T, c *Client, total int) string {
	t.Helper()
	const name = "orders.parked"
	declare(t, c, "orders")
	if err := channel(t, c).QueueBind(name, name, message.CommandsExchange, false, nil); err != nil {
		t.Fatal(err)
	}
	fill(t, c, name, total)
	return name
}

// TestBrowse: looking changes nothing, however often one looks, and whatever one sees of it.
func TestBrowse(t *testing.T) {
	const total = 2100 // more than two windows
	c := start(t, Config{URL: testenv.Vhost(t).URL})
	parked := parkedQueue(t, c, total)
	all := numbers(total)
	for range 2 {
		if got := bodies(t, c, parked, total); !slices.Equal(got, all) {
			t.Errorf("saw %d, or in another order: %v", len(got), got)
		}
	}
	n := 0
	seen, err := NewConsumer(c, "test").Browse(within(t), parked, total, func(*message.Delivery) (bool, error) {
		if n++; n == 400 {
			return false, ErrEnough
		}
		return false, nil
	})
	if err != nil || seen.Seen != 400 || seen.Short || n != 400 {
		t.Errorf("Browse = %+v, %v, want 400 and not short; see was called %d times", seen, err, n)
	}
	if got := bodies(t, c, parked, total); !slices.Equal(got, all) {
		t.Errorf("after one that had seen enough: %v", got)
	}
}

// TestBrowseCutShort: nothing is lost, whatever ends a browse.
func TestBrowseCutShort(t *testing.T) {
	const total = 1200
	c := start(t, Config{URL: testenv.Vhost(t).URL})
	parked := parkedQueue(t, c, total)
	whole := func(after string) {
		t.Helper()
		got := bodies(t, c, parked, total)
		slices.SortFunc(got, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b)) })
		if !slices.Equal(got, numbers(total)) {
			t.Errorf("after %s: %d messages: %v", after, len(got), got)
		}
	}
	for _, most := range []int{300, 1, 0} {
		if got := bodies(t, c, parked, most); len(got) != most {
			t.Errorf("saw %d, want %d", len(got), most)
		}
		whole("a look at some")
	}
	bad := errors.New("bad")
	if seen, err := NewConsumer(c, "test").Browse(within(t), parked, total, func(d *message.Delivery) (bool, error) {
		if string(d.Body) == "0" {
			return false, bad
		}
		return false, nil
	}); !errors.Is(err, bad) {
		t.Errorf("Browse = %+v, %v, want see's error", seen, err)
	}
	whole("an error")
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	if _, err := NewConsumer(c, "test").Browse(ctx, parked, total, func(d *message.Delivery) (bool, error) {
		if string(d.Body) == "1100" {
			cancel()
		}
		return false, nil
	}); !errors.Is(err, context.Canceled) {
		t.Errorf("Browse = %v, want the context's error", err)
	}
	whole("the end of its context")
}

// TestBrowseTakes: what is taken is gone, the rest is as it was.
func TestBrowseTakes(t *testing.T) {
	const total = 400
	c := start(t, Config{URL: testenv.Vhost(t).URL})
	parked := parkedQueue(t, c, total)
	var want []string
	i := 0
	seen, err := NewConsumer(c, "test").Browse(within(t), parked, total, func(d *message.Delivery) (bool, error) {
		i++
		if i%3 == 0 || i > 100 && i < 200 {
			return true, nil
		}
		want = append(want, string(d.Body))
		return false, nil
	})
	if err != nil || (seen != Browsed{Seen: total}) {
		t.Fatalf("Browse = %+v, %v", seen, err)
	}
	if got := bodies(t, c, parked, len(want)); !slices.Equal(got, want) {
		t.Errorf("left are %v, want %v", got, want)
	}
	if n, err := session(t, c).Depth(within(t), parked); n != len(want) || err != nil {
		t.Errorf("%d are left, %v, want %d", n, err, len(want))
	}
}

// TestBrowseLarge: a large message makes the next windows small, and no more than those.
func TestBrowseLarge(t *testing.T) {
	c := start(t, Config{URL: testenv.Vhost(t).URL})
	parked := parkedQueue(t, c, 3)
	ch := acquire(t, newPublisher(t, c, PublisherConfig{Window: 10}))
	defer ch.Release()
	m := command(parked)
	m.Body = make([]byte, 5<<20)
	publish(t, ch, m)
	results(t, ch, 1)
	fill(t, c, parked, 400)
	const total = 3 + 1 + 400
	b := browser{consumer: NewConsumer(c, "test"), queue: parked, see: func(*message.Delivery) (bool, error) { return false, nil }}
	if err := b.run(within(t), total); err != nil {
		t.Fatal(err)
	}
	var windows []int
	for _, w := range b.windows {
		windows = append(windows, w.prefetch)
	}
	if err := b.giveBack(); err != nil {
		t.Fatal(err)
	}
	// The second has the large one, so the third has as many as fit if all are like that.
	if want := []int{1, 8, 3, 24, 192, 176}; !slices.Equal(windows, want) {
		t.Errorf("windows of %v, want %v", windows, want)
	}
	if n, err := session(t, c).Depth(within(t), parked); n != total || err != nil {
		t.Errorf("%d are left, %v, want %d", n, err, total)
	}
}

// TestBrowseWhatOthersHold: it does not wait for what somebody else has in hand.
func TestBrowseWhatOthersHold(t *testing.T) {
	c := start(t, Config{URL: testenv.Vhost(t).URL})
	parked := parkedQueue(t, c, 5)
	other := subscribe(t, c, parked, 2)
	receive(t, other)
	receive(t, other)
	if got := bodies(t, c, parked, 5); !slices.Equal(got, []string{"2", "3", "4"}) {
		t.Errorf("saw %v, want the three that are left", got)
	}
	for most, want := range map[int]Browsed{0: {Others: 1}, 3: {Seen: 3, Others: 1}, 4: {Seen: 3, Others: 1, Short: true}} {
		got, err := NewConsumer(c, "test").Browse(within(t), parked, most, func(*message.Delivery) (bool, error) { return false, nil })
		if err != nil || got != want {
			t.Errorf("Browse of %d = %+v, %v, want %+v", most, got, err, want)
		}
	}
}
