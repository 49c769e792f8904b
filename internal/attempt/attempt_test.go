package attempt_test

import (
	"math"
	"testing"
	"time"

	"backstep/internal/attempt"
)

func TestDelay(t *testing.T) {
	for _, base := range []time.Duration{1, time.Millisecond, time.Second, time.Minute, 24 * time.Hour, math.MaxInt64} {
		for _, n := range []int{1, 2, 10, 29, 30, 31, 62, 63, 64, 65, 1000, math.MaxInt} {
			limit := time.Duration(min(float64(5*time.Minute), float64(base)*math.Pow(2, float64(n-1))))
			var longest time.Duration
			for range 200 {
				d := attempt.Delay(n, base, 5*time.Minute)
				if d < 0 || d >= max(limit, 1) {
					t.Fatalf("base %s, attempt %d: %s, want less than %s", base, n, d, limit)
				}
				longest = max(longest, d)
			}
			if longest < limit/2 {
				t.Errorf("base %s, attempt %d: never longer than %s of %s", base, n, longest, limit)
			}
		}
	}
}
