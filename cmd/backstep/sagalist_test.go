package main

import (
	"testing"

	"backstep/internal/saga"
)

// TestReasonOf: a saga that is to be undone has a reason, though nothing has failed, and what other columns say is left out.
func TestReasonOf(t *testing.T) {
	for want, s := range map[string]saga.Summary{
		"":                           {},
		"HTTP 500":                   {LastError: "HTTP 500", CancelReason: "cancelled: sick"},
		"payment gateway: away":      {LastError: "compensation of step charge-payment failed at attempt 5: payment gateway: away"},
		"to be undone: cancelled: x": {CancelReason: "cancelled: x"},
	} {
		if got := reasonOf(s); got != want {
			t.Errorf("%+v: %q, want %q", s, got, want)
		}
	}
}
