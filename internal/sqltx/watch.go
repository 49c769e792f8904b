package sqltx

import (
	"context"
	"errors"
	"sync"
	"time"
)

// ErrLeftBehind means that code in a transaction was left behind. What it still does has no effect.
var ErrLeftBehind = errors.New("does not heed its context")

// Watch is over transactions with code that may not heed its context, nor return: such code can be left
// behind, but not ended.
type Watch struct {
	mu sync.Mutex // guards below
	tx *Tx        // that such code is in; nil: none is
}

// Enter notes that such code is called in tx.
func (w *Watch) Enter(tx *Tx) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tx = tx
}

// Leave notes that it has returned, and the transaction is about to end.
func (w *Watch) Leave() { w.Enter(nil) }

// Run calls run in a goroutine of its own, which it may end, and waits for that. ErrLeftBehind means that
// the code has not returned some time after ctx has ended, so that its transaction was rolled back from
// outside: then what belongs to run must not be touched any more.
func (w *Watch) Run(ctx context.Context, grace time.Duration, run func()) error {
	ended := make(chan struct{})
	go func() { defer close(ended); run() }()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
	}
	if endsWithin(grace, ended) {
		return nil
	}
	w.mu.Lock()
	tx := w.tx
	w.mu.Unlock()
	if tx == nil { // it will end by itself: COMMIT does not heed the context either, and is not to be given up
		<-ended
		return nil
	}
	gone := make(chan struct{})
	go func() { defer close(gone); tx.Abandon() }()
	endsWithin(grace, gone) // if it has to wait for what the code does with tx, it goes on beside
	return ErrLeftBehind
}

// endsWithin waits for the end of something, but no longer than d, and reports whether it has come.
func endsWithin(d time.Duration, end <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-end:
		return true
	case <-t.C:
		return false
	}
}
