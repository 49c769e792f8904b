package outbox_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"backstep/internal/message"
	"backstep/internal/outbox"
)

// fake is a Publisher for outcomes that a real broker cannot be made to give on demand. It
// keeps to what Publisher and Channel promise. Its functions may be nil.
type fake struct {
	// ReadyFunc is asked by Ready; nil means always.
	ReadyFunc func() bool
	// PublishFunc decides what becomes of a message; nil means that it is confirmed. It may
	// call the channel's methods; without that the message stays in flight. An error is
	// Publish's own.
	PublishFunc func(c *fakeChannel, tag uint64, m *message.Message) error

	mu       sync.Mutex // guards below; not held while the functions run
	sent     []string   // message ids, in order
	inFlight int
	most     int // in flight at one time
	opened   int
	lent     int
}

func (f *fake) Ready() bool { return f.ReadyFunc == nil || f.ReadyFunc() }

func (f *fake) Acquire(ctx context.Context) (outbox.Channel, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.opened++
	f.lent++
	return &fakeChannel{f: f, flights: map[uint64]*message.Message{}, results: make(chan message.Result, 100_000)}, ctx.Err()
}

// look calls see with the fake locked.
func (f *fake) look(see func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	see()
}

// all returns the ids of all publishes, in order.
func (f *fake) all() (ids []string) {
	f.look(func() { ids = slices.Clone(f.sent) })
	return ids
}

// times returns how often a message was published.
func (f *fake) times(id string) (n int) {
	for _, s := range f.all() {
		if s == id {
			n++
		}
	}
	return n
}

// fakeChannel is a confirm channel of a fake.
type fakeChannel struct {
	f       *fake
	flights map[uint64]*message.Message // guarded by f.mu, as what follows
	gone    bool
	results chan message.Result
}

var errGone = errors.New("channel is gone")

func (c *fakeChannel) Publish(_ context.Context, tag uint64, m *message.Message) error {
	f := c.f
	f.mu.Lock()
	if c.gone {
		f.mu.Unlock()
		return errGone
	}
	f.sent = append(f.sent, m.MessageID)
	f.inFlight++
	f.most = max(f.most, f.inFlight)
	c.flights[tag] = m
	f.mu.Unlock()
	if f.PublishFunc == nil {
		c.answer(tag, message.Confirmed, "")
		return nil
	}
	if err := f.PublishFunc(c, tag, m); err != nil {
		f.look(func() { c.land(tag) })
		return err
	}
	return nil
}

// answer gives a message its result.
func (c *fakeChannel) answer(tag uint64, kind message.ResultKind, reason string) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if c.land(tag) {
		c.results <- message.Result{Tag: tag, Kind: kind, Reason: reason}
	}
}

// land takes a message out of flight; f.mu is held.
func (c *fakeChannel) land(tag uint64) bool {
	if _, ok := c.flights[tag]; !ok {
		return false
	}
	delete(c.flights, tag)
	c.f.inFlight--
	return true
}

// end closes the channel; what is in flight gets a result of this kind.
func (c *fakeChannel) end(kind message.ResultKind, reason string) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	c.gone = true
	for tag := range c.flights {
		c.land(tag)
		c.results <- message.Result{Tag: tag, Kind: kind, Reason: reason}
	}
}

func (c *fakeChannel) Results() <-chan message.Result { return c.results }

func (c *fakeChannel) Release() { c.f.look(func() { c.f.lent-- }) }

func (c *fakeChannel) Destroy() {
	c.end(message.Lost, "closed by us")
	c.Release()
}

// back demands that every channel has been handed back.
func (f *fake) back(t testing.TB) {
	t.Helper()
	f.look(func() {
		if f.lent != 0 {
			t.Errorf("%d channels were not handed back", f.lent)
		}
	})
}
