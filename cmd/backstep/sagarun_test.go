package main

import "testing"

// TestStopped: how many failures stop a run, and why they may be more than --max-failures.
func TestStopped(t *testing.T) {
	t.Parallel()
	for want, tt := range map[string]struct{ failures, left int }{
		"stopped after 3 failures (--max-failures 3); 1 saga is left as it is":                                                             {3, 1},
		"stopped after 4 failures (--max-failures 3; it counts those that have failed since they were done); 2 sagas are left as they are": {4, 2},
	} {
		r := sagaRun{sagaAction: &sagaAction{maxFailures: 3}, left: tt.left}
		if got := r.stopped(tt.failures); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
