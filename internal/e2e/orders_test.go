package e2e

import (
	"testing"
	"time"
)

func TestOrdersEndToEnd(t *testing.T) {
	w := newWheel(t)
	procs := append(w.together("relay", 2), w.together("worker", 3)...)
	w.awaitQueues()
	msgs, want := orders(100)
	w.submit(msgs...)
	w.rest(want.total(), 60*time.Second)
	w.verify(want)
	stopAll(procs...)
}
